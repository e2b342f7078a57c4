"""Targets of a few classes by the kernels, in one pass: the dense target's numbers in float64."""

import math

import pytest
import torch
from smooth_cases import slow
from torch import Tensor

import topklass
from topklass import SparseTarget
from topklass.functional import smooth_topk_loss, topk_cross_entropy
from topklass.kernels.wide.launch import plan

SPLIT = 2100
assert plan(3, SPLIT, 1, 3, 2).parts > 1


def run(backend: str, logits: Tensor, target: SparseTarget | Tensor, k, function, **options):
    """Loss and gradient."""
    leaf = logits.clone().requires_grad_()
    with topklass.use_backend(backend):
        value = function(leaf, target, k, **options)
        value.backward(torch.arange(1.0, value.numel() + 1).reshape(value.shape).to(value))
    return value.detach(), leaf.grad


def check(
    logits: Tensor,
    target: SparseTarget,
    k=3,
    function=smooth_topk_loss,
    tolerance: float = 1e-6,
    ignore_index: int = -100,
    **options,
) -> None:
    """Within the tolerance, relative to the largest number."""
    wide = SparseTarget(target.indices, target.weights.double())
    dense = wide.to_dense(logits.shape[1], ignore_index=ignore_index)
    numbers = {n: v.double() if isinstance(v, Tensor) else v for n, v in options.items()}
    exact = run("reference", logits.double(), dense, k, function, **numbers)
    ours = run("kernel", logits, target, k, function, **options, ignore_index=ignore_index)
    for mine, theirs in zip(ours, exact, strict=True):
        largest = theirs.nan_to_num(0, 0, 0).abs().max().item()
        torch.testing.assert_close(
            mine.double(), theirs, rtol=tolerance, atol=tolerance * largest, equal_nan=True
        )


def problem(rows: int, n: int, m: int) -> tuple[Tensor, SparseTarget]:
    """With labels among the largest scores, a label that is listed twice, and padding."""
    logits, indices = 3 * torch.randn(rows, n), torch.randint(n, (rows, m))
    indices[0, 0], indices[1, -1] = logits[0].argmax(), -100
    indices[-1] = indices[-1, 0] if m < 4 else logits[-1].topk(m).indices
    return logits, SparseTarget(indices, torch.rand(rows, m))


@pytest.mark.parametrize(
    ("k", "m", "n"),
    [
        (1, 2, 6),
        (5, 3, 33),
        *(
            slow(*case)
            for case in [(11, 2, 40), (1, 1, 4), (3, 1, 5), (3, 4, 5), (10, 16, 33), (20, 3, 1100)]
        ),
        *(slow(*case) for case in [(5, 16, 1030), (2, 2, SPLIT), (15, 3, SPLIT), (32, 16, 70)]),
    ],
)
def test_dense_target(k, m, n):
    check(*problem(3, n, m), k)


@pytest.mark.slow
@pytest.mark.parametrize("k", [3, 12, {1: 1.0, 4: 1.0}, {1: 1.0, 12: 1.0}], ids=str)
def test_topk_cross_entropy(k):
    check(*problem(3, 20, 3), k, topk_cross_entropy, reduction="none")


@pytest.mark.parametrize(
    ("reduction", "ignore_index", "per_class"),
    [("none", 2, "weight margin"), slow("sum", -1, "weight"), slow("mean", -100, "margin")],
)
def test_options(reduction, ignore_index, per_class):
    logits, (indices, weights) = problem(4, 9, 3)
    target = SparseTarget(indices.masked_fill(indices == -100, ignore_index), weights)
    options = {name: torch.rand(9) for name in per_class.split()}
    check(logits, target, reduction=reduction, ignore_index=ignore_index, **options)


