"""The papers' own code as an oracle where it is right, and what it does where it is not.

``pytopk`` is the code of Garcin et al. (2022). ``difftopk`` carries that of Berrada et al. (2018):
``SmoothHardTopKLoss`` is the published loss, ``SmoothTopKLoss`` leaves its hard switch out.
"""

import math
import warnings

import mpmath
import pytest
import torch
from torch import Tensor

from contract_cases import all_pairs
from topklass import class_margins, noised_topk
from topklass.functional import noised_topk_loss, smooth_topk_loss

pytopk = pytest.importorskip("pytopk")
difftopk = pytest.importorskip("difftopk")

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
SWITCHING, SMOOTH = difftopk.SmoothHardTopKLoss, difftopk.SmoothTopKLoss
GAP = 5 * math.log(1000)
"""Between s_[k] and s_[k+1], for k = 5 and τ = 1, at which the published loss switches."""


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=dtype)


def value_and_gradient(loss: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    return loss.detach(), torch.autograd.grad(loss, scores)[0]


# pytopk


def drawn_noise(*shape: int) -> Tensor:
    """What the published modules draw next, torch.randn(N, C, B), leaving it to be drawn."""
    torch.manual_seed(3)
    noise = torch.randn(*shape)
    torch.manual_seed(3)
    return noise


@both_dtypes
@pytest.mark.parametrize(("n", "k"), [(3, 1), (3, 2), (20, 5), (100, 10)])
@pytest.mark.parametrize("epsilon", [0.0, 0.2, 1.0])
def test_balanced_noised_loss(dtype: torch.dtype, n: int, k: int, epsilon: float) -> None:
    batch, samples = 16, 6
    scores, target = normal(batch, n, dtype=dtype).requires_grad_(), torch.arange(batch) % n
    noise = drawn_noise(batch, n, samples)
    published = pytopk.BalNoisedTopK(k, epsilon, samples)(scores, target)
    loss = noised_topk_loss(scores, target, k, epsilon, samples, noise=noise)
    torch.testing.assert_close(
        value_and_gradient(loss, scores), value_and_gradient(published, scores)
    )


@pytest.mark.parametrize(("n", "k"), [(3, 1), (3, 2), (20, 5), (100, 10)])
@pytest.mark.parametrize(("epsilon", "scale"), [(0.01, 60), (0.1, 50), (1.0, 1)])
def test_imbalanced_noised_loss(n: int, k: int, epsilon: float, scale: int) -> None:
    """With margins made from the same counts."""
    batch, samples, largest = 16, 5, 0.2
    scores, target = torch.tanh(normal(batch, n)).requires_grad_(), torch.arange(batch) % n
    counts = [3 + 7 * i**2 for i in range(n)]
    published = pytopk.ImbalNoisedTopK(k, epsilon, largest, counts, scale, samples)
    margins = class_margins(torch.tensor(counts), largest)
    torch.testing.assert_close(margins, published.m_list)

    noise = drawn_noise(batch, n, samples)
    theirs = published(scores, target)
    loss = noised_topk_loss(scores, target, k, epsilon, samples, margins, scale, noise=noise)
    torch.testing.assert_close(value_and_gradient(loss, scores), value_and_gradient(theirs, scores))


@pytest.mark.parametrize("k", [1, 3, 8])
def test_noised_operator(k: int) -> None:
    scores = normal(2, 5, 8).requires_grad_()
    noise = drawn_noise(2, 5, 8, 4)
    published = pytopk.NoisedTopK(k, epsilon=0.7, n_sample=4)(scores)
    actual = noised_topk(scores, k, 0.7, noise=noise)
    torch.testing.assert_close(actual, published)
    gradients = [value_and_gradient(top.square().sum(), scores) for top in (actual, published)]
    torch.testing.assert_close(*gradients)


def test_margins_of_an_empty_class() -> None:
    """One count of 0 makes the published margins, and so the loss, NaN."""
    counts = [0, 16, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        published = pytopk.ImbalNoisedTopK(1, 0.1, 0.2, counts).m_list
    assert published.isnan().any()
    torch.testing.assert_close(class_margins(torch.tensor(counts)), torch.tensor([0.2, 0.1, 0.2]))


# The smooth loss


def published_loss(
    kind: type[torch.nn.Module], scores: Tensor, target: Tensor, k: int, tau: float = 1.0
) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*should not be instantiated", DeprecationWarning)
        loss: Tensor = kind(scores.shape[1], k, tau)(scores, target)
    return loss


def exact_loss(scores: Tensor, label: int, k: int, tau: float, margin: float = 1.0) -> float:
    """Equation 10 in 50 digits."""
    with mpmath.workdps(50):
        e = [mpmath.exp(mpmath.mpf(s) / (k * mpmath.mpf(tau))) for s in scores.tolist()]
        of_label = e.pop(label)
        sigma = [mpmath.mpf(1)] + [mpmath.mpf(0)] * k
        for e_i in e:
            for j in range(k, 0, -1):
                sigma[j] += e_i * sigma[j - 1]
        odds = mpmath.exp(mpmath.mpf(margin) / tau) * sigma[k] / (of_label * sigma[k - 1])
        return float(tau * mpmath.log(1 + odds))


def mean_exact_loss(scores: Tensor, target: Tensor, k: int, tau: float) -> float:
    rows = zip(scores, target.tolist(), strict=True)
    return math.fsum(exact_loss(row, label, k, tau) for row, label in rows) / len(scores)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    ("size", "tau", "kind", "dtype"),
    all_pairs(
        [(10, 2), (10, 5), (50, 3), (200, 8), (1000, 5)],
        [0.5, 1.0, 3.0],
        [SWITCHING, SMOOTH],
        [torch.float32, torch.float64],
    ),
    ids=str,
)
def test_smooth_loss(
    size: tuple[int, int], tau: float, kind: type[torch.nn.Module], dtype: torch.dtype
) -> None:
    """Scores near 0 and close together: nothing switches, overflows or cancels."""
    n, k = size
    scores, target = normal(6, n, dtype=dtype).requires_grad_(), torch.arange(6)
    published, gradient = value_and_gradient(published_loss(kind, scores, target, k, tau), scores)
    loss, actual = value_and_gradient(smooth_topk_loss(scores, target, k, tau), scores)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    torch.testing.assert_close(loss, published, rtol=tolerance, atol=0.0)
    assert relative_error(actual, gradient) <= 100 * tolerance


@pytest.mark.parametrize("beyond", [False, True])
def test_hard_switch(beyond: bool) -> None:
    """Five tied scores, the label among them: the published loss falls from 0.832 to 0."""
    scores = torch.zeros(1, 1000, dtype=torch.float64)
    scores[0, :5] = GAP + (1e-6 if beyond else -1e-6)
    scores.requires_grad_()
    target = torch.tensor([0])
    exact = exact_loss(scores[0], 0, 5, 1.0)
    assert exact == pytest.approx(0.832, abs=5e-4)

    published, gradient = value_and_gradient(published_loss(SWITCHING, scores, target, 5), scores)
    assert published.item() == pytest.approx(0.0 if beyond else exact, rel=1e-12)
    assert gradient.any() != beyond
    loss, actual = value_and_gradient(smooth_topk_loss(scores, target, 5), scores)
    assert loss.item() == pytest.approx(exact, rel=1e-12)
    assert actual.all()


def test_hard_switch_grows_with_the_number_of_classes() -> None:
    scores = torch.zeros(1, 100_000, dtype=torch.float64)
    scores[0, :5] = GAP + 1e-6
    target = torch.tensor([0])
    assert published_loss(SWITCHING, scores, target, 5).item() == 0.0
    loss = smooth_topk_loss(scores, target, 5).item()
    assert loss == pytest.approx(published_loss(SMOOTH, scores, target, 5).item(), rel=1e-9)
    assert loss == pytest.approx(4.05, abs=5e-3)


@pytest.mark.parametrize("offset", [100.0, 1000.0])
def test_offset_in_single_precision(offset: float) -> None:
    """An offset changes nothing in equation 10; rounded to 1/64, scores bear it exactly."""
    scores, target = (normal(2, 10_000) * 64).round() / 64, torch.tensor([0, 1])
    exact = mean_exact_loss(scores, target, 5, 1.0)
    moved = (scores + offset).requires_grad_()
    published, gradient = value_and_gradient(published_loss(SMOOTH, moved, target, 5), moved)
    assert abs(published.item() / exact - 1) > 1e-4
    assert gradient.sum().abs() > 1e-3
    loss, actual = value_and_gradient(smooth_topk_loss(moved, target, 5), moved)
    assert loss.item() == pytest.approx(exact, rel=1e-6)
    assert actual.sum().abs() < 1e-6


@pytest.mark.parametrize("kind", [SWITCHING, SMOOTH])
def test_absent_class(kind: type[torch.nn.Module]) -> None:
    """A score of −inf makes the published loss NaN; it should count for nothing."""
    scores, target = normal(1, 20), torch.tensor([0])
    absent = torch.cat((scores, torch.full((1, 2), -math.inf)), 1)
    assert published_loss(kind, absent, target, 5).isnan()
    torch.testing.assert_close(
        smooth_topk_loss(absent, target, 5), published_loss(kind, scores, target, 5)
    )


@pytest.mark.parametrize("kind", [SWITCHING, SMOOTH])
def test_as_many_guesses_as_other_classes(kind: type[torch.nn.Module]) -> None:
    """The backward approximation asks the published loss for k + 0.2 k other classes."""
    scores, target = normal(1, 6), torch.tensor([2])
    with pytest.raises(AssertionError):
        published_loss(kind, scores, target, 5)
    exact = exact_loss(scores[0], 2, 5, 1.0)
    assert smooth_topk_loss(scores, target, 5).item() == pytest.approx(exact, rel=1e-6)


def test_gradient_for_one_guess() -> None:
    """The published value is right for k = 1, its gradient is not."""
    scores, target = normal(4, 10, dtype=torch.float64).requires_grad_(), torch.arange(4)
    published, gradient = value_and_gradient(published_loss(SMOOTH, scores, target, 1), scores)
    loss, actual = value_and_gradient(smooth_topk_loss(scores, target, 1), scores)
    torch.testing.assert_close(loss, published)
    assert relative_error(gradient, actual) > 1
    assert torch.autograd.gradcheck(lambda s: smooth_topk_loss(s, target, 1), scores)


def test_gradient_at_a_low_temperature() -> None:
    """The published approximation is of order 1 here: 4 digits are lost even in float64."""
    scores, target = normal(6, 10, dtype=torch.float64).requires_grad_(), torch.arange(6)
    published, gradient = value_and_gradient(published_loss(SMOOTH, scores, target, 3, 0.1), scores)
    loss, actual = value_and_gradient(smooth_topk_loss(scores, target, 3, 0.1), scores)
    torch.testing.assert_close(loss, published)
    assert 1e-5 < relative_error(gradient, actual) < 1e-2
    assert torch.autograd.gradcheck(lambda s: smooth_topk_loss(s, target, 3, 0.1), scores)
