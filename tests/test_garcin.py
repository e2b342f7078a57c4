"""The definitions and propositions of Garcin et al. (2022), on the public functions.

Where noise is drawn, a sample of SIZE vectors is compared with the exact expectation. The K-th
largest of s + εZ is an ε-Lipschitz function of Z, so its mean deviates by more than ``VALUE · ε``
with probability at most 2 exp(−SIZE · VALUE² / 2) = 1e-8; by Hoeffding's inequality a mean of
indicators deviates by more than ``SHARE`` with the same probability.
"""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from topklass import class_margins, noised_topk
from topklass.functional import (
    calibrated_topk_hinge_loss,
    convex_topk_hinge_loss,
    noised_topk_loss,
    topk_hinge_loss,
)

ROWS, SAMPLES = 30_000, 4
SIZE = ROWS * SAMPLES
VALUE = math.sqrt(2 * math.log(2e8) / SIZE)
SHARE = math.sqrt(math.log(2e8) / (2 * SIZE))

Loss = Callable[..., Tensor]
bounded = settings(max_examples=40, derandomize=True, deadline=None)
every_k = pytest.mark.parametrize("k", [1, 2, 3])


def vector(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def normal(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    """Scores (ties included), label, K."""
    numbers = st.floats(-20, 20) | st.integers(-2, 2).map(float)
    scores = draw(st.lists(numbers, min_size=2, max_size=8))
    label = draw(st.integers(0, len(scores) - 1))
    return vector(scores), label, draw(st.integers(1, len(scores) - 1))


# The smoothed top-K operator


def top_sum(scores: Tensor, k: int, epsilon: float, noise: Tensor) -> Tensor:
    """topΣ_{K,ε,B} of equation 11: ranks 1 to K under common noise, (rows, L, samples)."""
    rows_of_scores = scores.expand(len(noise), -1)
    ranks = range(1, k + 1)
    return sum(noised_topk(rows_of_scores, r, epsilon, noise=noise).mean() for r in ranks)


def gradient_of(function: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
    scores = scores.detach().clone().requires_grad_()
    return torch.autograd.grad(function(scores), scores)[0]


def expectation(scores: Tensor, k: int, epsilon: float) -> Tensor:
    """E[K-th largest of s + εZ] = lo + ∫_lo^hi P(at least K of the s_i + εZ_i exceed t) dt."""
    lo, hi = scores.min().item() - 9 * epsilon, scores.max().item() + 9 * epsilon
    t = torch.linspace(lo, hi, 4001, dtype=torch.float64)
    exceed = [torch.ones_like(t)] + [torch.zeros_like(t)] * k  # exactly j for j < K, at least K
    for score in scores:
        p = torch.special.ndtr((score - t) / epsilon)
        at_least = exceed[k] + p * exceed[k - 1]
        exactly = [exceed[j] * (1 - p) + (p * exceed[j - 1] if j else 0) for j in range(k)]
        exceed = [*exactly, at_least]
    return lo + torch.trapezoid(exceed[k], t)


SCORES = {
    "apart": vector([2.4, 2.6, 2.3, 0.5]),
    "tied": torch.zeros(6, dtype=torch.float64),
    "long": torch.linspace(-2.0, 2.0, 12, dtype=torch.float64),
}
every_scores = pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES.keys())


@every_scores
@every_k
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_sampled_noise_has_the_expectation_of_definition_3_2(
    scores: Tensor, k: int, epsilon: float
) -> None:
    """Equation 6, and equation 7 for its gradient, with noise that the operator draws."""
    generator = torch.Generator().manual_seed(7)

    def sampled(scores: Tensor) -> Tensor:
        rows = scores.expand(ROWS, -1)
        return noised_topk(rows, k, epsilon, SAMPLES, generator=generator).mean()

    exact = expectation(scores, k, epsilon)
    assert abs(sampled(scores) - exact) <= VALUE * epsilon
    shares = gradient_of(lambda s: expectation(s, k, epsilon), scores)
    assert (gradient_of(sampled, scores) - shares).abs().max() <= SHARE


@pytest.mark.parametrize("gap", [0.0, 0.3, 2.0])
def test_expectation_of_the_larger_of_two(gap: float) -> None:
    """The oracle against the one expectation that has a closed form."""
    epsilon = 0.5
    a = torch.tensor(gap / (epsilon * math.sqrt(2)), dtype=torch.float64)
    density = math.exp(-(a**2) / 2) / math.sqrt(2 * math.pi)
    exact = gap * torch.special.ndtr(a) + epsilon * math.sqrt(2) * density
    assert expectation(vector([gap, 0.0]), 1, epsilon).item() == pytest.approx(exact.item())


@every_scores
@every_k
def test_gradient_of_the_sum_is_the_mean_indicator(scores: Tensor, k: int) -> None:
    """Equation 7 for topΣ_K: the share of samples that have a class among their K largest."""
    noise = normal(50, len(scores), 3)
    actual = gradient_of(lambda s: top_sum(s, k, 0.7, noise), scores)
    largest = (scores.unsqueeze(1) + 0.7 * noise).topk(k, dim=1).indices
    shares = F.one_hot(largest, len(scores)).sum(1).double().mean((0, 1))
    torch.testing.assert_close(actual, shares, rtol=1e-12, atol=1e-15)
    assert actual.sum().item() == pytest.approx(k)


@every_k
def test_proposition_3_3_convex(k: int) -> None:
    """Strictly so, but not along (1, …, 1), nor for K = L: there it is linear."""
    noise = normal(500, 5, SAMPLES)
    for left, right in itertools.pairwise(normal(12, 5)):
        for share in (0.2, 0.5):
            chord, value = (
                share * top_sum(left, k, 1.0, noise) + (1 - share) * top_sum(right, k, 1.0, noise),
                top_sum(share * left + (1 - share) * right, k, 1.0, noise),
            )
            assert value < chord - 1e-3
            every = [top_sum(s, 5, 1.0, noise) for s in (left, right)]
            middle = top_sum(share * left + (1 - share) * right, 5, 1.0, noise)
            torch.testing.assert_close(middle, share * every[0] + (1 - share) * every[1])
        shifted = top_sum(left + 3.0, k, 1.0, noise)
        torch.testing.assert_close(shifted, top_sum(left, k, 1.0, noise) + 3.0 * k)


@every_k
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0])
def test_proposition_3_3_lipschitz(k: int, epsilon: float) -> None:
    """With constant √K, which is reached: raise the K largest of well separated scores."""
    noise = normal(100, 5, SAMPLES)
    for left, right in itertools.pairwise(normal(12, 5)):
        change = (top_sum(left, k, epsilon, noise) - top_sum(right, k, epsilon, noise)).abs()
        assert change <= math.sqrt(k) * (left - right).norm() * (1 + 1e-12)
    scores = 100.0 * torch.arange(5, 0, -1, dtype=torch.float64)
    step = 0.3 * (torch.arange(5) < k).double()
    change = top_sum(scores + step, k, epsilon, noise) - top_sum(scores, k, epsilon, noise)
    assert change.item() == pytest.approx(math.sqrt(k) * step.norm().item())


