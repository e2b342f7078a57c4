"""On a CUDA device: the kernels of the smooth loss up to k = 10."""

import math

import pytest
import torch

import topklass
import topklass.functional as TF
from cuda_cases import (
    NEEDS_GPU,
    SHAPES,
    check_determinism,
    check_error,
    each_kind,
    each_shape,
    problem,
    smooth,
)

pytestmark = NEEDS_GPU


@each_kind
@pytest.mark.parametrize("k", [1, 5, 10])
@each_shape
def test_error_is_at_most_twice_that_of_the_reference(shape, k, logits):
    check_error(shape, k, logits)


@pytest.mark.parametrize("k", [1, 5, 10])
@each_shape
def test_determinism(k, shape):
    check_determinism(shape, k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_half_precision_is_computed_in_float32(shape, dtype):
    scores, target = problem(*shape, dtype)
    loss, gradient = smooth(scores, target, 5, 1.0, "kernel")
    single, single_gradient = smooth(scores.float(), target, 5, 1.0, "kernel")
    assert torch.equal(loss, single.to(dtype))
    torch.testing.assert_close(gradient, single_gradient.to(dtype), rtol=1e-2, atol=1e-7)
    assert (gradient == single_gradient.to(dtype)).float().mean() > 0.999


@pytest.mark.parametrize("layout", ["transposed", "rows", "columns", "misaligned", "expanded"])
def test_layouts(layout):
    base = torch.randn(64, 1003, device="cuda")
    scores = {
        "transposed": torch.randn(1003, 64, device="cuda").T,
        "rows": torch.randn(128, 1003, device="cuda")[::2],
        "columns": torch.randn(64, 2006, device="cuda")[:, ::2],
        "misaligned": torch.randn(64 * 1003 + 1, device="cuda")[1:].view(64, 1003),
        "expanded": base[:1].expand(64, 1003),
    }[layout]
    target = torch.randint(1003, (128,), device="cuda")[::2]
    for k in (5, 20):
        for ours, copied in zip(
            smooth(scores, target, k, 1.0, "kernel"),
            smooth(scores.contiguous().clone(), target.contiguous(), k, 1.0, "kernel"),
            strict=True,
        ):
            torch.testing.assert_close(ours, copied, rtol=1e-6, atol=1e-9)
        aligned = smooth(base, target, k, 1.0, "kernel")  # after what was compiled for others
        exact = smooth(base.double(), target, k, 1.0, "reference")
        torch.testing.assert_close(aligned[1].double(), exact[1], rtol=1e-4, atol=1e-6)


def test_masked_and_ignored():
    scores, target = problem(6, 5000)
    scores = scores.detach()
    scores[0] = math.nan
    target[0] = -100
    scores[1, scores[1].argsort()[:-3]] = -math.inf
    target[1] = scores[1].argmax()
    scores[2, target[2]] = -math.inf
    scores[3, 7] = math.nan
    target[3] = 1
    loss, gradient = smooth(scores, target, 5, 1.0, "kernel")
    assert loss[:2].tolist() == [0.0, 0.0]
    assert torch.equal(gradient[:2], torch.zeros_like(gradient[:2]))
    assert loss[2] == math.inf
    assert loss[3].isnan()
    expected = smooth(scores[4:], target[4:], 5, 1.0, "reference")
    torch.testing.assert_close(loss[4:], expected[0])
    torch.testing.assert_close(gradient[4:], expected[1], rtol=1e-5, atol=1e-8)


def test_second_derivatives():
    logits, target = problem(4, 50)
    results = []
    for backend in ("kernel", "reference"):
        with topklass.use_backend(backend):
            loss = TF.smooth_topk_loss(logits, target, 3, reduction="none")
        (gradient,) = torch.autograd.grad(loss.sum(), logits, create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), logits)[0])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-7)


def test_batches_and_targets_anywhere_in_memory_compile_nothing_new():
    """Numbers of rows and the alignment of targets, weights and margins do not matter."""
    from topklass.kernels.smooth import gradient, row_constants

    def versions() -> list[int]:
        kernels = row_constants.smooth_loss_kernel, gradient.gradient_kernel
        return [len(k.device_caches[torch.cuda.current_device()][0]) for k in kernels]

    target, weight = (torch.ones(64, device="cuda", dtype=t) for t in (torch.long, torch.float))
    TF.smooth_topk_loss(problem(17, 40)[0], target[:17], 3, weight=weight[:40]).backward()
    before = versions()
    for rows in (1, 2, 16, 32, 33):
        logits, _ = problem(rows, 40)
        TF.smooth_topk_loss(logits, target[1 : rows + 1], 3, weight=weight[3:43]).backward()
    assert versions() == before
