"""The kernels of the smooth loss for long lists."""

from collections.abc import Iterator
from math import inf

import numpy as np
import pytest
import torch
from smooth_cases import check, problem, run, slow
from test_smooth_kernel import assert_hard_rows_within_budget, assert_within_budget

import topklass
from topklass.dispatch import KERNELS, Kernel
from topklass.functional import smooth_topk_loss
from topklass.kernels.long_lists import launch as long_lists


@pytest.fixture(autouse=True, scope="module")
def every_list_is_long() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KERNELS, "smooth_topk_loss", (Kernel("long_lists", 1, 1024),))
        yield


@pytest.mark.parametrize(
    ("n", "k", "taus"),
    [
        (2, 1, (1.0,)),
        slow(100, 5, (100.0, 0.01)),
        slow(33, 32, (1.0,)),
        slow(34, 33, (1.0, 1e-3)),
        slow(100, 50, (100.0, 1.0, 1e-2, 1e-4)),
        slow(200, 100, (1.0,)),
        slow(700, 600, (0.1,)),
    ],
)
def test_error_is_at_most_twice_that_of_the_reference(n, k, taus):
    assert_hard_rows_within_budget(n, k, taus)


@pytest.mark.slow
def test_nodes_do_not_mistake_one_count_for_another():
    """The widest counts there are: the variance of equal chances of many classes is nearly k."""
    for k in (1, 33, 64, 65, 300, 1024):
        m = 2 * long_lists.nodes(k)
        classes = 10 * k + 5 * m
        count = torch.distributions.Binomial(classes, torch.tensor(k / classes).double())
        others = torch.tensor([value for value in (k - m, k + m) if value >= 0]).double()
        assert count.log_prob(others).max() < -20
    assert_within_budget(np.zeros((1, 2000)), np.zeros(1, int), 64, 1.0)


def test_absent_classes_and_labels():
    k = 40
    scores, target = problem(6, 60)
    scores[0, k:] = -inf  # the label and k − 1 rivals
    scores[1, k + 1 :] = -inf  # one more
    scores[2, 5] = -inf  # an absent label
    scores[3] = -inf
    scores[4, 7] = inf
    scores[5, 10:] = inf  # more than k of them
    target[:] = torch.tensor([0, 1, 5, 5, 6, 7])
    loss, gradient = run(scores, target, k, reduction="none")
    assert loss[0] == 0
    assert loss[1:].isfinite().tolist() == [True, False, False, True, False]
    assert not gradient[0].any()
    assert gradient[1, :k].all()
    assert gradient[3].nonzero().tolist() == [[5]]  # the label alone
    check(scores, target, k, reduction="none")


@pytest.mark.slow
def test_scores_far_apart():
    """The search for the tilt goes far, and ends."""
    scores, target = problem(4, 50)
    scores[0] *= 1e6
    scores[1, ::2] += 1e30
    scores[2, :41] = 3e38
    scores[3] *= 1e-30
    check(scores, target, 40, reduction="none")


@pytest.mark.slow
@pytest.mark.parametrize(("height", "tau"), [(1e18, 1.0), (3e18, 1.0), (1.0, 1e-16), (1e3, 1e-15)])
def test_many_ties_far_from_zero(height, tau):
    """The tilt lies a few numbers of float64 above the ties."""
    scores, target = torch.full((2, 2000), height), torch.tensor([0, 7])
    scores[1, :5] = 2 * height
    check(scores, target, 40, tau, reduction="none")


def test_gradients_of_what_is_surely_in_the_list():
    """To their last digits, though they are tiny."""
    scores, target = problem(2, 100)
    scores[0, :30] += 1000
    scores[1, :30] += 1e5
    target[:] = 50
    _, gradient = run(scores, target, 40)
    _, exact = run(scores.double(), target, 40, backend="reference")
    torch.testing.assert_close(gradient.double(), exact, rtol=1e-5, atol=1e-30)
    assert (gradient[0, :30] > 0).all()
    assert not gradient[1, :30].any()


@pytest.mark.slow
def test_programs_take_several_blocks(monkeypatch):
    scores, target = problem(3, 100)
    whole = run(scores, target, 40)
    monkeypatch.setattr(long_lists, "GRADIENT_PROGRAMS", 6)
    for one, other in zip(run(scores, target, 40), whole, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_programs_take_several_rows(monkeypatch):
    scores, target = problem(5, 50)
    whole = run(scores, target, 40, reduction="none")
    monkeypatch.setattr(long_lists, "MOST_PROGRAMS", 2)
    for one, other in zip(run(scores, target, 40, reduction="none"), whole, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_rows_that_do_not_lie_in_one_piece():
    scores, target = problem(60, 3)
    check(scores.t(), target[:3], 40)
    wide, target = problem(3, 120)
    check(wide[:, 7:67], target % 60, 40)


@pytest.mark.slow
def test_longest_list():
    scores, target = problem(1, 1100)
    check(scores, target, 1024)
    with topklass.use_backend("kernel"), pytest.raises(RuntimeError, match="k = 1025, only up to"):
        smooth_topk_loss(scores, target, 1025)
