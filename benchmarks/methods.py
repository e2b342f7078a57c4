"""Ways to evaluate the smooth loss, from the textbook's to ours, each as a loss of every row."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import topklass
from experiments import peers
from experiments.algorithms import (
    derivatives_recursive,
    esp_summation,
    esp_summation_compensated,
    log_esp_recursive,
    log_esp_tree,
    smooth_topk_loss_uncentred,
    smooth_topk_loss_with,
)
from topklass.functional import smooth_topk_loss

Rows = Callable[[Tensor, Tensor], Tensor]
"""Scores (R, n) and labels (R,) to losses (R,)."""


@dataclass(frozen=True)
class Method:
    """A name and, for k and τ, a loss of rows."""

    name: str
    loss: Callable[[int, float], Rows | None]
    most_classes: float = inf
    """Beyond it takes minutes; 0: not timed."""
    on_gpu: bool = False
    """Only there it is a method of its own."""


def methods(device: torch.device) -> list[Method]:
    """All of them, ours last."""
    on_gpu = device.type == "cuda"
    found = [
        Method("summation, not centred", not_centred, 0),
        by("summation", lambda s, k: esp_summation(s, k).log(), 1e4),
        by("summation, compensated", lambda s, k: esp_summation_compensated(s, k).log(), 1e4),
        by("summation, bare recursion", partial(log_esp_unprotected, esp_summation)),
        Method("summation, a thread a row, bare recursion", by_rows, on_gpu=True),
        by("divide and conquer, autograd", log_esp_tree),
        by("divide and conquer, bare recursion", log_esp_bare),
        by("divide and conquer, recursion and eq. 60", log_esp_recursive),
        Method("published code", lambda k, tau: peers.smooth(k, tau, per_row=True)),
        Method("topklass, reference", lambda k, tau: partial(plain, k=k, tau=tau), on_gpu=True),
        Method("topklass", lambda k, tau: partial(row_losses, k=k, tau=tau)),
    ]
    return [method for method in found if on_gpu or not method.on_gpu]


def by(name: str, log_esp: Callable[[Tensor, int], Tensor], most_classes: float = inf) -> Method:
    """The loss with this algorithm for the symmetric polynomials."""

    def loss(k: int, tau: float) -> Rows:
        return partial(smooth_topk_loss_with, log_esp, k=k, tau=tau)

    return Method(name, loss, most_classes)


def not_centred(k: int, tau: float) -> Rows:
    """The loss with summation of ``exp(s/(kτ))`` as they are, as in the paper's Table 5."""
    return partial(smooth_topk_loss_uncentred, k=k, tau=tau)


def by_rows(k: int, tau: float) -> Rows:
    """The loss with summation in one kernel."""
    from benchmarks.summation_kernel import esp_by_rows

    return partial(smooth_topk_loss_with, partial(log_esp_unprotected, esp_by_rows), k=k, tau=tau)


def row_losses(scores: Tensor, labels: Tensor, k: int, tau: float) -> Tensor:
    return smooth_topk_loss(scores, labels, k, tau, reduction="none")


def plain(scores: Tensor, labels: Tensor, k: int, tau: float) -> Tensor:
    with topklass.use_backend("reference"):
        return row_losses(scores, labels, k, tau)


def log_esp_unprotected(esp: Callable[[Tensor, int], Tensor], scores: Tensor, k: int) -> Tensor:
    """σ by any algorithm, with the recursion of Algorithm 2 as it stands, not approximated."""
    result: Tensor = _Unprotected.apply(esp, scores, k)
    return result


class _Unprotected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, esp: Callable[[Tensor, int], Tensor], scores: Tensor, k: int) -> Tensor:
        sigma = esp(scores, k)
        ctx.save_for_backward(scores, sigma)
        return sigma.log()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        scores, sigma = ctx.saved_tensors
        e = scores.exp()
        by_degree = derivatives_recursive(e, sigma) * e[..., None] / sigma[..., None, 1:]
        return None, (by_degree * gradient[..., None, 1:]).sum(-1), None


def log_esp_bare(scores: Tensor, k: int) -> Tensor:
    """``log_esp_recursive`` less its approximation: the same tree and recursion, in log space."""
    result: Tensor = _Bare.apply(scores, k)
    return result


class _Bare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, k: int) -> Tensor:
        log_sigma = log_esp_tree(scores, k)
        ctx.save_for_backward(scores, log_sigma)
        return log_sigma

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        scores, log_sigma = ctx.saved_tensors
        log_delta = torch.zeros_like(scores)  # δ_1 = 1
        result = torch.zeros_like(scores)
        for j in range(1, log_sigma.shape[-1]):
            if j > 1:
                gap = log_sigma[..., j - 1, None] - (scores + log_delta)
                kept = (-torch.expm1(-gap)).clamp(min=0.0).log()
                log_delta = log_sigma[..., j - 1, None] + kept
            slope = (scores + log_delta - log_sigma[..., j, None]).exp()
            result += gradient[..., j, None] * slope
        return result, None
