"""The top-k cross-entropy: likelihoods of random lists of one length, or of several."""

import math
from itertools import combinations

import mpmath
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from topklass import TopKCrossEntropyLoss, topk_marginals
from topklass.functional import smooth_topk_loss, topk_cross_entropy

INF = math.inf
few_examples = settings(max_examples=25, deadline=None, derandomize=True)
rows_of_scores = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=7)
MIXTURES = [{1: 0.5, 5: 0.5}, {2: 1.0}, {7: 2, 1: 1, 3: 5}]


def losses(scores: Tensor, target: Tensor, k) -> Tensor:
    return topk_cross_entropy(scores, target, k, reduction="none")


def gradient(scores: Tensor, target: Tensor, k) -> Tensor:
    leaf = scores.clone().requires_grad_()
    return torch.autograd.grad(losses(leaf, target, k).sum(), leaf)[0]


def shares_of_lists(scores: list[float], k: int) -> list[mpmath.mpf]:
    """π of every class in 50 digits, over all lists."""
    with mpmath.workdps(50):
        shares = [mpmath.mpf(0)] * len(scores)
        total = mpmath.mpf(0)
        for chosen in combinations(range(len(scores)), k):
            weight = mpmath.exp(mpmath.fsum(scores[c] for c in chosen))
            total += weight
            for c in chosen:
                shares[c] += weight
        return [share / total for share in shares]


def exact_mixture(scores: list[float], weights: dict[int, float]) -> list[float]:
    """−log Σ_k P_k π^(k) of every class."""
    with mpmath.workdps(50):
        total = mpmath.fsum(weights.values())
        shares = zip(*(shares_of_lists(scores, k) for k in weights), strict=True)
        mixed = (mpmath.fdot(weights.values(), of_class) / total for of_class in shares)
        return [float(-mpmath.log(share)) for share in mixed]


# One length


@few_examples
@given(rows_of_scores)
def test_by_enumeration(row):
    n = len(row)
    scores = torch.tensor(row, dtype=torch.float64).expand(n, n)
    for k in range(1, n):
        value = losses(scores, torch.arange(n), k).tolist()
        assert value == pytest.approx(exact_mixture(row, {k: 1.0}), rel=1e-11, abs=1e-30)


