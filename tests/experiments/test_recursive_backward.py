"""The recursive backward pass of Berrada et al. (2018) and its approximation."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esp_oracles import (
    EPS,
    both_dtypes,
    exact_sigma,
    jacobian_error,
    one_large,
    random_scores,
)
from experiments.algorithms import (
    derivatives_recursive,
    log_esp_recursive,
)


def test_recursion_equals_the_definition() -> None:
    """Eq. 18 against eq. 16."""
    e = random_scores(9).exp()
    sigma, left = exact_sigma(e, 5)
    torch.testing.assert_close(derivatives_recursive(e, sigma), left[:, :5], rtol=1e-11, atol=0)


def derivative_approximation(e: Tensor, sigma: Tensor, k: int, order: int) -> Tensor:
    """Σ_{m=0..p} (-1)^m σ_{k+m} / e_i^{m+1}: eq. 60 with its denominator corrected from e_i^m."""
    return sum((-1) ** m * sigma[k + m] / e ** (m + 1) for m in range(order + 1))


def rounding_of_approximation(e: Tensor, sigma: Tensor, k: int, order: int) -> Tensor:
    """What rounding may do to the alternating sum of eq. 60."""
    terms = sigma[k : k + order + 1] / e[:, None] ** torch.arange(1, order + 2)
    return 10 * EPS[torch.float64] * terms.amax(dim=-1)


def test_approximation_has_exactly_the_error_of_proposition_6() -> None:
    """Eq. 61, with the sign that its proof gives; eq. 60 as printed does not satisfy it."""
    n = 8
    e = random_scores(n).exp()
    sigma, left = exact_sigma(e, n)
    for k in range(1, n + 1):
        for order in range(n - k + 1):
            approximation = derivative_approximation(e, sigma, k, order)
            error = (-1) ** order * left[:, k + order] / e ** (order + 1)
            deviation = (approximation - left[:, k - 1] - error).abs()
            assert (deviation <= rounding_of_approximation(e, sigma, k, order)).all()
            as_printed = e * approximation
            assert not torch.allclose((as_printed - left[:, k - 1]).abs(), error.abs())


@settings(max_examples=40, deadline=None)
@given(scores=st.lists(st.floats(-8, 8), min_size=3, max_size=9), data=st.data())
def test_error_of_the_approximation_is_bounded_by_the_difference(
    scores: list[float], data: st.DataObject
) -> None:
    """Relative error at most ρ^{p+1}, ρ = δ_j / (e_i δ_{j-1}), by Newton's inequalities."""
    n = len(scores)
    j = data.draw(st.integers(2, n))
    order = data.draw(st.integers(0, n - j))
    e = torch.tensor(scores, dtype=torch.float64).exp()
    sigma, left = exact_sigma(e, n)
    error = (derivative_approximation(e, sigma, j, order) - left[:, j - 1]).abs()
    difference = left[:, j - 1] / (e * left[:, j - 2])
    bound = left[:, j - 1] * difference ** (order + 1)
    assert (error <= bound + rounding_of_approximation(e, sigma, j, order)).all()


def test_plain_recursion_is_unstable_and_the_approximation_is_not() -> None:
    """Observation 1: the error of δ_j grows like e_i^{j-1}, for the dominant class only."""
    k, order = 5, 1
    e = torch.cat((torch.tensor([1e4]), random_scores(9, dtype=torch.float32).exp()))
    sigma, left = exact_sigma(e, k + order)
    exact = left[:, :k]
    error = (derivatives_recursive(e, sigma[: k + 1].float()) - exact).abs() / exact
    assert error[1:].max() < 1e-3
    assert error[0, 1] < 1e-3
    assert error[0, 4] > 100
    assert all(error[0, j + 1] > 30 * error[0, j] for j in range(1, 4))

    mended = derivative_approximation(e, sigma.float(), k, order)
    assert abs(mended[0] - exact[0, k - 1]) < 1e-5 * exact[0, k - 1]


@both_dtypes
@pytest.mark.parametrize("k", [1, 3, 5])
def test_recursive_gradient_is_exact_where_nothing_cancels(dtype: torch.dtype, k: int) -> None:
    for scores in (random_scores(40, dtype=dtype), torch.zeros(40, dtype=dtype)):
        assert jacobian_error(log_esp_recursive, scores, k) <= 50 * EPS[dtype]


@both_dtypes
@pytest.mark.parametrize("lead", [2.0, 8.0, 1000.0])
@pytest.mark.parametrize("k", [5, 20, 30])
def test_recursive_gradient_holds_where_it_cancels(dtype: torch.dtype, lead: float, k: int) -> None:
    """Also for many steps that each lose a little, which no single difference reveals."""
    tolerance = {torch.float32: 5e-3, torch.float64: 1e-5}[dtype]
    assert jacobian_error(log_esp_recursive, one_large(30, lead, dtype), k) <= tolerance


def test_higher_order_is_more_accurate() -> None:
    scores = one_large(30, 5.0, torch.float32)
    orders = [partial(log_esp_recursive, order=p) for p in (0, 4, 30)]
    zeroth, fourth, full = (jacobian_error(log_esp, scores, 20) for log_esp in orders)
    assert zeroth > 1e-2 > 1e-3 > fourth > 2e-5 > full


def test_recursive_backward_is_differentiable_once() -> None:
    scores = random_scores(5).requires_grad_()
    squared = log_esp_recursive(scores, 2)[2].square()
    (gradient,) = torch.autograd.grad(squared, scores, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
