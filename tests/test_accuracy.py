"""The smooth loss in float32 against extended precision, over everything users may throw at it.

The promise: gradient within 1e-5 (per row), loss within 1e-4 plus what rounding the input itself
may cause. The bounds asserted here are tighter, near what is measured.
"""

import itertools

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import smooth_loss
from topklass.functional import smooth_topk_loss
from topklass.operators.esp import smooth_gap
from topklass.reference import power_sums, tree
from topklass.reference.power_sums import (
    LARGEST_K,
    LARGEST_K_IN_FLOAT32,
    LARGEST_K_OF_LABELS,
    serves_labels,
)

GRADIENT, LOSS = 5e-6, 1e-6
TINY = 1e-36  # gradients below it are denormal numbers of float32, or 0
TEMPERATURES = (100.0, 10.0, 1.0, 0.1, 0.01, 1e-3, 1e-4)
SIZES = (2, 3, 7, 30, 100, 1000)


def sizes_and_ks():
    for n in SIZES:
        around_limits = (LARGEST_K_IN_FLOAT32, LARGEST_K[torch.float32], LARGEST_K_OF_LABELS)
        ks = {1, 2, 3, 5, 10, 20, 50, n - 1, *around_limits, *(k + 1 for k in around_limits)}
        for k in sorted(k for k in ks if k < n):
            yield pytest.param(n, k, marks=[pytest.mark.slow] if k > 100 else [])


def rows(n, k, rng):
    """Scores that are easy, and scores that break algorithms."""
    for scale in (0.1, 1.0, 10.0, 100.0):
        yield scale * rng.standard_normal(n)
    yield rng.standard_normal(n) + 1000.0
    yield np.zeros(n)
    yield rng.permutation(np.where(np.arange(n) <= k, 1.0, -50.0))  # k + 1 equal, the rest far
    yield rng.permutation(np.where(np.arange(n) < k, 0.0, -1e-3))  # k ties and the rest just below
    yield rng.standard_normal(n) + 100.0 * (np.arange(n) == rng.integers(n))  # one dominant


def errors(scores, label, k, tau, margin=1.0):
    """Relative errors of loss and gradient of one float32 row."""
    loss, gradient = smooth_loss(scores, label, k, tau, margin)
    leaf = torch.tensor(scores[None], requires_grad=True)
    ours = smooth_topk_loss(leaf, torch.tensor([label]), k, tau, margin)
    (ours_gradient,) = torch.autograd.grad(ours, leaf)
    off = np.linalg.norm(ours_gradient[0].numpy() - gradient)
    return abs(ours.item() - loss) / (loss + TINY), off / (np.linalg.norm(gradient) + TINY)


@pytest.mark.parametrize(("n", "k"), list(sizes_and_ks()))
@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_float32(n, k, share):
    """All temperatures with all rows, or a quarter of them, another one for each k."""
    rng = np.random.default_rng(n * 1000 + k)
    temperatures = TEMPERATURES if n < 1000 else TEMPERATURES[1::2]
    pairs = list(itertools.product(temperatures, rows(n, k, rng)))
    for tau, scores in pairs[k % share :: share]:
        loss, gradient = errors(scores.astype(np.float32), int(rng.integers(n)), k, tau)
        assert loss < LOSS, (tau, scores)
        assert gradient < GRADIENT, (tau, scores)


