"""Elementary symmetric polynomials by enumeration and in 50 digits, and what is compared."""

import itertools
import math
from collections.abc import Callable

import mpmath
import pytest
import torch
from torch import Tensor

from experiments.algorithms import (
    esp_summation,
    esp_summation_compensated,
    log_esp_recursive,
    log_esp_tree,
)

INF = math.inf
EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}
LogESP = Callable[[Tensor, int], Tensor]

LOG_SPACE: dict[str, LogESP] = {"tree": log_esp_tree, "recursive": log_esp_recursive}
LOG_ESP: dict[str, LogESP] = LOG_SPACE | {
    "summation": lambda scores, k: esp_summation(scores, k).log(),
    "compensated": lambda scores, k: esp_summation_compensated(scores, k).log(),
}
every_algorithm = pytest.mark.parametrize("log_esp", LOG_ESP.values(), ids=LOG_ESP.keys())
every_log_space = pytest.mark.parametrize("log_esp", LOG_SPACE.values(), ids=LOG_SPACE.keys())
both_dtypes = pytest.mark.parametrize("dtype", EPS, ids=str)


def random_scores(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=dtype) * scale


def one_large(n: int, lead: float, dtype: torch.dtype) -> Tensor:
    """Random scores of which the first is the largest by far: Observation 1."""
    scores = random_scores(n, dtype=dtype)
    scores[0] = scores.max() + lead
    return scores


def enumerated_log_esp(scores: list[float], k: int) -> list[float]:
    """log σ_0..σ_k as sums over all subsets."""
    sums = [
        math.fsum(math.exp(sum(subset)) for subset in itertools.combinations(scores, j))
        for j in range(k + 1)
    ]
    return [math.log(total) if total > 0 else -INF for total in sums]


def exact_esp(e: list[mpmath.mpf], k: int) -> list[mpmath.mpf]:
    """σ_0..σ_k in 50 digits; all terms are positive and the exponent range is unbounded."""
    sigma = [mpmath.mpf(1)] + [mpmath.mpf(0)] * k
    with mpmath.workdps(50):
        for e_i in e:
            for j in range(k, 0, -1):
                sigma[j] += e_i * sigma[j - 1]
    return sigma


def exact_exp(scores: Tensor) -> list[mpmath.mpf]:
    with mpmath.workdps(50):
        return [mpmath.exp(mpmath.mpf(score)) for score in scores.tolist()]


def exact_log_esp(scores: Tensor, k: int) -> Tensor:
    sigma = exact_esp(exact_exp(scores), k)
    logs = [float(mpmath.log(value)) if value > 0 else -INF for value in sigma]
    return torch.tensor(logs, dtype=torch.float64)


def exact_leave_one_out(e: list[mpmath.mpf], k: int) -> list[list[mpmath.mpf]]:
    """σ_0..σ_k without e_i, for every i, computed from scratch (eq. 16)."""
    return [exact_esp(e[:i] + e[i + 1 :], k) for i in range(len(e))]


def exact_sigma(e: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """σ_0..σ_k of e, and, at [i, j], σ_j without e_i (which is δ_{j+1,i}), in float64."""
    exact_e = [mpmath.mpf(value) for value in e.tolist()]
    left = [[float(value) for value in row] for row in exact_leave_one_out(exact_e, k)]
    sigma = [float(value) for value in exact_esp(exact_e, k)]
    return torch.tensor(sigma, dtype=torch.float64), torch.tensor(left, dtype=torch.float64)


def exact_jacobian(scores: Tensor, k: int) -> Tensor:
    """∂ log σ_j / ∂ scores_i = e_i σ_{j-1}(e without e_i) / σ_j, at [i, j], j = 0..k."""
    e = exact_exp(scores)
    sigma = exact_esp(e, k)
    rows = [
        [0.0] + [float(e_i * left[j - 1] / sigma[j]) if sigma[j] > 0 else 0.0 for j in degrees]
        for degrees in [range(1, k + 1)]
        for e_i, left in zip(e, exact_leave_one_out(e, k), strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def jacobian(log_esp: LogESP, scores: Tensor, k: int) -> Tensor:
    """The same by one backward pass: row j of the batch asks for the gradient of log σ_j."""
    batch = scores.detach().expand(k + 1, -1).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(log_esp(batch, k), batch, torch.eye(k + 1, dtype=batch.dtype))
    return gradient.T.double()


def jacobian_error(log_esp: LogESP, scores: Tensor, k: int) -> float:
    return (jacobian(log_esp, scores, k) - exact_jacobian(scores, k)).abs().max().item()


def assert_relatively_close(actual: Tensor, exact: Tensor, tolerance: float) -> None:
    """Compare logarithms, to which rounding errors are relative above 1 and absolute below."""
    assert torch.equal(actual.isneginf(), exact.isneginf())
    finite = exact.isfinite()
    error = (actual[finite].double() - exact[finite]).abs() / exact[finite].abs().clamp(min=1.0)
    assert error.max() <= tolerance
