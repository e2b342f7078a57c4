"""The operators against enumeration, known values, and each other."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from topklass import class_margins, expected_topk, log_esp, noised_topk, topk_marginals
from topklass.reference.power_sums import LARGEST_K

# PyTorch's own forward mode still uses what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

INF = math.inf
DTYPES = [torch.float32, torch.float64]
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-11}

both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_shape = pytest.mark.parametrize(
    "shape", [(7,), (3, 7), (2, 3, 7), (0, 7), (2, 0, 7)], ids=str
)
# both algorithms: power sums for small k, a tree of products for large k
sizes = pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 2), (5, 5), (40, 12), (40, 13), (40, 30)])
few_examples = settings(max_examples=30, deadline=None, derandomize=True)
rows_of_scores = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=8)


def enumerated(scores: Tensor, k: int) -> Tensor:
    """log σ_0 … log σ_k of one row, over all subsets."""
    result = [torch.zeros((), dtype=scores.dtype)]
    for j in range(1, k + 1):
        subsets = torch.tensor(list(combinations(range(len(scores)), j)))
        result.append(scores[subsets].sum(1).logsumexp(0))
    return torch.stack(result)


def recursive(scores: Tensor, k: int) -> Tensor:
    """The same of many rows, class after class: σ_j ← σ_j + e_i σ_{j−1}."""
    result = torch.full((*scores.shape[:-1], k + 1), -INF, dtype=scores.dtype)
    result[..., 0] = 0.0
    for score in scores.unsqueeze(-1).unbind(-2):
        longer = torch.logaddexp(result[..., 1:], result[..., :-1] + score)
        result = torch.cat([result[..., :1], longer], -1)
    return result


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# Elementary symmetric polynomials


@few_examples
@given(rows_of_scores)
def test_log_esp_by_enumeration(row):
    scores = torch.tensor(row, dtype=torch.float64)
    for k in range(1, len(row) + 1):
        close(log_esp(scores, k), enumerated(scores, k), 1e-10)


@pytest.mark.parametrize("spread", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
@sizes
@both_dtypes
def test_log_esp_by_recursion(dtype, n, k, spread, offset):
    scores = (torch.randn(4, n) * spread + offset).to(dtype)
    expected = recursive(scores.double(), k).to(dtype)
    actual = log_esp(scores, k)
    assert actual.dtype == dtype
    assert actual.shape == (4, k + 1)
    close(actual, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("k", [1, 2, 4, 13])
def test_log_esp_of_absent_classes(k):
    """σ_j = 0 above the number of present classes."""
    scores = torch.full((k + 4,), -INF, dtype=torch.float64)
    present = [1, k + 2]
    scores[present] = torch.tensor([0.3, -0.2], dtype=torch.float64)
    value = log_esp(scores.requires_grad_(), k)
    expected = torch.full((k + 1,), -INF, dtype=torch.float64)
    expected[:3] = enumerated(scores[present], 2)[: k + 1]
    close(value, expected, 1e-12)
    for j in range(k + 1):
        (gradient,) = torch.autograd.grad(value[j], scores, retain_graph=True)
        assert gradient.isfinite().all()
        assert (gradient[scores == -INF] == 0).all()
        assert j > 2 or gradient.sum().item() == pytest.approx(j)


@every_shape
@pytest.mark.parametrize("k", [3, 7])
def test_leading_dimensions(shape, k):
    scores = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    esp, marginals = log_esp(scores, k), topk_marginals(scores, k)
    smoothed = noised_topk(scores, k)
    assert esp.shape == (*shape[:-1], k + 1)
    assert marginals.shape == shape
    assert smoothed.shape == shape[:-1]
    for result in (esp, marginals, smoothed):
        (gradient,) = torch.autograd.grad(result.sum(), scores, retain_graph=True)
        assert gradient.shape == shape
    rows = scores.reshape(-1, 7)
    for i, row in enumerate(rows):
        close(esp.reshape(-1, k + 1)[i], log_esp(row, k), 1e-12)
        close(marginals.reshape(-1, 7)[i], topk_marginals(row, k), 1e-12)


@pytest.mark.parametrize("operator", [log_esp, topk_marginals])
@pytest.mark.parametrize(
    ("n", "k", "limit"),
    [
        (4, 1, 12),
        (5, 2, 12),
        (4, 4, 12),
        (5, 3, 2),
        pytest.param(15, 13, 12, marks=pytest.mark.slow),
    ],
)
def test_derivatives(operator, n, k, limit, monkeypatch):
    """By power sums, and beyond their limit by the tree."""
    monkeypatch.setitem(LARGEST_K, torch.float64, limit)
    scores = torch.randn(2, n, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda s: operator(s, k), scores, check_forward_ad=True)
    assert gradgradcheck(lambda s: operator(s, k), scores)


@pytest.mark.parametrize("operator", [log_esp, topk_marginals, noised_topk, expected_topk])
@pytest.mark.parametrize("dim", [0, 1, -2, -1])
def test_dim(operator, dim):
    scores = torch.randn(4, 5, 6, dtype=torch.float64)
    options = {"epsilon": 0.0} if operator is noised_topk else {}
    expected = operator(scores.movedim(dim, -1), 3, **options)
    if operator in (log_esp, topk_marginals):
        expected = expected.movedim(-1, dim)
    close(operator(scores, 3, dim=dim, **options), expected, 1e-12)


@pytest.mark.parametrize("dim", [0, 1, -2, -1])
def test_dim_of_given_noise(dim):
    scores, noise = torch.randn(4, 5, 6), torch.randn(4, 5, 6, 3)
    expected = noised_topk(scores.movedim(dim, -1), 3, noise=noise.movedim(dim % 3, -2))
    close(noised_topk(scores, 3, dim=dim, noise=noise), expected, 1e-6)


@pytest.mark.parametrize("operator", [log_esp, topk_marginals])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(operator, dtype):
    scores = torch.randn(3, 8, dtype=dtype)
    assert torch.equal(operator(scores, 3), operator(scores.double(), 3).to(dtype))


@pytest.mark.parametrize("operator", [log_esp, topk_marginals])
@pytest.mark.parametrize("k", [2, 13])
def test_nan(operator, k):
    scores = torch.randn(2, k + 3, dtype=torch.float64)
    scores[0, 1] = math.nan
    result = operator(scores, k)
    assert result[0, -1].isnan()
    assert result[1].isfinite().all()


@pytest.mark.parametrize("operator", [log_esp, topk_marginals])
@pytest.mark.parametrize("k", [2, 13])
def test_vmap_and_strides(operator, k):
    scores = torch.randn(k + 3, 4, dtype=torch.float64).t()
    expected = operator(scores.contiguous(), k)
    close(operator(scores, k), expected, 1e-12)
    close(torch.vmap(lambda row: operator(row, k))(scores), expected, 1e-12)
    assert scores._version == 0


# Marginals


@few_examples
@given(rows_of_scores)
def test_marginals_by_enumeration(row):
    scores = torch.tensor(row, dtype=torch.float64)
    for k in range(1, len(row) + 1):
        subsets = torch.tensor(list(combinations(range(len(row)), k)))
        chances = scores[subsets].sum(1).softmax(0)
        expected = torch.zeros_like(scores).index_add(
            0, subsets.flatten(), chances.repeat_interleave(k)
        )
        close(topk_marginals(scores, k), expected, 1e-10)


@pytest.mark.parametrize("spread", [0.0, 1.0, 100.0])
@sizes
@both_dtypes
def test_marginals_are_probabilities(dtype, n, k, spread):
    scores = (torch.randn(4, n) * spread).to(dtype)
    marginals = topk_marginals(scores, k)
    assert marginals.dtype == dtype
    assert (marginals >= 0).all()
    assert (marginals <= 1 + TOLERANCE[dtype]).all()
    close(marginals.sum(-1), torch.full((4,), k, dtype=dtype), TOLERANCE[dtype])


@sizes
@both_dtypes
def test_marginals_are_the_gradient(dtype, n, k):
    scores = torch.randn(4, n, dtype=dtype, requires_grad=True)
    (gradient,) = torch.autograd.grad(log_esp(scores, k)[..., k].sum(), scores)
    close(topk_marginals(scores, k), gradient, TOLERANCE[dtype])


@both_dtypes
@pytest.mark.parametrize("k", [1, 3, 13, 30])
@pytest.mark.parametrize("missing", [0, 1])
def test_marginals_of_few_present_classes(dtype, k, missing):
    """Present classes are certain when there are k of them, or fewer."""
    scores = torch.full((k + 3,), -INF, dtype=dtype)
    scores[: k - missing] = torch.randn(k - missing, dtype=dtype)
    expected = (scores > -INF).to(dtype)
    scores.requires_grad_()
    marginals = topk_marginals(scores, k)
    close(marginals, expected, TOLERANCE[dtype])
    assert (marginals[k - missing :] == 0).all()
    (gradient,) = torch.autograd.grad(marginals[0], scores)
    close(gradient, torch.zeros_like(scores), TOLERANCE[dtype])


# Noised top-k


def test_noised_topk_of_the_paper():
    """Garcin et al. 2022, the example of section 3.2."""
    scores = torch.tensor([2.4, 2.6, 2.3, 0.5], requires_grad=True)
    first, second, third = [0.2, -0.1, 0.1, 0.3], [0.1, 0.1, -0.1, 0.1], [-0.1, -0.1, 0.1, -0.1]
    noise = torch.tensor([first, second, third]).t()
    value = noised_topk(scores, k=2, epsilon=1.0, samples=3, noise=noise)
    assert value.item() == pytest.approx(7.4 / 3, abs=1e-6)
    (gradient,) = torch.autograd.grad(value, scores)
    close(gradient, torch.tensor([1 / 3, 1 / 3, 1 / 3, 0.0]), 1e-6)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_noised_topk_by_hand(k):
    scores = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    noise = torch.randn(2, 3, 7, 4, dtype=torch.float64)
    value = noised_topk(scores, k, 0.3, noise=noise)
    perturbed = scores.unsqueeze(-1) + 0.3 * noise
    expected = perturbed.sort(-2, descending=True).values[..., k - 1, :].mean(-1)
    close(value, expected, 1e-12)
    cotangent = torch.randn(2, 3, dtype=torch.float64)
    close(
        torch.autograd.grad(value, scores, cotangent)[0],
        torch.autograd.grad(expected, scores, cotangent)[0],
        1e-12,
    )
    assert gradcheck(lambda s: noised_topk(s, k, 0.3, noise=noise), scores, check_forward_ad=True)


def test_noised_topk_without_noise():
    scores = torch.randn(3, 7)
    for k in range(1, 8):
        expected = scores.sort(-1, descending=True).values[:, k - 1]
        close(noised_topk(scores, k, epsilon=0.0), expected, 1e-6)


def test_noised_topk_converges_to_the_expectation():
    """The largest of two equal scores has mean ε/√π (and each class half of the gradient)."""
    scores = torch.zeros(20_000, 2, dtype=torch.float64, requires_grad=True)
    value = noised_topk(scores, 1, epsilon=2.0).mean()
    (gradient,) = torch.autograd.grad(value, scores)
    assert value.item() == pytest.approx(2 / math.sqrt(math.pi), abs=0.02)
    assert gradient.sum(0).tolist() == pytest.approx([0.5, 0.5], abs=0.01)


def test_noised_topk_of_absent_classes():
    scores = torch.tensor([[1.0, -INF, 2.0], [-INF, -INF, 1.0]], requires_grad=True)
    value = noised_topk(scores, 2, epsilon=0.1)
    assert value[0].isfinite()
    assert value[1] == -INF
    (gradient,) = torch.autograd.grad(value[0], scores)
    assert (gradient[0, 1], gradient[1].abs().sum()) == (0, 0)


def test_noised_topk_generator():
    scores = torch.randn(3, 7)
    state = torch.get_rng_state()
    first, again, other = (
        noised_topk(scores, 2, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_noised_topk_makes_no_tensor_of_all_noise():
    scores = torch.randn(4, 100, requires_grad=True)
    with LargestTensor() as largest:
        noised_topk(scores, 5, samples=50).sum().backward()
    assert 0 < largest.elements <= scores.numel()


def test_noised_topk_has_no_double_backward():
    scores = torch.randn(7, requires_grad=True)
    value = noised_topk(scores, 2)
    (gradient,) = torch.autograd.grad(value.square(), scores, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


# Margins


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.float64], ids=str)
def test_class_margins(dtype):
    margins = class_margins(torch.tensor([1, 16, 81, 256], dtype=dtype))
    assert margins.dtype == (dtype if dtype.is_floating_point else torch.float32)
    close(margins, torch.tensor([0.2, 0.1, 0.2 / 3, 0.05], dtype=margins.dtype), 1e-6)


def test_class_margins_scale():
    counts = torch.tensor([30, 7, 500])
    close(class_margins(counts, largest=0.5), 2.5 * class_margins(counts), 1e-6)
    close(class_margins(counts * 10), class_margins(counts), 1e-6)
    assert (class_margins(counts, largest=0.0) == 0).all()


def test_class_margins_without_samples():
    """A class without samples is at least as rare as the rarest that has some."""
    close(class_margins(torch.tensor([0, 1, 16])), torch.tensor([0.2, 0.2, 0.1]), 1e-6)
    close(class_margins(torch.tensor([0.0, 32.0, 2.0])), torch.tensor([0.2, 0.1, 0.2]), 1e-6)
    close(class_margins(torch.tensor([0, 0])), torch.tensor([0.2, 0.2]), 1e-6)
    close(class_margins(torch.tensor([5])), torch.tensor([0.2]), 1e-6)
