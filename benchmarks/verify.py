"""Nothing is timed that is not right: each family of losses against float64.

Smooth loss: value and gradient of some rows against the divide-and-conquer tree. Cross-entropy,
targets of several classes and label smoothing: against plain PyTorch. Noised loss: in expectation
against :mod:`benchmarks.expected_topk`. A random number cannot be compared digit by digit, so the
gradient of a sampled one must be made of whole counts that add up, and its averages must lie near
these expectations.
"""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import topklass
from benchmarks.candidates import BASE, SAMPLES, Candidate, Loss
from benchmarks.expected_topk import expected_topk
from experiments.algorithms import log_esp_tree, smooth_topk_loss_with
from topklass._targets import SparseTarget, Target

ROWS = 16
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
"""Largest relative error of a row's gradient: ours, and twice the rounding of half precision."""
TOLERANCE_PUBLISHED = 1e-2
"""Errors of losses of others are results, not conditions: this only says it is the same loss."""
TOLERANCE_EXACT = 2e-5
"""Of the exact noised loss, which interpolates."""
STANDARD_ERRORS = 5.0


class WrongResult(AssertionError):
    """A candidate does not compute the loss that its name says."""


def verify(candidate: Candidate, logits: Tensor, target: Target) -> dict[str, Any]:
    """Raise unless the candidate is right; its errors, for the record."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the published code
        if candidate.family == "noised":
            assert isinstance(target, Tensor)
            return {"standard_errors": noised_deviation(candidate, logits, target)}
        return {"gradient_error": gradient_error(candidate, logits, target)}


def gradient_error(candidate: Candidate, logits: Tensor, target: Target) -> float:
    """Largest relative error of a row's gradient, after value and gradient were checked."""
    rows = some_rows(logits)
    few = of_rows(target, rows)
    exact_loss, expected = exact(candidate, logits[rows], few)
    limit = TOLERANCE_EXACT if candidate.family == "exact" else TOLERANCE[logits.dtype]
    theirs = candidate.published or candidate.name.startswith(BASE)
    limit = TOLERANCE_PUBLISHED if theirs else limit
    value, gradient = value_and_gradient(candidate.loss, logits, target)
    error = relative_error(gradient[rows], expected)
    require(candidate, error <= limit, f"gradient off by {error:.1e}")
    with torch.no_grad():
        alone = candidate.loss(logits, target)
        part = candidate.loss(logits[rows].contiguous(), few)
    off = abs(part.item() / exact_loss - 1)
    require(candidate, off <= limit, f"value off by {off:.1e}")
    off = abs(alone.item() / value.item() - 1)
    require(candidate, off <= limit, f"value without gradient off by {off:.1e}")
    return float(f"{error:.1e}")


def of_rows(target: Target, rows: Tensor) -> Target:
    if isinstance(target, SparseTarget):
        return SparseTarget(target.indices[rows], target.weights[rows])
    return target[rows]


def exact(candidate: Candidate, logits: Tensor, target: Target) -> tuple[float, Tensor]:
    """Mean loss and each row's gradient, in float64."""
    wide = logits.detach().double().requires_grad_()
    if candidate.family == "reference":
        with topklass.use_backend("reference"):
            value, gradient = value_and_gradient(candidate.loss, wide, target)
        return value.item(), gradient
    assert isinstance(target, Tensor)
    if candidate.family == "smooth":
        losses = smooth_topk_loss_with(log_esp_tree, wide, target, candidate.k)
    else:
        threshold, _, chances = expected_topk(wide, candidate.k + 1, candidate.epsilon)
        linear = threshold + (chances * (wide - wide.detach())).sum(1)  # has them as its gradient
        losses = F.relu(1 + linear - wide.gather(1, target[:, None])[:, 0])
    (gradient,) = torch.autograd.grad(losses.sum(), wide)
    return losses.mean().item(), gradient


def noised_deviation(candidate: Candidate, logits: Tensor, target: Tensor) -> float:
    """Distance of the average loss from its expectation, in standard errors, once all is checked.

    The average is over copies of some rows. Their label is the lowest score, so that the hinge is
    open and the expectation of the loss is that of the (k + 1)-th largest noised score.
    """
    _, gradient = value_and_gradient(candidate.loss, logits, target)
    check_counts(candidate, gradient, target)
    del gradient
    scores = logits.detach()[some_rows(logits)[:8]]
    mean, variance, chances = expected_topk(scores.double(), candidate.k + 1, candidate.epsilon)
    copies = min(64, max(8, 2**23 // scores.numel()))
    label = scores.argmin(1)
    many = scores.repeat_interleave(copies, 0).requires_grad_()
    labels = label.repeat_interleave(copies)
    draws = copies * SAMPLES
    expected = (1 + mean - scores.gather(1, label[:, None])[:, 0]).mean().item()
    error = (variance / draws).sum().sqrt().item() / len(scores)

    value, gradient = value_and_gradient(candidate.loss, many, labels)
    with torch.no_grad():
        alone = candidate.loss(many, labels)
    off = max(abs(value.item() - expected), abs(alone.item() - expected))
    deviation = off / (error + 1e-6 * abs(expected))
    require(candidate, deviation <= STANDARD_ERRORS, f"{deviation:.1f} standard errors off")

    shares = gradient.double().view(len(scores), copies, -1).mean(1)
    shares.scatter_add_(1, label[:, None], torch.ones_like(shares[:, :1]))
    spread = (chances * (1 - chances)).sum(1).div(draws).sqrt()
    rare = 3 / draws  # a rare class may well be drawn once or twice
    far = ((shares - chances).norm(dim=1) > STANDARD_ERRORS * spread + rare).sum().item()
    require(candidate, far == 0, f"unlikely classes chosen in {far} rows")
    return round(deviation, 1)


def check_counts(candidate: Candidate, gradient: Tensor, target: Tensor) -> None:
    """A row's gradient is 0, or counts over the number of samples, minus 1 for the label."""
    label = target[:, None]
    open_hinge = (gradient.gather(1, label) < 0).to(gradient)
    counts = gradient.scatter_add(1, label, open_hinge).mul_(SAMPLES)
    off = (counts - counts.round()).abs().max().item()
    require(candidate, off < 1e-3, f"counts are no whole numbers but off by {off:.1e}")
    require(candidate, counts.min().item() > -1e-3, "negative counts")
    off = (counts.sum(1) - SAMPLES * open_hinge[:, 0]).abs().max().item()
    require(candidate, off < 1e-2, f"counts do not add up but are off by {off:.1e}")


def require(candidate: Candidate, condition: bool, otherwise: str) -> None:
    if not condition:
        raise WrongResult(f"{candidate.name}: {otherwise}")


def value_and_gradient(loss: Loss, logits: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """Mean loss, and the gradient of the sum, which does not vanish in half precision."""
    value = loss(logits, target)
    (gradient,) = torch.autograd.grad(value, logits, torch.full_like(value, len(logits)))
    return value.detach(), gradient


def relative_error(gradient: Tensor, expected: Tensor) -> float:
    """Largest over rows of the distance to the expected gradient, by the norm of that."""
    off = (gradient - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)  # may be 0
    return float(off.max())


def some_rows(logits: Tensor) -> Tensor:
    """Rows from the first to the last, fewer of long ones."""
    count = min(len(logits), ROWS if logits.shape[1] <= 32_000 else 4)
    return torch.linspace(0, len(logits) - 1, count, device=logits.device).long()
