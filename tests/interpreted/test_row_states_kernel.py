"""States of rows that others merge, by the kernels: those of the reference, and their gradient."""

import math

import pytest
import torch
import torch.distributed as dist
from smooth_cases import slow
from torch import Tensor

import topklass
from topklass.functional import smooth_topk_loss
from topklass.kernels.smooth.launch import plan
from topklass.operators.row_states import row_states

T = 3.0
SPLIT = next(n for n in range(2052, 10**6, 2048) if plan(4, n, 1, 3).parts > 1)


def run(scores: Tensor, labels: Tensor, k: int, slopes: Tensor, backend: str) -> list[Tensor]:
    """Heads, sums, scores of labels, and the gradient of their sum with these slopes."""
    leaf = scores.clone().requires_grad_()
    with topklass.use_backend(backend):
        states, _, label = row_states(leaf, labels, k, T)
    numbers = torch.cat([*states, label], 1)
    kept = numbers.isfinite()  # no slope at absent heads
    (gradient,) = torch.autograd.grad(numbers[kept] @ slopes[kept], leaf)
    return [*states, label, gradient]


@pytest.mark.parametrize(
    ("n", "k"), [(8, 3), (2, 3), slow(300, 11), slow(8, 1), slow(SPLIT, 3), slow(40, 32)]
)
def test_kernels_agree_with_the_reference(n, k):
    scores = 5 * torch.randn(4, n)
    scores[1, 1:] = -math.inf  # fewer than k classes
    labels = torch.tensor([[0], [-1], [n - 1], [-1]])
    slopes = torch.rand(4, 2 * k + 1, dtype=torch.float64) + 0.1
    slopes[1, -1] = 0.0  # of a label that is not here
    ours = run(scores, labels, k, slopes, "kernel")
    expected = run(scores, labels, k, slopes, "reference")
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-6)


def test_nan_is_told():
    scores = torch.randn(2, 8)
    scores[1, 3] = math.nan
    labels, slopes = torch.tensor([[2], [-1]]), torch.ones(2, 7, dtype=torch.float64)
    heads, sums, _, _ = run(scores, labels, 3, slopes, "kernel")
    assert torch.cat([heads, sums], 1).isnan().any(1).tolist() == [False, True]


def test_a_sharded_loss_by_kernels(tmp_path):
    """One rank that has all classes; ties at the threshold, too."""
    scores, target = 3 * torch.randn(6, 12), torch.tensor([0, 3, 5, 11, -100, 2])
    scores[0, 2:9] = scores[0, 2]
    scores[1, 4:] = -math.inf
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    results = []
    for loss in (topklass.distributed.sharded_smooth_topk_loss, smooth_topk_loss):
        leaf = scores.clone().requires_grad_()
        with topklass.use_backend("kernel"):
            value = loss(leaf, target, k=4, tau=0.3)
            value.backward()
        results.append((value.detach(), leaf.grad))
    dist.destroy_process_group()
    torch.testing.assert_close(*results, rtol=2e-6, atol=1e-7)