@every_k
@pytest.mark.parametrize("epsilon", [0.01, 1.0])
def test_gradients_are_lipschitz(k: int, epsilon: float) -> None:
    """√(KL)/ε for topΣ_K (Proposition 3.3) and 4√(KL)/ε for top_K (Proposition 3.5).

    Two classes compete for rank K; without noise the gradient jumps by √2 between these scores.
    """
    n, step = 4, 0.05 * epsilon
    noise = normal(ROWS, n, SAMPLES)
    tied = 10 * epsilon * torch.arange(n, 0, -1, dtype=torch.float64)
    tied[k] = tied[k - 1]
    one, other = (tied + step * F.one_hot(torch.tensor(i), n) for i in (k - 1, k))
    distance, sampling = math.sqrt(2) * step, 2 * math.sqrt(n) * SHARE

    def change(function: Callable[[Tensor], Tensor]) -> float:
        return (gradient_of(function, one) - gradient_of(function, other)).norm().item()

    bound = math.sqrt(k * n) / epsilon * distance
    assert bound < 1 / 4
    assert change(lambda s: top_sum(s, k, epsilon, noise)) <= bound + sampling

    def top(scores: Tensor) -> Tensor:
        return noised_topk(scores.expand(ROWS, -1), k, epsilon, noise=noise).mean()

    assert change(top) <= 4 * bound + sampling
    assert change(lambda s: top_sum(s, k, 0.0, noise)) == pytest.approx(math.sqrt(2))


@every_scores
@every_k
def test_noise_vanishes_with_epsilon(scores: Tensor, k: int) -> None:
    """Proposition 3.3, last point, and after Proposition 3.5."""
    noise = normal(20, len(scores), SAMPLES)
    rows, hard = scores.expand(20, -1), scores.sort(descending=True).values[k - 1]
    for epsilon in (1.0, 1e-2, 1e-4, 1e-8, 0.0):
        error = (noised_topk(rows, k, epsilon, noise=noise) - hard).abs().max()
        assert error <= epsilon * noise.abs().max() + 1e-15


