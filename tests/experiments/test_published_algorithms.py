"""The algorithms of Berrada et al. (2018) against enumeration and 50-digit arithmetic."""

import itertools

import mpmath
import pytest
import torch
from torch import Tensor

from esp_oracles import (
    EPS,
    INF,
    LogESP,
    assert_relatively_close,
    both_dtypes,
    enumerated_log_esp,
    every_algorithm,
    every_log_space,
    exact_esp,
    exact_jacobian,
    exact_log_esp,
    jacobian,
    jacobian_error,
    one_large,
    random_scores,
)
from experiments.algorithms import (
    esp_summation,
    esp_summation_compensated,
    log_esp_tree,
    smooth_topk_loss_with,
)

# Values


@every_algorithm
def test_values_equal_the_sum_over_all_subsets(log_esp: LogESP) -> None:
    for n in range(1, 8):
        scores = random_scores(n, scale=2.0)
        for k in range(1, n + 1):
            exact = torch.tensor(enumerated_log_esp(scores.tolist(), k), dtype=torch.float64)
            torch.testing.assert_close(log_esp(scores, k), exact, rtol=1e-14, atol=1e-14)


@every_log_space
@both_dtypes
@pytest.mark.parametrize(("n", "scale"), [(1, 1.0), (2, 1e4), (16, 10.0), (31, 1e4), (33, 1.0)])
def test_values_are_exact_up_to_rounding(
    log_esp: LogESP, dtype: torch.dtype, n: int, scale: float
) -> None:
    scores = random_scores(n, scale=scale, dtype=dtype)
    for k in {1, (n + 1) // 2, n}:
        assert_relatively_close(log_esp(scores, k), exact_log_esp(scores, k), 10 * EPS[dtype])


@both_dtypes
@pytest.mark.parametrize("k", [5, 40])
def test_tree_is_exact_for_a_thousand_classes(dtype: torch.dtype, k: int) -> None:
    scores = random_scores(1000, scale=3.0, dtype=dtype)
    assert_relatively_close(log_esp_tree(scores, k), exact_log_esp(scores, k), 3 * EPS[dtype])


@every_algorithm
def test_absent_classes_change_nothing(log_esp: LogESP) -> None:
    scores = random_scores(5)
    padded = torch.tensor([-INF, *scores[:2], -INF, -INF, *scores[2:]], dtype=torch.float64)
    torch.testing.assert_close(log_esp(padded, 5), log_esp(scores, 5), rtol=1e-14, atol=1e-14)
    assert log_esp(padded, 8)[6:].isneginf().all()


# Derivatives by autograd


@pytest.mark.parametrize("esp", [log_esp_tree, esp_summation, esp_summation_compensated])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (4, 4), (5, 2)])
def test_derivatives_of_first_second_and_third_order(esp: LogESP, n: int, k: int) -> None:
    absent = torch.full((2, 1), -INF, dtype=torch.float64)
    scores = random_scores(2, n).requires_grad_()

    def value(scores: Tensor) -> Tensor:
        return esp(torch.cat((scores, absent), dim=-1), k)

    def gradient(scores: Tensor) -> Tensor:
        weighted = (value(scores) * torch.arange(k + 1)).sum()
        return torch.autograd.grad(weighted, scores, create_graph=True)[0]

    assert torch.autograd.gradcheck(value, scores)
    assert torch.autograd.gradgradcheck(value, scores)
    assert torch.autograd.gradgradcheck(gradient, scores)


@both_dtypes
@pytest.mark.parametrize(
    "scores",
    [
        random_scores(30),
        random_scores(30, scale=20.0),
        torch.zeros(30, dtype=torch.float64),
        one_large(30, 50.0, torch.float64),
    ],
    ids=["random", "spread", "ties", "one large"],
)
def test_tree_gradient_is_exact_up_to_rounding(dtype: torch.dtype, scores: Tensor) -> None:
    scores = scores.to(dtype)
    tolerance = 4 * EPS[dtype] * max(1.0, scores.abs().max().item())
    for k in (1, 5, 29, 30):
        assert jacobian_error(log_esp_tree, scores, k) <= tolerance


@every_log_space
@pytest.mark.parametrize(
    ("scores", "k"),
    [
        ([0.0, -INF, 1.0, -INF], 2),
        ([0.0, -INF, 1.0, -INF], 4),
        ([-INF, -INF, -INF], 2),
        ([1e4, -1e4, -INF, 0.0], 3),
        ([5.0], 1),
    ],
)
def test_gradient_is_never_nan(log_esp: LogESP, scores: list[float], k: int) -> None:
    x = torch.tensor(scores, dtype=torch.float64)
    torch.testing.assert_close(jacobian(log_esp, x, k), exact_jacobian(x, k), rtol=0, atol=1e-11)


