"""The kernels of the smooth loss: extended precision's and the reference's numbers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from smooth_cases import check, problem, run, slow, split

from oracle import smooth_loss
from test_accuracy import rows as hard_rows
from topklass.kernels.wide.launch import kept_out

TINY = 1e-36  # gradients below it are denormal numbers of float32, or 0
ROUNDING = 1.2e-7  # of the result to float32, twice


def errors(scores: np.ndarray, labels: np.ndarray, k: int, tau: float, backend: str) -> np.ndarray:
    """Relative errors (2, R) of losses and gradients."""
    options = {"backend": backend, "reduction": "none"}
    loss, gradient = run(torch.tensor(scores), torch.tensor(labels), k, tau, **options)
    exact = [smooth_loss(row, label, k, tau) for row, label in zip(scores, labels, strict=True)]
    return np.array(
        [
            (
                abs(ours - value) / (value + TINY),
                np.linalg.norm(slope - row) / (np.linalg.norm(row) + TINY),
            )
            for ours, slope, (value, row) in zip(loss.numpy(), gradient.numpy(), exact, strict=True)
        ]
    ).T


def assert_within_budget(scores: np.ndarray, labels: np.ndarray, k: int, tau: float) -> None:
    scores = scores.astype(np.float32)
    kernel, reference = (
        errors(scores, labels, k, tau, backend).max(1) for backend in ("kernel", "reference")
    )
    assert (kernel <= 2 * reference + ROUNDING).all(), (kernel, reference)


@pytest.mark.parametrize(
    ("n", "k", "taus"),
    [
        (2, 1, (1.0, 1e-4)),
        (6, 5, (1.0, 1e-2)),
        (12, 11, (1.0,)),
        (40, 3, (0.1,)),
        slow(2, 1, (100.0, 1e-2)),
        slow(7, 1, (1.0, 1e-3)),
        slow(3, 2, (10.0, 0.1, 1e-4)),
        slow(33, 3, (100.0, 1.0, 1e-2)),
        slow(100, 5, (100.0, 1.0, 0.01, 1e-4)),
        slow(9, 8, (1.0, 0.01)),
        slow(100, 10, (100.0, 1.0, 1e-3)),
        slow(12, 11, (1e-3,)),
        slow(100, 11, (10.0, 0.1)),
        slow(21, 20, (1.0,)),
        slow(100, 20, (1e-2,)),
        slow(33, 32, (0.1,)),
        slow(100, 32, (1.0,)),
        slow(1024, 5, (1.0, 0.01)),
        slow(1025, 10, (1.0,)),
        slow(2500, 1, (1.0, 1e-3)),
    ],
)
def test_error_is_at_most_twice_that_of_the_reference(n, k, taus):
    assert_hard_rows_within_budget(n, k, taus)


def assert_hard_rows_within_budget(n: int, k: int, taus: tuple[float, ...]) -> None:
    rng = np.random.default_rng(n * 1000 + k)
    scores = np.array(list(hard_rows(n, k, rng)))
    labels = rng.integers(n, size=len(scores))
    for tau in taus:
        assert_within_budget(scores, labels, k, tau)


@pytest.mark.parametrize(("k", "tau"), [(1, 1.0), slow(10, 0.1), slow(20, 1.0)])
def test_error_of_rows_in_pieces(k, tau):
    n, rng = split(k), np.random.default_rng(k)
    ascending = np.sort(3 * rng.standard_normal(n))  # the last piece has all the heads
    ties = np.where(np.arange(n) % 700 == 0, 1.0, 0.0)  # every piece has some
    scores, labels = np.array([ascending, ties]), np.array([n - 2, 700])
    assert_within_budget(scores, labels, k, tau)


@pytest.mark.slow
@pytest.mark.parametrize("k", [20, 24, 32])
def test_scores_just_below_those_that_are_kept_out_of_the_sums(k):
    """Where the sums of longer lists lose most digits: few such scores, below ties."""
    kept, rng = kept_out(k, 1), np.random.default_rng(k)
    for count in (2, 4, 10):
        scores = np.zeros((4, kept + 1 + count), np.float32)
        scores[:, -count:] = -rng.random((4, count)) * np.array([[1e-3], [0.1], [1.0], [3.0]])
        assert errors(scores, np.zeros(4, int), k, 1.0, "kernel").max() < 1e-6


@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [slow(1, 5000, 32), slow(2, 5000, 10), slow(3, 1000, 20), (5, 100, 5), (2, 33, 32)],
)
def test_logits_of_an_untrained_network(rows, n, k):
    """All zero: the largest polynomials there are."""
    assert_within_budget(np.zeros((rows, n)), np.arange(rows), k, 1.0)


@pytest.mark.parametrize("k", [1, 2, slow(3), 5, slow(8), 10, 11, 20, slow(32)])
@pytest.mark.parametrize("n", [33, slow(1025)])
def test_every_k(k, n):
    check(*problem(2, n), k)


@pytest.mark.parametrize(
    ("rows", "n"),
    [
        (1, 4),
        (2, 100),
        (5, 33),
        (33, 7),
        *(slow(rows, n) for rows in (1, 2, 5, 33) for n in (4, 7, 33, 100)),
    ],
)
def test_every_shape(rows, n):
    """Tiles of several rows, rows of several tiles, none of them full."""
    check(*problem(rows, n), 3, reduction="none", outgoing=torch.randn(rows))


def test_shift_invariance():
    scores, target = torch.randn(3, 100).mul(8).round() / 8, torch.randint(100, (3,))
    loss, gradient = run(scores, target)
    shifted_loss, shifted_gradient = run(scores + 1024, target)  # exact in float32
    assert torch.equal(shifted_loss, loss)
    assert torch.equal(shifted_gradient, gradient)


@settings(max_examples=20, deadline=None, derandomize=True, phases=[Phase.generate])
@given(data=st.data())
def test_any_call(data):
    """Random logits and options: what the reference says."""
    n, count = data.draw(st.integers(2, 12)), data.draw(st.integers(1, 3))
    score = st.floats(-50, 50, width=32) | st.sampled_from([0.0, -0.0, 1.0, -math.inf])
    drawn = data.draw(st.lists(score, min_size=n * count, max_size=n * count))
    scores = torch.tensor(drawn).reshape(count, n)
    ignored = data.draw(st.sampled_from([-100, 0]))
    labels = st.integers(0, n - 1) | st.just(ignored)
    target = torch.tensor(data.draw(st.lists(labels, min_size=count, max_size=count)))
    label_scores = scores[range(count), target.clamp(min=0)]
    scores[range(count), target.clamp(min=0)] = label_scores.clamp(min=-50)  # labels are present
    numbers = st.lists(st.floats(0.125, 3, width=32), min_size=n, max_size=n).map(torch.tensor)
    reduction = data.draw(st.sampled_from(["mean", "sum", "none"]))
    outgoing = torch.tensor(data.draw(st.floats(-4, 4, width=32)))
    check(
        scores,
        target,
        k=data.draw(st.integers(1, n - 1)),
        tau=data.draw(st.floats(1e-4, 1e2)),
        margin=data.draw(st.floats(0, 5) | numbers),
        weight=data.draw(st.none() | numbers),
        ignore_index=ignored,
        reduction=reduction,
        outgoing=outgoing.expand(count) if reduction == "none" else outgoing,
    )