@every_scores
@every_k
@pytest.mark.parametrize("epsilon", [0.1, 2.0])
def test_proposition_3_5_bias(scores: Tensor, k: int, epsilon: float) -> None:
    """At most ε K √(2 log L), by equations 20 to 22."""
    noise = normal(ROWS, len(scores), SAMPLES)
    hard = scores.sort(descending=True).values
    rows = scores.expand(ROWS, -1)
    bias = (noised_topk(rows, k, epsilon, noise=noise).mean() - hard[k - 1]).item()
    largest = epsilon * math.sqrt(2 * math.log(len(scores)))
    assert -(k - 1) * largest - VALUE * epsilon <= bias <= k * largest + VALUE * epsilon

    bias_of_sum = (top_sum(scores, k, epsilon, noise) - hard[:k].sum()).item()
    assert bias_of_sum >= -k * VALUE * epsilon  # Jensen's inequality, up to sampling
    at_zero = top_sum(torch.zeros_like(scores), k, 1.0, noise).item()
    assert bias_of_sum <= epsilon * at_zero + 1e-12  # true of every sample
    assert at_zero <= k * math.sqrt(2 * math.log(len(scores))) + k * VALUE


@every_scores
@pytest.mark.parametrize("k", [1, 2, 4])
def test_definition_3_4(scores: Tensor, k: int) -> None:
    """top_K = topΣ_K − topΣ_{K−1}, each a sum over sorted perturbed scores."""
    noise = normal(7, len(scores), 5)
    rows = (scores + normal(7, len(scores))).requires_grad_()
    perturbed = (rows.unsqueeze(-1) + 0.5 * noise).sort(1, descending=True).values
    exact = perturbed[:, :k].sum(1).mean(-1) - perturbed[:, : k - 1].sum(1).mean(-1)
    actual = noised_topk(rows, k, 0.5, noise=noise)
    torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-14)
    gradients = [torch.autograd.grad(value.sum(), rows)[0] for value in (actual, exact)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


# The illustration of section 3.2

ILLUSTRATED = vector([2.4, 2.6, 2.3, 0.5])
ILLUSTRATED_NOISE = torch.tensor(
    [[0.2, 0.1, -0.1], [-0.1, 0.1, -0.1], [0.1, -0.1, 0.1], [0.3, 0.1, -0.1]],
    dtype=torch.float64,
)


@pytest.mark.parametrize(
    ("epsilon", "value", "gradient"),
    [
        (1.0, (2.5 + 2.5 + 2.4) / 3, [1 / 3, 1 / 3, 1 / 3, 0.0]),
        (0.1, (2.42 + 2.41 + 2.39) / 3, [1.0, 0.0, 0.0, 0.0]),
        (0.0, 2.4, [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_illustration(epsilon: float, value: float, gradient: list[float]) -> None:
    """Its K = 2 is the threshold of the loss for one guess."""
    scores = ILLUSTRATED.clone().requires_grad_()
    top = noised_topk(scores, 2, epsilon, noise=ILLUSTRATED_NOISE)
    assert top.item() == pytest.approx(value, rel=1e-14)
    torch.testing.assert_close(torch.autograd.grad(top, scores)[0], vector(gradient))

    options = {"k": 1, "epsilon": epsilon, "samples": 3, "noise": ILLUSTRATED_NOISE}
    loss = noised_topk_loss(scores, torch.tensor(3), **options)
    assert loss.item() == pytest.approx(1 + value - 0.5, rel=1e-14)
    actual = torch.autograd.grad(loss, scores)[0]
    torch.testing.assert_close(actual, vector(gradient) - F.one_hot(torch.tensor(3), 4))


# The noised losses


@pytest.mark.parametrize("n", [2, 5, 30])
@pytest.mark.parametrize("epsilon", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("scale", [1.0, 60.0])
@pytest.mark.parametrize("balanced", [True, False])
def test_noised_loss_and_its_gradient(n: int, epsilon: float, scale: float, balanced: bool) -> None:
    """Equations 10 and 13, and Proposition 3.7 with the estimates of equation 12.

    The scale, of the published code and not of the paper, multiplies what is rectified.
    """
    batch, samples = 40, 6
    noise, target = normal(batch, n, samples), torch.arange(batch) % n
    scores = normal(batch, n)
    scores[::2] += 6.0 * F.one_hot(target[::2], n)  # most of these losses are 0
    scores[1::2] -= 6.0 * F.one_hot(target[1::2], n)  # and these are not
    scores.requires_grad_()
    margins = class_margins(torch.arange(1, n + 1).double() ** 3, largest=0.5)
    margin = 1.0 if balanced else margins
    of_label = torch.ones(batch, dtype=torch.float64) if balanced else margins[target]

    for k in {1, n // 2, n - 1}:
        perturbed = scores.detach().unsqueeze(-1) + epsilon * noise
        values, classes = perturbed.sort(1, descending=True)
        label = scores.detach()[torch.arange(batch), target]
        inside = scale * (of_label + values[:, k].mean(-1) - label)
        shares = F.one_hot(classes[:, k], n).double().mean(1)
        exact = scale * (inside >= 0).unsqueeze(1) * (shares - F.one_hot(target, n))

        options = {"k": k, "epsilon": epsilon, "samples": samples, "noise": noise}
        options |= {"margin": margin, "scale": scale, "reduction": "none"}
        loss = noised_topk_loss(scores, target, **options)
        torch.testing.assert_close(loss, inside.clamp(min=0), rtol=1e-12, atol=1e-12)
        (actual,) = torch.autograd.grad(loss.sum(), scores)
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-12)
        assert (inside < 0).any()
        assert (inside > 0).any()


@every_k
def test_no_noise_is_the_calibrated_hinge(k: int) -> None:
    """After Definition 3.6: ε = 0 recovers equation 5, in value and gradient."""
    scores, target = normal(30, 6).requires_grad_(), torch.arange(30) % 6
    losses = [
        noised_topk_loss(scores, target, k, epsilon=0.0, reduction="none"),
        calibrated_topk_hinge_loss(scores, target, k, reduction="none"),
    ]
    gradients = [torch.autograd.grad(loss.sum(), scores)[0] for loss in losses]
    torch.testing.assert_close(*losses, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(*gradients, rtol=1e-14, atol=1e-14)


# The other losses of Table 1


def of_one(loss: Loss, scores: Tensor, label: int, k: int, margin: float = 1.0) -> float:
    return loss(scores, torch.tensor(label), k, margin).item()


@bounded
@given(cases(), st.sampled_from([0.0, 0.5, 1.0, 3.0]))
def test_hinge_losses_of_table_1(case: tuple[Tensor, int, int], margin: float) -> None:
    scores, label, k = case
    s, s_y = scores.tolist(), scores[label].item()
    others = sorted(s[:label] + s[label + 1 :], reverse=True)
    lifted = sorted((s_j + margin * (j != label) for j, s_j in enumerate(s)), reverse=True)
    exact = {
        topk_hinge_loss: margin + others[k - 1] - s_y,
        convex_topk_hinge_loss: math.fsum(lifted[:k]) / k - s_y,
        calibrated_topk_hinge_loss: margin + sorted(s, reverse=True)[k] - s_y,
    }
    for loss, inside in exact.items():
        actual = of_one(loss, scores, label, k, margin)
        assert actual == pytest.approx(max(inside, 0.0), rel=1e-12, abs=1e-12)


@bounded
@given(cases(), st.sampled_from([0.0, 0.5, 1.0, 3.0]))
def test_order_of_the_hinge_losses(case: tuple[Tensor, int, int], margin: float) -> None:
    """0/1 loss (equation 3) ≤ calibrated ≤ hinge ≤ convex; the last is said after equation 4."""
    scores, label, k = case
    zero_one = margin * (scores.sort(descending=True).values[k - 1] > scores[label]).item()
    losses = (calibrated_topk_hinge_loss, topk_hinge_loss, convex_topk_hinge_loss)
    values = [zero_one, *(of_one(loss, scores, label, k, margin) for loss in losses)]
    assert all(b >= a - 1e-12 for a, b in itertools.pairwise(values))


@bounded
@given(cases(), st.data())
def test_convex_hinge_is_convex(case: tuple[Tensor, int, int], data: st.DataObject) -> None:
    """Between any scores and the same in any other order."""
    left, label, k = case
    right = vector(data.draw(st.permutations(left.tolist())))
    ends = [of_one(convex_topk_hinge_loss, s, label, k) for s in (left, right)]
    middle = of_one(convex_topk_hinge_loss, (left + right) / 2, label, k)
    assert middle <= sum(ends) / 2 + 1e-12


@pytest.mark.parametrize("loss", [topk_hinge_loss, calibrated_topk_hinge_loss])
def test_hinge_is_not_convex(loss: Loss) -> None:
    """One rival is no rival for two guesses; half of each of two are."""
    ends = [of_one(loss, vector([0.0, *s, -9.0]), 0, 2) for s in ([9.0, -9.0], [-9.0, 9.0])]
    middle = of_one(loss, vector([0.0, 0.0, 0.0, -9.0]), 0, 2)
    assert ends == [0.0, 0.0]
    assert middle == 1.0


# Calibration


def candidates(n: int, margin: float) -> Tensor:
    """Scores among which the hinge losses have a minimiser of every conditional risk.

    Up to a common offset. The risk is not negative, and it is linear on the cells into which the
    hyperplanes s_i = s_j and s_i = s_j + margin cut the space (for the convex hinge, if K ≤ 2), so
    on every closed cell it is least at a vertex. At a vertex, differences of 0 or ±margin connect
    all classes: its scores are 0 to n − 1 times the margin. The scores that are not top-K
    preserving are a union of closed cells, so their infimum is attained here too.
    """
    return margin * torch.tensor(list(itertools.product(range(n), repeat=n)), dtype=torch.float64)


def conditional_risk(loss: Loss, scores: Tensor, pi: Tensor, k: int, margin: float) -> Tensor:
    labels = torch.arange(len(pi)).unsqueeze(1).expand(-1, len(scores))
    options = {"k": k, "margin": margin, "reduction": "none"}
    losses = [loss(scores, target, **options) for target in labels]
    return sum(p * value for p, value in zip(pi, losses, strict=True))


def preserving(scores: Tensor, pi: Tensor, k: int) -> Tensor:
    """P_K(s, π), Definition A.1."""
    top, top_pi = (x.sort(dim=-1, descending=True).values for x in (scores, pi))
    kept = (pi <= top_pi[k]) | (scores > top[:, k : k + 1])
    dropped = (pi >= top_pi[k - 1]) | (scores < top[:, k - 1 : k])
    return (kept & dropped).all(1)


def infima(loss: Loss, pi: Tensor, k: int, margin: float) -> tuple[float, float]:
    """Both sides of equation 16: over scores that are not top-K preserving, and over all."""
    scores = candidates(len(pi), margin)
    risk = conditional_risk(loss, scores, pi, k, margin)
    return risk[~preserving(scores, pi, k)].min().item(), risk.min().item()


DISTRIBUTIONS = [
    *(p / p.sum() for p in -torch.rand(12, 4, generator=torch.Generator().manual_seed(1)).log()),
    *(vector(p) for p in ([0.4, 0.3, 0.2, 0.1], [0.26, 0.25, 0.25, 0.24], [0.4, 0.6, 0.0, 0.0])),
    *(vector(p) for p in ([0.35, 0.35, 0.2, 0.1], [0.4, 0.2, 0.2, 0.2], [0.0, 0.0, 1.0, 0.0])),
]


@every_k
@pytest.mark.parametrize("margin", [0.5, 1.0])
def test_calibrated_hinge_is_calibrated(k: int, margin: float) -> None:
    """Definition A.2 (Yang & Koyejo 2020), for distributions with and without ties and zeros."""
    for pi in DISTRIBUTIONS:
        not_preserving, bayes = infima(calibrated_topk_hinge_loss, pi.double(), k, margin)
        assert not_preserving > bayes + 1e-6


@pytest.mark.parametrize(
    ("loss", "k", "pi", "minimiser", "least"),
    [
        (topk_hinge_loss, 1, [0.4, 0.3, 0.2, 0.1], [0, 0, 0, 0], 1.0),
        (topk_hinge_loss, 2, [0.4, 0.25, 0.2, 0.15], [1, 0, 0, 0], 0.6),
        (convex_topk_hinge_loss, 1, [0.4, 0.3, 0.2, 0.1], [0, 0, 0, 0], 1.0),
        (convex_topk_hinge_loss, 2, [0.4, 0.25, 0.2, 0.15], [1, 0, 0, 0], 0.9),
    ],
)
def test_other_hinges_are_not_calibrated(
    loss: Loss, k: int, pi: list[float], minimiser: list[int], least: float
) -> None:
    """Section 3.1: their minimiser ties a class of the top K with one outside."""
    scores = vector(minimiser).unsqueeze(0)
    assert not preserving(scores, vector(pi), k)
    risk = conditional_risk(loss, scores, vector(pi), k, 1.0).item()
    not_preserving, bayes = infima(loss, vector(pi), k, 1.0)
    assert risk == pytest.approx(least)
    assert not_preserving == bayes == pytest.approx(least)

    calibrated = infima(calibrated_topk_hinge_loss, vector(pi), k, 1.0)
    assert calibrated[0] > calibrated[1] + 0.01
