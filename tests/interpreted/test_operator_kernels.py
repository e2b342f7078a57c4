"""The kernels of log_esp and topk_marginals: the reference's numbers."""

import math

import numpy as np
import pytest
import torch
from smooth_cases import slow
from torch import Tensor

import topklass
from test_accuracy import rows as hard_rows
from topklass.kernels.smooth.launch import plan

ROUNDING = 1.2e-7
SPLIT = next(n for n in range(2052, 10**6, 2048) if plan(3, n, 1, 3, exact=True).parts > 1)
OPERATORS = [topklass.log_esp, topklass.topk_marginals]

each_operator = pytest.mark.parametrize("operator", OPERATORS, ids=lambda f: f.__name__)


def apply(operator, scores: Tensor, k: int, backend: str) -> Tensor:
    before = scores.clone()
    with topklass.use_backend(backend), torch.no_grad():
        result = operator(scores, k)
    torch.testing.assert_close(scores, before, rtol=0, atol=0, equal_nan=True)
    return result


def error(ours: Tensor, exact: Tensor) -> float:
    """The largest of all rows: relative to 1 or the value of log σ, to 1 for probabilities."""
    absent = exact == -math.inf
    assert torch.equal(ours == -math.inf, absent)
    scale = exact.abs().clamp(min=1)
    return ((ours - exact).abs() / scale).masked_fill(absent, 0).max().item()


def assert_within_budget(operator, scores: Tensor, k: int) -> None:
    exact = apply(operator, scores.double(), k, "reference")
    kernel, reference = (
        error(apply(operator, scores, k, backend), exact) for backend in ("kernel", "reference")
    )
    assert kernel <= 2 * reference + ROUNDING, (kernel, reference)


@each_operator
@pytest.mark.parametrize(
    ("n", "k"),
    [
        (1, 1),
        (2, 2),
        (7, 3),
        (11, 11),
        *(slow(*case) for case in [(2, 1), (33, 5), (100, 10), (100, 11), (40, 16), (1025, 5)]),
    ],
)
def test_error_is_at_most_twice_that_of_the_reference(operator, n, k):
    rows = np.array(list(hard_rows(n, k, np.random.default_rng(n + k)))).astype(np.float32)
    assert_within_budget(operator, torch.tensor(rows), k)


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "k"), [(topklass.log_esp, 16), (topklass.topk_marginals, 32)])
def test_largest_k(operator, k):
    scores = torch.stack([torch.zeros(100), 3 * torch.randn(100)])
    assert_within_budget(operator, scores, k)
    with pytest.raises(RuntimeError, match=f"k = {k + 1}, only up to {k}"):
        apply(operator, scores, k + 1, "kernel")


@each_operator
@pytest.mark.parametrize("k", [slow(1), 5, slow(11)])
def test_rows_in_pieces(operator, k):
    ascending = (3 * torch.randn(SPLIT)).sort().values
    ties = (torch.arange(SPLIT) % 700 == 0).float()
    assert_within_budget(operator, torch.stack([ascending, ties, torch.zeros(SPLIT)]), k)


@each_operator
@pytest.mark.parametrize("n", [9, slow(SPLIT)])
@pytest.mark.parametrize("present", [0, 2, 3])
def test_absent_classes(operator, n, present):
    scores = torch.full((2, n), -math.inf)
    scores[:, [1, n // 2, n - 1, 0][:present]] = torch.randn(2, present)
    kernel, reference = (apply(operator, scores, 3, b) for b in ("kernel", "reference"))
    torch.testing.assert_close(kernel, reference, rtol=1e-6, atol=1e-6, equal_nan=True)


@each_operator
@pytest.mark.parametrize("n", [9, slow(SPLIT)])
def test_nan_stays_in_its_row(operator, n):
    scores = torch.randn(3, n)
    scores[1, n - 2] = math.nan
    result = apply(operator, scores, 3, "kernel")
    assert result[1].isnan().any()
    torch.testing.assert_close(result[::2], apply(operator, scores[::2], 3, "reference"))


@each_operator
@pytest.mark.parametrize("shape", [(9,), (2, 3, 9)])
def test_shapes(operator, shape):
    scores = torch.randn(shape)
    kernel, reference = (apply(operator, scores, 3, b) for b in ("kernel", "reference"))
    assert kernel.shape == reference.shape
    torch.testing.assert_close(kernel, reference)


@each_operator
def test_layouts(operator):
    for scores in (torch.randn(9, 3).T, torch.randn(6, 9)[::2], torch.randn(28)[1:].view(3, 9)):
        kernel, reference = (apply(operator, scores, 3, b) for b in ("kernel", "reference"))
        torch.testing.assert_close(kernel, reference)


@each_operator
@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16)])
def test_half_precision(operator, dtype):
    scores = torch.randn(3, 40).to(dtype)
    kernel = apply(operator, scores, 5, "kernel")
    assert kernel.dtype == dtype
    assert torch.equal(kernel, apply(operator, scores.float(), 5, "kernel").to(dtype))


@each_operator
def test_derivatives(operator):
    """First and second: those of the reference."""
    results = []
    for backend in ("kernel", "reference"):
        torch.manual_seed(0)
        leaf = torch.randn(2, 9, requires_grad=True)
        with topklass.use_backend(backend):
            value = operator(leaf, 3)
        (gradient,) = torch.autograd.grad(value.square().sum(), leaf, create_graph=True)
        results.append((gradient, torch.autograd.grad(gradient.square().sum(), leaf)[0]))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