@pytest.mark.parametrize("n", [12_345, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("k", "tau"), [(1, 1.0), (5, 1.0), (20, 1.0), (50, 1e-3)])
def test_many_classes(n, k, tau):
    rng = np.random.default_rng(k)
    for scores in (3 * rng.standard_normal(n), np.zeros(n)):
        loss, gradient = errors(scores.astype(np.float32), 7, k, tau)
        assert loss < LOSS
        assert gradient < GRADIENT


@pytest.mark.parametrize(
    ("n", "k", "by_power_sums"),
    [(12_345, 123, True), (12_345, 124, False), (300_000, 74, True), (300_000, 75, False)],
)
def test_as_many_subsets_as_float64_can_count(n, k, by_power_sums):
    """Equal scores, ``σ_k / σ_{k−1} = (n − k) / k`` without the label: both sides of the limit."""
    assert serves_labels(k, n, torch.device("cpu")) == by_power_sums
    gap = smooth_gap(torch.zeros(1, n), torch.tensor([[5]]), k, 1.0)
    assert gap.item() == pytest.approx(np.log((n - k) / k), abs=2e-6)


@pytest.mark.parametrize("n", [161, 257])
@pytest.mark.parametrize("missing", [1, 2, 5])
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_nearly_all_classes(n, missing, scale):
    """Coefficients of the tail overflow float32, also scaled as for half precision."""
    k, target = n - missing, torch.tensor([3, 3])
    scores = torch.stack([torch.zeros(n), torch.randn(n)])
    far = torch.full((2, 40), -1e4)
    for logits in (scores, torch.cat([scores, far], 1)):
        leaf, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
        (scale * smooth_topk_loss(leaf, target, k)).backward()
        labels = target.unsqueeze(1)
        gap = tree.smooth_gap(wide, labels, k, 1.0)
        (scale * torch.nn.functional.softplus(gap + 1).mean()).backward()
        torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=1e-4, atol=scale * 1e-8)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    scores=st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=12),
    pick=st.integers(0, 10**6),
    tau=st.floats(1e-4, 1e2),
    margin=st.floats(0, 5),
)
def test_float32_any_row(scores, pick, tau, margin):
    n = len(scores)
    label, k = pick % n, 1 + pick // n % (n - 1)
    loss, gradient = errors(np.array(scores, np.float32), label, k, tau, margin)
    assert loss < LOSS
    assert gradient < GRADIENT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    scores = (3 * torch.randn(20, 300)).to(dtype)
    target = torch.randint(300, (20,))
    half, single = scores.clone().requires_grad_(), scores.float().requires_grad_()
    loss = smooth_topk_loss(half, target, 5, reduction="none")
    exact = smooth_topk_loss(single, target, 5, reduction="none")
    loss.sum().backward()
    exact.sum().backward()
    assert torch.equal(loss, exact.to(dtype))
    assert torch.equal(half.grad, single.grad.to(dtype))


@pytest.mark.parametrize("k", [1, 4, 12, 13, 24, 25, 40])
def test_float64(k):
    """Near the last digit on both sides of every limit."""
    rng = np.random.default_rng(k)
    for tau, scores in itertools.product((1.0, 0.01), rows(60, k, rng)):
        loss, gradient = smooth_loss(scores, 3, k, tau)
        leaf = torch.tensor(scores[None], requires_grad=True)
        ours = smooth_topk_loss(leaf, torch.tensor([3]), k, tau)
        (ours_gradient,) = torch.autograd.grad(ours, leaf)
        off = np.linalg.norm(ours_gradient[0].numpy() - gradient)
        assert abs(ours.item() - loss) <= 1e-11 * loss + 1e-300
        assert off <= 1e-11 * np.linalg.norm(gradient) + 1e-300


@pytest.mark.parametrize("k", [1, 2, 5, 12, 24])
@pytest.mark.parametrize("tau", [1.0, 0.01])
def test_every_label_at_once(k, tau):
    """Power sums and tree, all labels at once and one by one, are the same numbers."""
    rng = np.random.default_rng(k)
    for scores in rows(40, k, rng):
        row = torch.tensor(scores[None], requires_grad=True)
        labels = torch.arange(40)[:, None]
        weights = torch.linspace(-1, 1, 40, dtype=row.dtype)
        one_by_one = tree.smooth_gap(row.expand(40, -1), labels, k, tau).squeeze(1)
        (expected,) = torch.autograd.grad(one_by_one @ weights, row)
        for every in (power_sums, tree):
            gaps = every.smooth_gap_every_label(row, k, tau).squeeze(0)
            (gradient,) = torch.autograd.grad(gaps @ weights, row)
            torch.testing.assert_close(gaps, one_by_one, rtol=1e-8, atol=1e-8)
            torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("k", [1, 5, 10, 11, 24])
