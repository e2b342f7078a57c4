"""The expected k-th largest score under noise: against plain integration, and its own laws."""

from itertools import pairwise, product
from math import inf, nan, pi, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Binomial

import topklass
from contract_cases import all_pairs
from test_garcin import expectation
from topklass import expected_topk, noised_topk
from topklass.reference import expected, expected_bins
from topklass.reference.poisson_binomial import fewer_than

ROWS = {
    "random": lambda n: torch.randn(3, n, dtype=torch.float64),
    "spread": lambda n: 4 * torch.randn(3, n, dtype=torch.float64),
    "zeros": lambda n: torch.zeros(2, n, dtype=torch.float64),
    "one far above many": lambda n: torch.zeros(1, n, dtype=torch.float64).index_fill(
        1, torch.tensor([0]), 5.0
    ),
    "two levels": lambda n: torch.zeros(1, n, dtype=torch.float64).index_fill(
        1, torch.arange(n // 2), -3.0
    ),
}


def by_integration(scores: Tensor, k: int, epsilon: float) -> tuple[Tensor, Tensor]:
    """Value and chances of (R, n) scores."""
    leaf = scores.clone().requires_grad_()
    values = torch.stack([expectation(row, k, epsilon) for row in leaf])
    (chances,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), chances


def value_and_gradient(scores: Tensor, k: int, epsilon: float) -> tuple[Tensor, Tensor]:
    leaf = scores.clone().requires_grad_()
    value = expected_topk(leaf, k, epsilon)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


@pytest.mark.parametrize(
    ("size", "kind", "epsilon"),
    all_pairs([(2, 1), (2, 2), (7, 1), (7, 3), (7, 7), (16, 12)], list(ROWS), [0.2, 1.0]),
    ids=str,
)
def test_against_integration(size, kind, epsilon):
    torch.manual_seed(0)
    n, k = size
    scores = ROWS[kind](n)
    value, chances = by_integration(scores, k, epsilon)
    for dtype, error in ((torch.float32, 1e-5), (torch.float64, 1e-9)):
        actual, gradient = value_and_gradient(scores.to(dtype), k, epsilon)
        assert actual.dtype == gradient.dtype == dtype
        torch.testing.assert_close(actual.double(), value, rtol=1e-7, atol=error * epsilon)
        torch.testing.assert_close(gradient.double(), chances, rtol=0, atol=error)


@pytest.mark.parametrize(
    ("n", "k"),
    [(1_000, 5), (1_000, 11), (300, 40), pytest.param(20_000, 3, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("kind", ROWS)
def test_single_precision_of_many_classes(kind, n, k):
    """Against a finer rule in float64, which the test above proves."""
    torch.manual_seed(0)
    scores = ROWS[kind](n)[:1]
    value, chances = value_and_gradient(scores, k, 0.5)
    actual, gradient = value_and_gradient(scores.float(), k, 0.5)
    torch.testing.assert_close(actual.double(), value, rtol=1e-7, atol=1e-5 * 0.5)
    torch.testing.assert_close(gradient.double(), chances, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("above", [3.9, 4.3, 4.9])
def test_one_score_at_the_edge_of_many(above):
    """The hardest case found: the sharp edge of a crowd inside of a wide window."""
    scores = torch.zeros(1, 100_000, dtype=torch.float64)
    scores[0, 0] = above
    value, chances = value_and_gradient(scores, 1, 1.0)
    actual, gradient = value_and_gradient(scores.float(), 1, 1.0)
    torch.testing.assert_close(actual.double(), value, rtol=0, atol=2e-5)
    torch.testing.assert_close(gradient.double(), chances, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("k", "high"), [(4, 3), (40, 38)])
def test_certain_scores_do_not_matter(k, high):
    """Those far above are left out where every row has them."""
    scores = torch.randn(3, 60, generator=seeded(0))
    far = torch.cat([scores.new_full((3, high), 100.0), scores], 1)
    value, gradient = value_and_gradient(far, k, 0.5)
    few, few_gradient = value_and_gradient(scores, k - high, 0.5)
    torch.testing.assert_close(value, few)
    torch.testing.assert_close(gradient[:, high:], few_gradient)
    assert (gradient[:, :high] == 0).all()
    heads = far.topk(k).values
    assert expected.without_certain(heads, heads < 50).shape == (3, k - high)


@pytest.mark.parametrize("k", [1, 5])
def test_a_hundred_thousand_equal_scores(k):
    """The count of those above a threshold is binomial then."""
    n = 100_000
    t = torch.linspace(0, 9, 20_001, dtype=torch.float64)
    above = Binomial(n, torch.special.ndtr(-t))
    below = sum(above.log_prob(torch.tensor(float(j))).exp() for j in range(k))
    value, gradient = value_and_gradient(torch.zeros(n), k, 1.0)
    assert value == pytest.approx(torch.trapezoid(1 - below, t).item(), abs=1e-5)
    torch.testing.assert_close(gradient, torch.full((n,), 1 / n), rtol=1e-4, atol=0)


def test_known_values():
    zeros = torch.zeros(3, dtype=torch.float64)
    assert expected_topk(zeros, 1) == pytest.approx(1.5 / sqrt(pi), abs=1e-10)
    assert expected_topk(zeros, 2) == pytest.approx(0, abs=1e-10)
    assert expected_topk(zeros[:2] + 3, 2, 0.1) == pytest.approx(3 - 0.1 / sqrt(pi), abs=1e-10)
    assert expected_topk(zeros[:1], 1) == pytest.approx(0, abs=1e-10)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    scores=st.lists(st.floats(-3, 3), min_size=1, max_size=8),
    epsilon=st.sampled_from([0.05, 0.5, 2.0]),
)
def test_laws(scores, epsilon):
    """Ranks descend and add up to the scores; chances are probabilities, over ranks and classes."""
    row = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    ranks = [expected_topk(row, k, epsilon) for k in range(1, len(scores) + 1)]
    assert all(a > b for a, b in pairwise(ranks))
    torch.testing.assert_close(sum(ranks), row.sum(), rtol=0, atol=1e-8)
    chances = torch.stack([torch.autograd.grad(rank, row, retain_graph=True)[0] for rank in ranks])
    ones = torch.ones_like(row)
    torch.testing.assert_close(chances.sum(0), ones, rtol=0, atol=1e-8)
    torch.testing.assert_close(chances.sum(1), ones, rtol=0, atol=1e-8)
    assert chances.min() >= -1e-12
    moved = expected_topk(row.detach() + 100, 1, epsilon) - 100
    torch.testing.assert_close(moved, ranks[0].detach(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("epsilon", [0.0, 1e-30, 1e-6])
def test_little_noise_is_the_hard_operator(epsilon):
    scores = torch.tensor([[3.0, 1.0, 2.0, -inf], [0.5, 0.25, 4.0, 1.0]])
    value, gradient = value_and_gradient(scores, 2, epsilon)
    torch.testing.assert_close(value, torch.tensor([2.0, 1.0]))
    torch.testing.assert_close(gradient, torch.eye(4)[[2, 3]])


def test_much_noise():
    value, gradient = value_and_gradient(torch.randn(2, 3, generator=seeded(0)), 1, 1e6)
    torch.testing.assert_close(value, torch.full((2,), 1e6 * 1.5 / sqrt(pi)), rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, torch.full((2, 3), 1 / 3), rtol=0, atol=1e-5)


def test_absent_classes_change_nothing():
    scores = torch.randn(4, 9, generator=seeded(0))
    padded = torch.cat([scores, torch.full((4, 30), -inf)], 1)
    value, gradient = value_and_gradient(scores, 3, 0.5)
    actual, padded_gradient = value_and_gradient(padded, 3, 0.5)
    torch.testing.assert_close(actual, value)
    torch.testing.assert_close(padded_gradient[:, :9], gradient)
    assert (padded_gradient[:, 9:] == 0).all()


def test_too_few_classes_present():
    scores = torch.tensor([[1.0, -inf, -inf], [1.0, 2.0, -inf], [-inf, -inf, -inf]])
    value, gradient = value_and_gradient(scores, 2, 0.5)
    assert value[0] == value[2] == -inf
    assert torch.isfinite(value[1])
    assert torch.isfinite(gradient).all()


def test_infinite_scores_and_nan():
    scores = torch.tensor([[inf, inf, 1.0], [inf, 1.0, 0.0], [nan, 1.0, 2.0]])
    value = expected_topk(scores, 2, 0.5)
    assert value[0] == inf
    torch.testing.assert_close(value[1], expected_topk(scores[1, 1:], 1, 0.5))
    assert value[2].isnan()
    assert expected_topk(scores[2], 1, 0.5).isnan()
    masked = torch.tensor([[nan, 1.0, 2.0, -inf, -inf], [nan, inf, inf, 0.0, 0.0]])
    assert expected_topk(masked, 4, 0.5)[0].isnan()
    assert expected_topk(masked, 2, 0.5)[1].isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    scores = torch.randn(4, 20, generator=seeded(0)).to(dtype)
    value, gradient = value_and_gradient(scores, 3, 0.5)
    assert value.dtype == gradient.dtype == dtype
    wide, wide_gradient = value_and_gradient(scores.float(), 3, 0.5)
    torch.testing.assert_close(value, wide.to(dtype))
    torch.testing.assert_close(gradient, wide_gradient.to(dtype))


@pytest.mark.parametrize("shape", [(5,), (0, 5), (2, 0, 5), (2, 3, 5)])
def test_shapes(shape):
    scores = torch.randn(shape, generator=seeded(0))
    value, gradient = value_and_gradient(scores, 2, 0.5)
    assert value.shape == shape[:-1]
    assert gradient.shape == shape
    for index in product(*map(range, shape[:-1])):
        torch.testing.assert_close(value[index], expected_topk(scores[index], 2, 0.5))


def test_derivatives():
    scores = torch.randn(2, 5, dtype=torch.float64, generator=seeded(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: expected_topk(s, 2, 0.5), scores)
    assert torch.autograd.gradgradcheck(lambda s: expected_topk(s, 2, 0.5), scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_of_rows(dtype, monkeypatch):
    """The same value and gradient when memory allows for one row at a time."""
    scores = torch.randn(7, 50, dtype=dtype, generator=seeded(0))
    value, gradient = value_and_gradient(scores, 3, 0.5)
    monkeypatch.setattr("topklass.reference.row_blocks.GRAPH_ELEMENTS", {"cpu": 1, "other": 1})
    monkeypatch.setattr(expected_bins, "BLOCK_ELEMENTS", 1)
    again, again_gradient = value_and_gradient(scores, 3, 0.5)
    torch.testing.assert_close(again, value)
    torch.testing.assert_close(again_gradient, gradient)


@pytest.mark.parametrize("depth", [0.3, 1.1, 3.3, 5.1, 8.1, 12.0])
@pytest.mark.parametrize(("k", "ties"), [(1, 1), (6, 6), (6, 12)])
def test_crowd_below(k, ties, depth):
    """Many equal scores at any place of a bin, under few: each counts little, all of them much."""
    scores = torch.full((1, 2_000), -depth)
    scores[0, :ties] = 0.0
    value, chances = value_and_gradient(scores.double(), k, 1.0)
    actual, gradient = value_and_gradient(scores, k, 1.0)
    torch.testing.assert_close(actual.double(), value, rtol=0, atol=4e-6)
    torch.testing.assert_close(gradient.double(), chances, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("k", [expected_bins.LARGEST_K, expected_bins.LARGEST_K + 1])
def test_long_lists(k):
    """Up to the longest for which there are bins, and beyond."""
    scores = torch.randn(1, 150, generator=seeded(0))
    scores[0, :100] = scores[0, 0]
    assert expected_bins.serves(scores, k) == (k <= expected_bins.LARGEST_K)
    value, chances = value_and_gradient(scores.double(), k, 0.5)
    actual, gradient = value_and_gradient(scores, k, 0.5)
    torch.testing.assert_close(actual.double(), value, rtol=0, atol=2e-6)
    torch.testing.assert_close(gradient.double(), chances, rtol=0, atol=2e-6)


def test_second_derivatives_in_single_precision():
    scores = torch.randn(2, 9, generator=seeded(0))
    second = []
    for dtype in (torch.float32, torch.float64):
        leaf = scores.to(dtype).requires_grad_()
        (first,) = torch.autograd.grad(expected_topk(leaf, 2, 0.5).sum(), leaf, create_graph=True)
        second += torch.autograd.grad((first**2).sum(), leaf)
    torch.testing.assert_close(second[0].double(), second[1], rtol=0, atol=1e-5)
    assert second[1].abs().max() > 0.01


def test_value_alone(monkeypatch):
    """What costs more than the value is not computed."""
    scores = torch.randn(3, 30, requires_grad=True, generator=seeded(0))
    value = expected_topk(scores, 4, 0.5)
    monkeypatch.setattr(expected_bins, "newton_scaled_backward", None)
    with torch.no_grad():
        assert torch.equal(expected_topk(scores, 4, 0.5), value)


def test_classes_out_of_reach_are_left_out():
    scores = torch.cat([torch.randn(4, 10), torch.full((4, 1_000), -50.0)], 1)
    kept = expected.within_reach(scores, scores.topk(3).values[:, -1:] - 15)
    assert kept.shape[1] <= 10
    value, gradient = value_and_gradient(scores, 3, 0.5)
    few, few_gradient = value_and_gradient(scores[:, :10], 3, 0.5)
    torch.testing.assert_close(value, few)
    torch.testing.assert_close(gradient[:, :10], few_gradient)


@pytest.mark.filterwarnings("ignore")  # the compiler warns, differently in every version
def test_transforms_and_compilation():
    scores = torch.randn(3, 30, generator=seeded(0))
    value, gradient = value_and_gradient(scores, 4, 0.5)

    def operator(s: Tensor) -> Tensor:
        return expected_topk(s, 4, 0.5)

    torch.testing.assert_close(torch.func.vmap(operator)(scores), value)
    per_row = torch.func.vmap(torch.func.grad(operator))(scores)
    torch.testing.assert_close(per_row, gradient)
    _, tangent = torch.func.jvp(operator, (scores,), (torch.ones_like(scores),))
    torch.testing.assert_close(tangent, torch.ones(3), rtol=0, atol=1e-5)
    leaf = scores.clone().requires_grad_()
    compiled = torch.compile(operator, fullgraph=True, backend="aot_eager")(leaf)
    torch.testing.assert_close(compiled, value)
    torch.testing.assert_close(torch.autograd.grad(compiled.sum(), leaf)[0], gradient)


def test_log_chances():
    x = torch.linspace(-12, 8, 401, dtype=torch.float64, requires_grad=True)
    for log, other in zip(expected.log_chances(x), (x, -x), strict=True):
        exact = torch.special.log_ndtr(other)
        torch.testing.assert_close(log, exact, rtol=1e-13, atol=1e-16)
        (gradient,) = torch.autograd.grad(log.sum(), x, retain_graph=True)
        torch.testing.assert_close(gradient, torch.autograd.grad(exact.sum(), x)[0])


@pytest.mark.parametrize("k", [1, 2, 5, 20])
def test_fewer_than(k):
    torch.manual_seed(0)
    p = torch.rand(4, 20, dtype=torch.float64).sort(descending=True).values
    counts = torch.zeros(4, 21, dtype=torch.float64)
    counts[:, 0] = 1
    for q in p.unbind(1):
        counts[:, 1:] = counts[:, 1:] * (1 - q[:, None]) + counts[:, :-1] * q[:, None]
        counts[:, 0] *= 1 - q
    torch.testing.assert_close(fewer_than(k, p.log(), (-p).log1p()), counts[:, :k].sum(1))


def test_bad_input():
    with pytest.raises(ValueError, match="epsilon"):
        expected_topk(torch.zeros(3), 1, -1.0)
    with pytest.raises(ValueError, match="epsilon must be from 1e-30 to 1e30"):
        expected_topk(torch.zeros(3), 1, 1e39)
    with pytest.raises(ValueError, match="k must be"):
        expected_topk(torch.zeros(3), 4)
    with pytest.raises(TypeError, match="floating-point"):
        expected_topk(torch.zeros(3, dtype=torch.int64), 1)


# The noised loss without chance


def test_exact_loss_is_the_limit_of_many_samples():
    torch.manual_seed(0)
    logits, target = torch.randn(64, 20), torch.randint(20, (64,))
    criterion = topklass.NoisedTopKLoss(k=3, epsilon=0.7, samples=10)
    assert criterion(logits, target) != criterion(logits, target)
    drawn = torch.stack([criterion(logits, target) for _ in range(100)])
    exact = topklass.NoisedTopKLoss(k=3, epsilon=0.7, samples=None)
    value = exact(logits, target)
    assert value == exact(logits, target)
    many = topklass.NoisedTopKLoss(k=3, epsilon=0.7, samples=1_000)(logits, target)
    assert abs(many - value) < 5 * drawn.std() / 10


def test_evaluation_changes_nothing():
    logits, target = torch.randn(64, 20), torch.randint(20, (64,))
    criterion = topklass.NoisedTopKLoss(k=3)
    values = []
    for module in (criterion, criterion.eval()):
        torch.manual_seed(3)
        values.append(module(logits, target))
    assert values[0] == values[1]
    assert criterion(logits, target) != values[1]


@pytest.mark.parametrize("samples", [None, 1, 5])
def test_given_noise_sets_the_number_of_samples(samples):
    logits, target, noise = torch.randn(4, 9), torch.arange(4), torch.randn(4, 9, 2)
    expected = topklass.NoisedTopKLoss(k=3, epsilon=0.7, samples=2)(logits, target, noise=noise)
    criterion = topklass.NoisedTopKLoss(k=3, epsilon=0.7, samples=samples)
    assert criterion(logits, target, noise=noise) == expected
    assert noised_topk(logits, 3, samples=5, noise=noise).equal(noised_topk(logits, 3, noise=noise))


def test_defaults():
    """Operator and loss agree: ε = 1, ten samples, and eps, samples in this order."""
    logits, target = torch.randn(4, 9), torch.arange(4)
    noise = [seeded(1) for _ in range(4)]
    expected = noised_topk(logits, 6, 1.0, 10, generator=noise[0])
    assert torch.equal(noised_topk(logits, 6, generator=noise[1]), expected)
    value = topklass.NoisedTopKLoss(reduction="none")(logits, target, generator=noise[2])
    torch.testing.assert_close(value, (1 + expected - logits.diagonal()).relu())
    function = topklass.functional.noised_topk_loss
    assert torch.equal(function(logits, target, reduction="none", generator=noise[3]), value)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