def test_second_derivative_of_the_tree_is_never_nan() -> None:
    scores = torch.tensor([0.0, -INF, 1.0, -INF], dtype=torch.float64, requires_grad=True)
    result = log_esp_tree(scores, 4)
    (gradient,) = torch.autograd.grad(result[:3].sum(), scores, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), scores)
    assert second.isfinite().all()
    assert second[[1, 3]].tolist() == [0.0, 0.0]


# Summation


def test_range_of_summation_and_tree() -> None:
    """Table 5: the temperatures at which nothing overflows, for scores like a trained network's."""
    scores = random_scores(4, 300, scale=4.0)
    temperatures = [1e1, 1e0, 1e-1, 1e-2, 1e-3, 1e-4]

    def stable(esp: LogESP, dtype: torch.dtype) -> list[bool]:
        return [bool(esp(scores.to(dtype) / (5 * tau), 5).isfinite().all()) for tau in temperatures]

    for summation in (esp_summation, esp_summation_compensated):
        assert stable(summation, torch.float32) == [True, True, False, False, False, False]
        assert stable(summation, torch.float64) == [True, True, True, False, False, False]
    for dtype in EPS:
        assert all(stable(log_esp_tree, dtype))
    assert log_esp_tree(scores.float() / 5e-36, 5).isfinite().all()


@both_dtypes
@pytest.mark.parametrize(
    ("n", "k", "scale"), [(20, 20, 1.0), (50, 5, 1.0), (1000, 5, 1.0), (1000, 12, 0.2)]
)
def test_compensation_leaves_half_an_ulp(dtype: torch.dtype, n: int, k: int, scale: float) -> None:
    scores = random_scores(n, scale=scale, dtype=dtype)
    exact = exact_esp([mpmath.mpf(value) for value in scores.exp().tolist()], k)

    def worst_error(esp: LogESP) -> float:
        """In units of eps, the spacing of numbers just above 1."""
        computed = zip(esp(scores, k).tolist(), exact, strict=True)
        return max(float(abs(value - s) / s) for value, s in computed) / EPS[dtype]

    assert worst_error(esp_summation_compensated) <= 0.501
    assert worst_error(esp_summation) > 0.7


# The smooth loss


def loss_by_definition(
    scores: list[float], label: int, k: int, tau: float, margin: float
) -> mpmath.mpf:
    """Eq. 9, a sum over all k-subsets."""
    with_label, all_subsets = mpmath.mpf(0), mpmath.mpf(0)
    with mpmath.workdps(50):
        for subset in itertools.combinations(range(len(scores)), k):
            weight = mpmath.exp(mpmath.fsum(scores[i] for i in subset) / (k * mpmath.mpf(tau)))
            if label in subset:
                with_label += weight
                all_subsets += weight
            else:
                all_subsets += mpmath.exp(mpmath.mpf(margin) / tau) * weight
        return tau * mpmath.log(all_subsets / with_label)


@every_algorithm
@pytest.mark.parametrize(
    ("k", "tau", "margin"),
    [(1, 0.1, 0.5), (2, 3.0, 0.0), (5, 1.0, 1.0), (6, 0.1, 1.0), (7, 1.0, 0.5)],
)
def test_loss_equals_its_definition(log_esp: LogESP, k: int, tau: float, margin: float) -> None:
    scores, target = random_scores(4, 7), torch.tensor([0, 2, 6, 3])
    exact = [
        float(loss_by_definition(row, label, k, tau, margin))
        for row, label in zip(scores.tolist(), target.tolist(), strict=True)
    ]
    actual = smooth_topk_loss_with(log_esp, scores, target, k, tau, margin)
    torch.testing.assert_close(
        actual, torch.tensor(exact, dtype=torch.float64), rtol=1e-12, atol=1e-14
    )


@every_algorithm
def test_loss_gradient(log_esp: LogESP) -> None:
    scores, target = random_scores(3, 6).requires_grad_(), torch.tensor([0, 4, 5])
    assert torch.autograd.gradcheck(
        lambda s: smooth_topk_loss_with(log_esp, s, target, 3, 0.5), scores
    )


@every_log_space
def test_loss_is_zero_when_the_label_cannot_be_missed(log_esp: LogESP) -> None:
    scores = torch.tensor(
        [[0.0, 1.0, -INF, -INF], [3.0, -INF, -INF, -INF], [1.0, 2.0, 3.0, -INF]],
        requires_grad=True,
    )
    loss = smooth_topk_loss_with(log_esp, scores, torch.tensor([0, 0, 0]), k=3)
    loss.sum().backward()
    assert loss.tolist() == [0.0, 0.0, 0.0]
    assert scores.grad is not None
    assert torch.equal(scores.grad, torch.zeros(3, 4))