@pytest.mark.parametrize(("n", "k"), [(2, 1), (9, 2), (9, 8), (50, 12), (50, 13), (50, 49)])
@pytest.mark.parametrize("spread", [0.0, 5.0])
def test_is_the_logarithm_of_the_marginals(n, k, spread):
    scores, target = spread * torch.randn(6, n, dtype=torch.float64), torch.arange(6) % n
    expected = -topk_marginals(scores, k).gather(1, target.unsqueeze(1)).squeeze(1).log()
    torch.testing.assert_close(losses(scores, target, k), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("k", [1, {1: 1.0}, {1: 7}])
def test_is_cross_entropy_for_one_guess(k):
    scores, target = 5 * torch.randn(6, 9, dtype=torch.float64), torch.arange(6)
    expected = F.cross_entropy(scores, target, reduction="none")
    torch.testing.assert_close(losses(scores, target, k), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("k", [1, 2, 5, 13])
def test_is_the_smooth_loss_times_k(k):
    scores, target = torch.randn(6, 20, dtype=torch.float64), torch.arange(6)
    smooth = smooth_topk_loss(scores, target, k, tau=1 / k, margin=0.0, reduction="none")
    torch.testing.assert_close(losses(scores, target, k), k * smooth, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("n", "k"), [(5, 1), (9, 2), (9, 8), (30, 13)])
def test_gradient_compares_marginals(n, k):
    """∂ℓ/∂s = the marginals of lists, less those of lists that hold the label."""
    scores, target = torch.randn(4, n, dtype=torch.float64), torch.tensor([0, 1, 3, n - 1])
    others = scores.scatter(1, target.unsqueeze(1), -INF)
    given_label = topk_marginals(others, k - 1) if k > 1 else torch.zeros_like(scores)
    given_label = given_label.scatter(1, target.unsqueeze(1), 1.0)
    expected = topk_marginals(scores, k) - given_label
    torch.testing.assert_close(gradient(scores, target, k), expected, rtol=1e-10, atol=1e-12)


def test_half_precision_of_any_length():
    scores, target = torch.randn(30, 9).bfloat16(), torch.arange(30) % 9
    for k in (3, 5, {1: 1.0, 5: 2.0}):
        value = losses(scores, target, k)
        exact = losses(scores.float(), target, k)
        assert value.dtype == torch.bfloat16
        torch.testing.assert_close(value.float(), exact, rtol=2**-7, atol=1e-6)


# Several lengths


@few_examples
@given(rows_of_scores, st.lists(st.floats(0.001, 10), min_size=6, max_size=6))
def test_mixture_by_enumeration(row, weights):
    lengths = dict(zip(range(1, len(row)), weights, strict=False))
    n = len(row)
    scores = torch.tensor(row, dtype=torch.float64).expand(n, n)
    value = losses(scores, torch.arange(n), lengths).tolist()
    assert value == pytest.approx(exact_mixture(row, lengths), rel=1e-11, abs=1e-30)


@pytest.mark.parametrize("weights", MIXTURES, ids=str)
@pytest.mark.parametrize("kind", ["indices", "probabilities", "smoothed"])
def test_mixture_of_marginals(weights, kind):
    scores, target = 2 * torch.randn(6, 9, dtype=torch.float64), torch.arange(6)
    total = sum(weights.values())
    chances = sum(w / total * topk_marginals(scores, k) for k, w in weights.items())
    options = {}
    if kind == "indices":
        expected = F.nll_loss(chances.log(), target)
    elif kind == "probabilities":
        target = torch.rand(6, 9, dtype=torch.float64)
        expected = -(target * chances.log()).sum(1).mean()
    else:
        options = {"label_smoothing": 0.3}
        expected = 0.7 * F.nll_loss(chances.log(), target) - 0.3 * chances.log().mean()
    torch.testing.assert_close(topk_cross_entropy(scores, target, weights, **options), expected)


@pytest.mark.parametrize(
    "k", [{3: 2.0}, {3: 1, 9: 0}, [0, 0.0, 0.5], (0, 0, 1) + (0,) * 9], ids=str
)
def test_one_length_of_a_mixture_is_that_length(k):
    """Lengths of weight 0 do not count, not even those that are too long."""
    scores, target = torch.randn(4, 9, dtype=torch.float64), torch.arange(4)
    assert torch.equal(losses(scores, target, k), losses(scores, target, 3))


def test_sequence_of_weights():
    """Those of the lengths 1, 2, …, as difftopk has it."""
    scores, target = torch.randn(4, 9, dtype=torch.float64), torch.arange(4)
    expected = losses(scores, target, {1: 0.5, 3: 0.25, 4: 0.25})
    for weights in ([0.5, 0, 0.25, 0.25], (0.5, 0.0, 0.25, 0.25, 0.0)):
        assert torch.equal(losses(scores, target, weights), expected)
        assert torch.equal(
            TopKCrossEntropyLoss(weights, reduction="none")(scores, target), expected
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("gap", [1e-3, 1.0, 30.0, 200.0, 5000.0, -30.0, -80.0])
@pytest.mark.parametrize("weights", [{1: 0.5, 2: 0.5}, {1: 1.0, 2: 1e-20}, {1: 1e-12, 2: 1.0}])
def test_mixture_is_exact_in_the_tails(dtype, gap, weights):
    """For labels hopelessly behind, labels far ahead, and lengths that are hardly ever drawn."""
    scores = torch.tensor([[gap, 0.0, gap / 2, 0.25]], dtype=dtype)
    value = losses(scores, torch.tensor([1]), weights).double().item()
    expected = exact_mixture(scores[0].double().tolist(), weights)[1]
    assert value == pytest.approx(expected, rel=1e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("gap", [30.0, 5000.0, -80.0])
def test_gradient_of_a_mixture_in_the_tails(gap):
    """Σ_k q_k ∂ℓ_k with the posterior q of the length."""
    weights = {1: 0.5, 2: 1e-20, 3: 0.5}
    scores, target = (
        torch.tensor([[gap, 0.0, gap / 2, 0.25]], dtype=torch.float64),
        torch.tensor([1]),
    )
    each = torch.stack([losses(scores, target, k) for k in weights])
    prior = torch.tensor(list(weights.values()), dtype=torch.float64).log().unsqueeze(1)
    posterior = (prior - each).softmax(0)
    expected = sum(q * gradient(scores, target, k) for q, k in zip(posterior, weights, strict=True))
    torch.testing.assert_close(gradient(scores, target, weights), expected, rtol=1e-10, atol=1e-16)


@pytest.mark.parametrize("rivals", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_mixture_where_long_lists_hold_every_class(rivals, dtype):
    """Their marginals are 1, the loss is that of the others, and 0 if there are none."""
    scores = torch.full((1, 20), -INF, dtype=dtype)
    scores[0, : rivals + 1] = torch.randn(rivals + 1, dtype=dtype)
    target = torch.tensor([0])
    first = scores.softmax(1)[0, 0]
    torch.testing.assert_close(
        losses(scores, target, {1: 1.0, 13: 1.0})[0], -(0.5 * first + 0.5).log()
    )
    assert losses(scores, target, {4: 1.0, 5: 2.0, 13: 4.0}) == 0
    assert (gradient(scores, target, {4: 1.0, 5: 2.0, 13: 4.0}) == 0).all()


@pytest.mark.parametrize("k", [1, 2, 13, {1: 1.0, 2: 1.0}, {2: 0.5, 13: 0.5}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_absent_label(k, dtype):
    scores, target = torch.randn(2, 20, dtype=dtype), torch.tensor([0, 1])
    scores[0, 0] = -INF
    assert losses(scores, target, k)[0] == INF
    assert losses(scores, target, k)[1].isfinite()
    assert gradient(scores, target, k).isfinite().all()
    mask = F.one_hot(target, 20).to(dtype)
    assert losses(scores, mask, k)[0] == INF
    assert gradient(scores, mask, k)[1].isfinite().all()


def test_nan_of_a_mixture():
    scores = torch.randn(2, 9)
    scores[0, 3] = math.nan
    assert losses(scores, torch.tensor([0, 1]), {1: 1.0, 5: 1.0}).isnan().tolist() == [True, False]


# Arguments


@pytest.mark.parametrize(
    ("k", "error", "message"),
    [
        ({}, ValueError, "at least one length"),
        ({0: 1.0}, ValueError, "k=0"),
        ({2.0: 1.0}, TypeError, "integer"),
        ({2: 0.0}, ValueError, "at least one length"),
        ({2: -1.0, 3: 2.0}, ValueError, "the weight of k=2 must be non-negative"),
        ({2: INF}, ValueError, "finite"),
        ({2: math.nan}, ValueError, "finite"),
        ({2: "1"}, TypeError, "number"),
        ([], ValueError, "at least one length"),
        ([0.0, 0], ValueError, "at least one length"),
        ([0.5, -0.5], ValueError, "the weight of k=2"),
        ("12", TypeError, "number"),
    ],
    ids=str,
)
def test_bad_lengths(k, error, message):
    with pytest.raises(error, match=message):
        TopKCrossEntropyLoss(k)
    with pytest.raises(error, match=message):
        topk_cross_entropy(torch.randn(3, 6), torch.arange(3), k)


@pytest.mark.parametrize("k", [6, {1: 1.0, 6: 1.0}, [1.0] * 6], ids=str)
def test_lists_that_are_too_long(k):
    with pytest.raises(ValueError, match=r"from 1 to 5.*6 classes, got k=6"):
        TopKCrossEntropyLoss(k)(torch.randn(3, 6), torch.arange(3))


def test_lengths_are_copied():
    given = {1: 1.0}
    module = TopKCrossEntropyLoss(given)
    given[5] = 1.0
    assert module.k == {1: 1.0}


def test_lengths_are_no_sequence_of_weights():
    """``k=(1, 5)`` are two lengths elsewhere: here it would mean something else in silence."""
    with pytest.raises(ValueError, match=r"\{1: 0.5, 5: 0.5\}"):
        TopKCrossEntropyLoss((1, 5))
    with pytest.raises(TypeError, match="k must be an integer"):
        TopKCrossEntropyLoss({1, 5})