def test_hard_rows():
    """Ties around the threshold, all equal, a huge spread, absent classes, too few rivals."""
    n, k = 20, 11
    logits = torch.stack(
        [
            torch.where(torch.arange(n) < k, 0.0, -1e-3),
            torch.zeros(n),
            torch.linspace(-1e4, 1e4, n),
            torch.where(torch.arange(n) % 4 == 0, -math.inf, torch.randn(n)),
            torch.where(torch.arange(n) < k, torch.randn(n), -math.inf),
        ]
    )
    labels = torch.tensor([[0, 19], [3, 4], [19, 0], [1, 18], [1, 2]])
    target = SparseTarget(labels, torch.rand(5, 2))
    check(logits, target, k, reduction="none")


@pytest.mark.slow
def test_ties_in_several_pieces():
    """What pieces keep and the row does not is in its tail, and counts once."""
    logits = torch.zeros(3, SPLIT)
    logits[1, ::300] = 1.0  # as many as are kept, and more
    logits[2, :SPLIT:1000], logits[2, 1::500] = 2.0, 1.0
    target = SparseTarget(torch.tensor([[0, 5], [300, 7], [1, 1000]]), torch.rand(3, 2))
    check(logits, target, 3, reduction="none")


def test_absent_labels():
    """They cost infinity, unless they do not count."""
    logits = torch.randn(2, 9)
    logits[:, 4] = -math.inf
    target = SparseTarget(torch.tensor([[4, 1], [2, 4]]), torch.tensor([[0.0, 1.0], [0.5, 0.5]]))
    ours, reference = (
        run(backend, logits, target, 3, smooth_topk_loss, reduction="none")
        for backend in ("kernel", "reference")
    )
    assert ours[0].isinf().tolist() == [False, True]
    torch.testing.assert_close(ours, reference)


def test_nan_stays_in_its_row():
    logits, (indices, weights) = problem(4, 9, 2)
    logits[1, 3] = math.nan
    indices[2, 1] = 9  # no class
    target = SparseTarget(indices, weights)
    loss, gradient = run("kernel", logits, target, 3, smooth_topk_loss, reduction="none")
    assert loss.isnan().tolist() == [False, True, True, False]
    assert gradient.isnan().all(1).tolist() == [False, True, True, False]
    good = [0, 3]
    check(logits[good], SparseTarget(indices[good], weights[good]), reduction="none")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    logits, target = problem(3, 9, 2)
    loss, gradient = run("kernel", logits.to(dtype), target, 3, smooth_topk_loss)
    single = run("kernel", logits.to(dtype).float(), target, 3, smooth_topk_loss)
    assert torch.equal(loss, single[0].to(dtype))
    assert torch.equal(gradient, single[1].to(dtype))


@pytest.mark.parametrize("by_weights", [False, True])
def test_derivatives(by_weights):
    """By the weights, too, and of higher order: those of the reference."""
    logits, (indices, weights) = problem(3, 9, 2)
    results = []
    for backend in ("kernel", "reference"):
        leaf = logits.clone().requires_grad_()
        chances = weights.clone().requires_grad_(by_weights)
        inputs = (leaf, chances)[: 1 + by_weights]
        with topklass.use_backend(backend):
            loss = smooth_topk_loss(leaf, SparseTarget(indices, chances), 3)
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        again = torch.autograd.grad(loss, inputs, retain_graph=True)
        torch.testing.assert_close(first, again)
        results.append((*first, *torch.autograd.grad(first[0].square().sum(), leaf)))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_logits_are_read_once(monkeypatch):
    from topklass.kernels import wide

    calls = []

    def recorded(scores: Tensor, target: SparseTarget, *_: object) -> tuple[Tensor, tuple[()]]:
        calls.append(target.indices.shape)
        return scores.sum(), ()

    monkeypatch.setattr(wide, "forward", recorded)
    logits, target = problem(4, 9, 3)
    with topklass.use_backend("kernel"):
        smooth_topk_loss(logits, target, 3)
    assert calls == [(4, 3)]


@pytest.mark.slow
def test_more_classes_one_after_another():
    check(*problem(2, 40, 17), 2)
