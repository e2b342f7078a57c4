"""Losses by name, with what training has to know about each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn

import topkit


@dataclass(frozen=True)
class LossInfo:
    """One loss of the command line."""

    make: Callable[..., nn.Module]
    about: str
    options: tuple[str, ...] = ()
    """Parameters of the loss that may be set, besides k."""
    takes_k: bool = True
    margin_by_count: bool = False
    """Whether classes get margins by their numbers of samples unless a margin is given."""
    gradient_is_one_in_k: bool = False
    """Whether its gradient is about 1/k that of cross-entropy."""


LOSSES = {
    "cross-entropy": LossInfo(nn.CrossEntropyLoss, "the usual loss, for one guess", takes_k=False),
    "smooth": LossInfo(
        topkit.SmoothTopKLoss,
        "smooth top-k SVM (Berrada et al. 2018)",
        ("tau", "margin"),
        gradient_is_one_in_k=True,
    ),
    "topk-cross-entropy": LossInfo(
        topkit.TopKCrossEntropyLoss, "−log of the probability that a list holds the label"
    ),
    "noised": LossInfo(
        topkit.NoisedTopKLoss,
        "noised top-k hinge (Garcin et al. 2022)",
        ("epsilon", "samples", "margin", "scale"),
    ),
    "noised-imbalanced": LossInfo(
        topkit.NoisedTopKLoss,
        "the same with a margin for each class, for long tails and cosine scores",
        ("epsilon", "samples", "margin", "scale"),
        margin_by_count=True,
    ),
    "calibrated-hinge": LossInfo(
        topkit.CalibratedTopKHingeLoss, "the label above the (k+1)-th largest score", ("margin",)
    ),
    "hinge": LossInfo(topkit.TopKHingeLoss, "the label above its k-th largest rival", ("margin",)),
    "convex-hinge": LossInfo(
        topkit.ConvexTopKHingeLoss, "a convex upper bound of the hinge", ("margin",)
    ),
    "ldam": LossInfo(
        topkit.LDAMLoss,
        "cross-entropy with larger margins for rarer classes (Cao et al. 2019)",
        ("margin", "scale"),
        takes_k=False,
        margin_by_count=True,
    ),
    "focal": LossInfo(
        topkit.FocalLoss,
        "cross-entropy with less weight on easy samples",
        ("gamma",),
        takes_k=False,
    ),
}


def loss_info(name: str) -> LossInfo:
    """The loss of that name, or an error that lists them all."""
    if name in LOSSES:
        return LOSSES[name]
    near = get_close_matches(name, LOSSES, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown loss {name!r}.{hint} There are: {', '.join(LOSSES)}")


def build_loss(name: str, k: int, counts: Tensor, options: dict[str, Any]) -> nn.Module:
    """A criterion for training samples of these class counts.

    Args:
        name: one of ``LOSSES``.
        k: length of the list, for losses that take it.
        counts: number of training samples of each class.
        options: parameters of the loss; one that it does not have is an error.
    """
    info = loss_info(name)
    unknown = [option for option in options if option not in info.options]
    if unknown:
        known = f"takes {', '.join(info.options)}" if info.options else "has no options"
        raise ValueError(f"the loss {name!r} has no option {', '.join(unknown)}; it {known}")
    arguments: dict[str, Any] = dict(options)
    if info.takes_k:
        arguments["k"] = k
    if info.margin_by_count:
        largest = arguments.pop("margin", None)
        margins = topkit.class_margins(counts, *([] if largest is None else [largest]))
        arguments["margin"] = margins
    return info.make(**arguments)


def gradient_scale(name: str, k: int) -> float:
    """What to multiply the loss by, to train it with cross-entropy's learning rate."""
    return float(k) if loss_info(name).gradient_is_one_in_k else 1.0
