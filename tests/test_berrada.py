"""The propositions of Berrada et al. (2018), each checked on the public functions.

The oracles enumerate tuples or restate the printed formula. Equation 18 and Proposition 6 concern
the published algorithms and are in ``experiments/test_recursive_backward.py``.
"""

import itertools
import math

import mpmath
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from topklass import log_esp, topk_marginals
from topklass.functional import smooth_topk_loss, topk_hinge_loss

INF = math.inf
TAUS = (0.05, 0.3, 1.0, 5.0)
SIZES = [(n, k) for n in range(2, 8) for k in range(1, n)]
every_size = pytest.mark.parametrize(("n", "k"), SIZES)
every_tau = pytest.mark.parametrize("tau", TAUS)
bounded = settings(max_examples=50, derandomize=True, deadline=None)


def scores_of(*shape: int, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale


def vector(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def without(scores: Tensor, label: int) -> Tensor:
    return torch.cat((scores[:label], scores[label + 1 :]))


def smooth(scores: Tensor, label: int, k: int, tau: float, margin: float = 1.0) -> float:
    return smooth_topk_loss(scores, torch.tensor(label), k, tau, margin).item()


def hinge(scores: Tensor, label: int, k: int, margin: float) -> float:
    return topk_hinge_loss(scores, torch.tensor(label), k, margin).item()


@st.composite
def cases(draw: st.DrawFn, smallest_k: int = 1) -> tuple[Tensor, int, int, float]:
    """Scores (ties included), label, k, τ."""
    numbers = st.floats(-30, 30) | st.integers(-3, 3).map(float)
    scores = draw(st.lists(numbers, min_size=smallest_k + 1, max_size=9))
    label = draw(st.integers(0, len(scores) - 1))
    k = draw(st.integers(smallest_k, len(scores) - 1))
    return vector(scores), label, k, draw(st.sampled_from(TAUS))


# Definitions


def tuples(n: int, k: int, label: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The k-tuples of classes, as sets, without and with the label."""
    every = list(itertools.combinations(range(n), k))
    return [t for t in every if label not in t], [t for t in every if label in t]


def equation_9(scores: list[float], label: int, k: int, tau: float, margin: float) -> float:
    """In 40 digits, so that small losses keep theirs."""
    with mpmath.workdps(40):
        t = mpmath.mpf(tau)

        def total(members: list[tuple[int, ...]], delta: float) -> mpmath.mpf:
            sums = [mpmath.fsum(scores[j] for j in member) for member in members]
            return mpmath.fsum(mpmath.exp((delta + s / k) / t) for s in sums)

        missing, holding = tuples(len(scores), k, label)
        denominator = total(holding, 0.0)
        return float(t * mpmath.log((total(missing, margin) + denominator) / denominator))


def equation_20(scores: list[float], label: int, k: int, margin: float) -> float:
    missing, holding = tuples(len(scores), k, label)
    best_missing = max(margin + math.fsum(scores[j] for j in t) / k for t in missing)
    best_holding = max(math.fsum(scores[j] for j in t) / k for t in holding)
    return max(best_missing, best_holding) - best_holding


def prediction_loss(scores: Tensor, label: int, k: int) -> int:
    """Λ_k, equation 5."""
    return int(scores.sort(descending=True).values[k - 1] > scores[label])


# The smooth loss


@every_size
@every_tau
def test_smooth_loss_is_the_sum_over_tuples(n: int, k: int, tau: float) -> None:
    """Equation 9 = equation 10, for every label, as an index and as a one-hot target."""
    scores = scores_of(n)
    for margin in (0.0, 0.5, 1.0):
        exact = vector([equation_9(scores.tolist(), y, k, tau, margin) for y in range(n)])
        options = {"k": k, "tau": tau, "margin": margin, "reduction": "none"}
        for target in (torch.arange(n), torch.eye(n, dtype=torch.float64)):
            actual = smooth_topk_loss(scores.expand(n, n), target, **options)
            torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-15)


@every_tau
def test_smooth_loss_takes_the_margin_of_the_label(tau: float) -> None:
    """Equation 9 with a Δ that the label scales."""
    n, k = 6, 3
    scores, margins = scores_of(n), torch.linspace(0.0, 2.0, n, dtype=torch.float64)
    exact = [equation_9(scores.tolist(), y, k, tau, margins[y].item()) for y in range(n)]
    rows = scores.expand(n, n)
    actual = smooth_topk_loss(rows, torch.arange(n), k, tau, margins, reduction="none")
    torch.testing.assert_close(actual, vector(exact), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize(("present", "k"), [(3, 2), (2, 2), (1, 2), (0, 1), (4, 15)])
def test_loss_of_a_label_that_is_absent(present: int, k: int, one_hot: bool) -> None:
    """A score of −inf: no tuple with the label has any weight, however few others are present."""
    absent = k + 1
    scores = vector([0.0] * present + [-INF] * absent)
    target = torch.arange(present, present + absent)
    if one_hot:
        target = F.one_hot(target, present + absent).double()
    loss = smooth_topk_loss(scores.expand(absent, -1), target, k, reduction="none")
    assert loss.tolist() == [INF] * absent


@every_size
def test_gradient_is_dense_where_that_of_the_hinge_is_not(n: int, k: int) -> None:
    """Section 3.2, (ii), and section 3.3."""
    scores, target = scores_of(n).requires_grad_(), torch.tensor(n // 2)
    (dense,) = torch.autograd.grad(smooth_topk_loss(scores, target, k), scores)
    (sparse,) = torch.autograd.grad(topk_hinge_loss(scores, target, k, margin=99.0), scores)
    assert dense.count_nonzero() == n
    assert sparse.count_nonzero() == 2


@every_size
@every_tau
def test_gradient_in_closed_form(n: int, k: int, tau: float) -> None:
    """From equation 10: sigmoid(z)/k times the difference of two marginals, −1 for the label."""
    scores, label = scores_of(n).requires_grad_(), n // 3
    loss = smooth_topk_loss(scores, torch.tensor(label), k, tau)
    (actual,) = torch.autograd.grad(loss, scores)

    others = without(scores.detach(), label) / (k * tau)
    slope = -math.expm1(-loss.item() / tau) / k  # sigmoid(z) for L = τ log(1 + exp z)
    lower = topk_marginals(others, k - 1) if k > 1 else torch.zeros(n - 1, dtype=torch.float64)
    exact = slope * (topk_marginals(others, k) - lower)
    torch.testing.assert_close(without(actual, label), exact, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(actual[label].item(), -slope, rtol=1e-12, atol=0.0)
    assert abs(actual.sum().item()) <= 1e-15


@pytest.mark.parametrize("n", [2, 10, 1000])
def test_cross_entropy_is_a_special_case(n: int) -> None:
    """Section 3.3: k = 1, τ = 1 and a margin of 0, which is also the limit of margins."""
    scores, target = scores_of(5, n).requires_grad_(), torch.arange(5) % n
    options = {"k": 1, "tau": 1.0, "reduction": "none"}
    exact = F.cross_entropy(scores, target, reduction="none")
    actual = smooth_topk_loss(scores, target, margin=0.0, **options)
    torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-14)
    gradients = [torch.autograd.grad(loss.sum(), scores)[0] for loss in (actual, exact)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-15)
    for alpha in (1e-1, 1e-3, 1e-6):  # softplus has slope at most 1
        excess = smooth_topk_loss(scores, target, margin=alpha, **options) - exact
        assert (excess > 0).all()
        assert (excess <= alpha * (1 + 1e-8)).all()


# Proposition 1


@every_size
def test_proposition_1(n: int, k: int) -> None:
    """Equations 19 and 20, and equations 6 and 7 which do not divide by k."""
    for scores in (scores_of(n), scores_of(n).round()):
        for label in range(n):
            rival = without(scores, label).sort(descending=True).values[k - 1]
            for margin in (0.0, 0.4, 1.0):
                by_tuples = equation_20(scores.tolist(), label, k, margin)
                printed = max((rival / k + margin - scores[label] / k).item(), 0.0)
                assert by_tuples == pytest.approx(printed, rel=1e-13, abs=1e-14)
                actual = hinge(scores, label, k, k * margin)
                assert actual / k == pytest.approx(by_tuples, rel=1e-13, abs=1e-14)
                rescaled = equation_20([k * s for s in scores.tolist()], label, k, margin)
                assert hinge(scores, label, k, margin) == pytest.approx(rescaled, abs=1e-13)


# Proposition 2


@pytest.mark.parametrize("label", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_proposition_2(k: int, label: int) -> None:
    """Without ties the error vanishes faster than any power of τ."""
    scores = vector([0.3, 2.0, -1.0, 4.1, 1.2, -2.3])
    limit = equation_20(scores.tolist(), label, k, 1.0)
    assert hinge(scores, label, k, k * 1.0) / k == pytest.approx(limit, abs=1e-14)
    errors = [abs(smooth(scores, label, k, tau) - limit) for tau in (1.0, 0.1, 0.03, 0.01, 1e-6)]
    assert errors[0] > 1e-3
    assert all(b < a / 10 or b < 1e-14 for a, b in itertools.pairwise(errors[1:]))
    assert errors[3] < 1e-5
    assert errors[4] < 1e-14


@bounded
@given(cases())
def test_proposition_2_holds_with_ties(case: tuple[Tensor, int, int, float]) -> None:
    """A sum of m exponentials is between its largest term and m times that, ties or not."""
    scores, label, k, tau = case
    n = len(scores)
    error = smooth(scores, label, k, tau) - equation_20(scores.tolist(), label, k, 1.0)
    rounding = 1e-12
    assert error <= tau * math.log(math.comb(n, k)) + rounding
    assert error >= -tau * math.log(math.comb(n - 1, k - 1)) - rounding


# Proposition 3


@bounded
@given(cases())
def test_proposition_3_bounds_the_hinge_for_one_guess(
    case: tuple[Tensor, int, int, float],
) -> None:
    scores, label, _, tau = case
    bound = equation_20(scores.tolist(), label, 1, 1.0)
    assert smooth(scores, label, 1, tau) >= bound - 1e-14 * max(1.0, bound)


@pytest.mark.parametrize("lowest", [-INF, -1e4])
@pytest.mark.parametrize("k", [2, 3, 5, 10, 30])
@every_tau
def test_proposition_3_fails_for_more(k: int, tau: float, lowest: float) -> None:
    """The counter-example, equations 27 to 34, where (α, β) = (0, k(x − 1))."""
    for x in (0.1, 1.0, 4.0, 40.0):
        scores = vector([0.0] + [k * (x - 1)] * k + [lowest] * 3)
        loss = smooth(scores, 0, k, tau)
        exact = x + tau * math.log(math.exp(-x / tau) + 1 / k)  # equations 31 and 34
        assert loss == pytest.approx(exact, rel=1e-12)
        assert hinge(scores, 0, k, k * 1.0) / k == pytest.approx(x, rel=1e-12)
    assert loss < x
    assert loss - x == pytest.approx(-tau * math.log(k), abs=tau * k * math.exp(-x / tau) + 1e-12)


# Proposition 4


@bounded
@given(cases())
def test_lemma_3(case: tuple[Tensor, int, int, float]) -> None:
    """Equation 37, for every label below k others, or tied with them."""
    scores, _, k, tau = case
    x = scores / (k * tau)
    missed = [y for y in range(len(x)) if (without(x, y) >= x[y]).sum() >= k]
    assert missed
    for label in missed:
        *_, lower, upper = log_esp(without(x, label), k).tolist()
        assert x[label].item() + lower - math.log(k) <= upper + 1e-12 * max(1.0, abs(upper))


@bounded
@given(cases(), st.sampled_from([0.0, 0.3, 1.0]))
def test_proposition_4(case: tuple[Tensor, int, int, float], margin: float) -> None:
    """Equation 50, and its sharper form, equation 54, where the prediction is wrong."""
    scores, label, k, tau = case
    wrong = prediction_loss(scores, label, k)
    loss = smooth(scores, label, k, tau, margin)
    assert loss >= (margin - tau * math.log(k)) * wrong - 1e-12
    assert loss >= wrong * tau * math.log1p(math.exp(margin / tau) / k) * (1 - 1e-12)


# Equations 11 to 14


def expanded(roots: list[float]) -> list[float]:
    """Coefficients of Π (X + root), the constant one first."""
    polynomial = [1.0]
    for root in roots:
        shifted, scaled = [0.0, *polynomial], [root * c for c in polynomial] + [0.0]
        polynomial = [a + b for a, b in zip(shifted, scaled, strict=True)]
    return polynomial


@pytest.mark.parametrize("n", [1, 2, 5, 11, 20])
def test_coefficients_of_the_polynomials(n: int) -> None:
    """Equation 12, α_i = σ_{n−i}(e), and equation 14, β_i = σ_n(e) σ_{n−i}(1/e) = σ_i(e)."""
    scores = scores_of(n)
    sigma = log_esp(scores, n)
    p, q = expanded(scores.exp().tolist()), expanded((-scores).exp().tolist())
    torch.testing.assert_close(vector(p).log(), sigma.flip(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(vector(q).log() + scores.sum(), sigma, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sigma[n], scores.sum())
    inverted = sigma[n] + log_esp(-scores, n).flip(0)
    torch.testing.assert_close(inverted, sigma, rtol=1e-12, atol=1e-12)


# Proposition 7


@pytest.mark.parametrize(("n", "k"), [*SIZES, *((n, n) for n in range(1, 8))])
def test_proposition_7(n: int, k: int) -> None:
    """Equation 63 by enumeration = equation 66, where the printed σ_i is σ_k; they sum to k."""
    scores = scores_of(n).requires_grad_()
    e = scores.exp().tolist()
    weights = {t: math.prod(e[i] for i in t) for t in itertools.combinations(range(n), k)}
    total = math.fsum(weights.values())
    exact = vector([math.fsum(w for t, w in weights.items() if i in t) / total for i in range(n)])
    (derivative,) = torch.autograd.grad(log_esp(scores, k)[k], scores)
    for actual in (topk_marginals(scores, k).detach(), derivative):
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-14)
        assert actual.sum().item() == pytest.approx(k, rel=1e-13)


@bounded
@given(cases())
def test_marginals_are_ordered_like_the_scores(case: tuple[Tensor, int, int, float]) -> None:
    """Appendix C uses them to rank: the top-k prediction of one crop must not change."""
    scores, _, k, tau = case
    order = scores.argsort()
    marginals = topk_marginals(scores / (k * tau), k)
    assert (marginals[order].diff() >= -1e-12).all()
    assert marginals.sum().item() == pytest.approx(k, rel=1e-10)
    assert ((marginals >= 0) & (marginals <= 1 + 1e-12)).all()


# Proposition 8


@bounded
@given(cases(), st.floats(0.01, 100), st.floats(0, 5))
def test_margin_and_scale_are_interchangeable(
    case: tuple[Tensor, int, int, float], gamma: float, alpha: float
) -> None:
    """The step of Proposition 8: l_k(γs, y, γα) = γ l_k(s, y, α); also L, if γ scales τ."""
    scores, label, k, tau = case
    tolerance = {"rel": 1e-11, "abs": 1e-11 * gamma}
    hinges = [hinge(scores, label, k, alpha), hinge(gamma * scores, label, k, gamma * alpha)]
    assert hinges[1] == pytest.approx(gamma * hinges[0], **tolerance)
    loss = smooth(scores, label, k, tau, alpha)
    scaled = smooth(gamma * scores, label, k, gamma * tau, gamma * alpha)
    assert scaled == pytest.approx(gamma * loss, **tolerance)


def test_proposition_8() -> None:
    """P_{λ,α} is P_{αλ,1} and P_{1,αλ} up to factors; for the latter β must be 1/λ, not 1/α."""
    features, target, weights = scores_of(7, 4), torch.arange(7) % 5, scores_of(4, 5)
    k, decay, alpha = 2, 0.3, 1.7

    def objective(weights: Tensor, decay: float, alpha: float) -> Tensor:
        loss = topk_hinge_loss(features @ weights, target, k, alpha)
        return decay / 2 * weights.square().sum() + loss

    for beta, equivalent in [(alpha, (alpha * decay, 1.0)), (1 / decay, (1.0, alpha * decay))]:
        left, right = objective(weights, decay, alpha), objective(weights / beta, *equivalent)
        torch.testing.assert_close(left, beta * right, rtol=1e-13, atol=0.0)