def test_plain_operations_are_as_accurate(k):
    """What torch.compile's and torch.func's users get when the fused gradient cannot be used."""
    scores, labels = 3 * torch.randn(30, 400), torch.randint(400, (30, 1))
    fused, plain = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    a, b = smooth_gap(fused, labels, k, 1.0), power_sums.smooth_gap(plain, labels, k, 1.0)
    a.sum().backward()
    b.sum().backward()
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(fused.grad, plain.grad, rtol=0, atol=1e-6 / k)


@pytest.mark.parametrize("k", [1, 5, 24, 29])
@pytest.mark.parametrize("tau", [10.0, 1.0, 0.01])
def test_expected_loss_of_probabilities(k, tau):
    """Class probabilities against the sum over labels in extended precision."""
    rng = np.random.default_rng(k)
    for scores in rows(30, k, rng):
        chances = rng.dirichlet(np.ones(30)).astype(np.float32)
        single = scores.astype(np.float32)
        parts = [smooth_loss(single, label, k, tau) for label in range(30)]
        loss = sum(p * part[0] for p, part in zip(chances, parts, strict=True))
        gradient = sum(p * part[1] for p, part in zip(chances, parts, strict=True))
        leaf = torch.tensor(single[None], requires_grad=True)
        ours = smooth_topk_loss(leaf, torch.tensor(chances[None]), k, tau)
        (ours_gradient,) = torch.autograd.grad(ours, leaf)
        assert abs(ours.item() - loss) < LOSS * loss
        scale = max(np.linalg.norm(gradient), 1e-3 / k)  # uniform chances on ties: nearly 0
        assert np.linalg.norm(ours_gradient[0].numpy() - gradient) < GRADIENT * scale


def test_shift_invariance():
    scores, target = torch.randn(50, 1000).mul(8).round() / 8, torch.randint(1000, (50,))
    shifted = scores + 1024  # exact in float32
    for tau in (1.0, 0.01):
        loss = smooth_topk_loss(scores, target, 5, tau, reduction="none")
        assert torch.equal(smooth_topk_loss(shifted, target, 5, tau, reduction="none"), loss)


@pytest.mark.parametrize(
    ("n", "k", "tau"), [(6, 2, 1.0), (9, 5, 0.1), (30, 7, 1e-3), (12, 11, 2.0)]
)
def test_the_oracle_itself(n, k, tau):
    """Extended precision against 60 digits of mpmath, gradient by finite differences."""
    scores = np.random.default_rng(n).standard_normal(n)
    loss, gradient = smooth_loss(scores, 1, k, tau)
    with mpmath.workdps(60):
        values = [mpmath.mpf(float(s)) for s in scores]

        def exact(values):
            sigma = [mpmath.mpf(1)] + [mpmath.mpf(0)] * k
            for i, s in enumerate(values):
                if i != 1:
                    e = mpmath.exp(s / (k * tau))
                    sigma = [sigma[0]] + [sigma[j] + e * sigma[j - 1] for j in range(1, k + 1)]
            z = (k - values[1]) / (k * tau) + mpmath.log(sigma[k] / sigma[k - 1])
            return tau * mpmath.log1p(mpmath.exp(z))

        step = mpmath.mpf(10) ** -25
        base = exact(values)
        assert abs(float(base) - float(loss)) < 1e-15 * float(base) + 1e-300
        for i in range(n):
            moved = exact([*values[:i], values[i] + step, *values[i + 1 :]])
            assert abs(float((moved - base) / step) - float(gradient[i])) < 1e-14
