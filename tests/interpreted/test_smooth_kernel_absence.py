"""The kernels of the smooth loss: absent classes, NaN, ignored targets."""

import math

import pytest
import torch
from smooth_cases import SPLIT, SPLIT_K, check, each_size, problem, run, slow


@each_size
def test_fewer_than_k_rivals_present(n, k):
    """Nothing can push the label off the list."""
    scores = torch.full((2, n), -math.inf)
    present = torch.linspace(1, n - 1, k).long()  # the label and k − 1 rivals
    scores[:, present] = torch.randn(2, k)
    loss, gradient = run(scores, present[:2], k, reduction="none")
    assert torch.equal(loss, torch.zeros(2))
    assert torch.equal(gradient, torch.zeros(2, n))


@each_size
def test_an_absent_label(n, k):
    scores, target = problem(2, n)
    scores[0, target[0]] = -math.inf
    loss, _ = run(scores, target, k, reduction="none")
    assert loss[0] == math.inf
    assert loss[1].isfinite()
    check(scores, target, k, reduction="none")


@pytest.mark.parametrize("backend", ["kernel", "reference"])
@pytest.mark.parametrize(
    ("n", "k"), [(8, 3), slow(1030, 3), slow(SPLIT, SPLIT_K), slow(60, 20), slow(60, 40)]
)
def test_an_absent_label_with_too_few_rivals(n, k, backend):
    """Its loss is infinite, and the gradient is the label's alone."""
    scores, target = torch.full((2, n), -math.inf), torch.tensor([1, 2])
    scores[1, n - 1] = 0.0
    loss, gradient = run(scores, target, k, backend=backend, reduction="none")
    assert torch.equal(loss, torch.full((2,), math.inf))
    expected = torch.zeros(2, n)
    expected[[0, 1], target] = -1 / k
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("n", [8, slow(1030)])
def test_masked_classes(n):
    scores, target = problem(3, n)
    masked = torch.rand(3, n) < 0.4
    masked[range(3), target] = False
    scores[masked] = -math.inf
    check(scores, target, 2)
    _, gradient = run(scores, target, 2)
    assert (gradient[masked] == 0).all()


@pytest.mark.parametrize(
    ("n", "k", "where"),
    [
        (8, 3, "label"),
        (8, 3, "negative"),
        slow(8, 3, "rival"),
        slow(8, 3, "last"),
        slow(1030, 3, "last"),
        slow(1030, 3, "negative"),
        *(slow(60, 40, where) for where in ("label", "rival", "last")),
        slow(SPLIT, SPLIT_K, "last"),
    ],
)
def test_nan_stays_in_its_row(n, k, where):
    scores, target = problem(3, n)
    target[1] = 2
    column = {"label": 2, "rival": 0, "last": n - 1, "negative": 1}[where]
    scores[1, column] = math.copysign(math.nan, -1.0 if where == "negative" else 1.0)
    loss, gradient = run(scores, target, k, reduction="none")
    assert loss.isnan().tolist() == [False, True, False]
    assert gradient[1].isnan().all()
    good = torch.tensor([0, 2])
    alone, gradient_alone = run(scores[good], target[good], k, reduction="none")
    torch.testing.assert_close(loss[good], alone)
    torch.testing.assert_close(gradient[good], gradient_alone)
    assert run(scores, target, k)[0].isnan()


@pytest.mark.parametrize(
    ("reduction", "n", "k"),
    [("mean", 8, 3), ("none", 8, 3), slow("sum", 1030, 3), slow("mean", SPLIT, SPLIT_K)],
)
def test_ignored_targets(reduction, n, k):
    """No loss and no gradient, whatever their logits."""
    scores, target = problem(4, n)
    scores[0, 1] = math.nan
    scores[2] = -math.inf
    target[[0, 2, 3]] = torch.tensor([-100, -100, 5])
    options = {"reduction": reduction}
    loss, gradient = run(scores, target, k, **options)
    expected, expected_gradient = run(scores, target, k, backend="reference", **options)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient[[1, 3]], expected_gradient[[1, 3]])
    assert torch.equal(gradient[[0, 2]], torch.zeros(2, n))
    check(scores[1:], target[1:], k, **options)


@pytest.mark.parametrize("reduction", ["mean", slow("sum"), slow("none")])
def test_ignored_class(reduction):
    scores = problem(4, 9)[0]
    check(scores, torch.tensor([5, 0, 8, 5]), 3, ignore_index=5, reduction=reduction)


def test_ignored_targets_whatever_the_outgoing_gradient():
    scores, target = problem(3, 8)
    target[1] = -100
    outgoing = torch.tensor([1.0, math.inf, 2.0])
    check(scores, target, 3, reduction="none", outgoing=outgoing)
    _, gradient = run(scores, target, 3, reduction="none", outgoing=outgoing)
    assert torch.equal(gradient[1], torch.zeros(8))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_targets_ignored(reduction):
    """As with cross-entropy the mean is NaN, and the gradient 0."""
    scores, target = problem(3, 8)[0], torch.full((3,), -100)
    check(scores, target, 3, reduction=reduction)
    loss, gradient = run(scores, target, 3, reduction=reduction)
    assert loss.isnan() if reduction == "mean" else loss == 0
    assert torch.equal(gradient, torch.zeros(3, 8))
