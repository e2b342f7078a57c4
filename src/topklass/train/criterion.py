"""Losses by name, with what training has to know about each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torch import Tensor, nn

import topklass
from topklass._checks import did_you_mean


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
    matched: Callable[..., nn.Module] | None = None
    """The same loss on the scale of cross-entropy, so that its learning rate fits, if that differs.
    """
    sharded: bool = False
    """Whether it serves classes that are split over processes."""
    fused: bool = False
    """Whether it can be computed together with the last layer."""
    on_cosines: dict[str, float] = field(default_factory=dict)
    """Options for a cosine head, unless they are given."""
    on_logits: dict[str, float] = field(default_factory=dict)
    """Options for a linear head, unless they are given."""

    @property
    def scores_need_scale(self) -> bool:
        """Whether a cosine head has to scale its scores, since the loss does not."""
        return "scale" not in self.options


def make_topk_cross_entropy(
    k: int, first_guess: float = 0.0, **options: Any
) -> topklass.TopKCrossEntropyLoss:
    """The loss of random lists, of which a share ``first_guess`` has one class, the others k."""
    if not 0 <= first_guess < 1:
        raise ValueError(f"first_guess must be at least 0 and less than 1, got {first_guess:g}")
    lengths = {1: first_guess, k: 1 - first_guess} if k > 1 else k
    return topklass.TopKCrossEntropyLoss(lengths, **options)


def make_cross_entropy(temperature: float = 1.0, **options: Any) -> nn.Module:
    """Cross-entropy of the logits over a temperature, times the temperature."""
    if temperature == 1:
        return nn.CrossEntropyLoss(**options)
    return topklass.TopKCrossEntropyLoss(1, temperature=temperature, **options)


def make_matched_smooth(
    k: int,
    tau: float = 1.0,
    margin: float = 1.0,
    temperature: float | None = None,
    **options: Any,
) -> topklass.TopKCrossEntropyLoss:
    """The smooth loss times k, which has the slope of cross-entropy at any temperature."""
    temperature = k * tau if temperature is None else temperature
    return topklass.TopKCrossEntropyLoss(k, margin / tau, temperature, **options)


LOSSES = {
    "short-list": LossInfo(
        topklass.ShortListLoss,
        "the first guess and the list in one, with label smoothing: the one to try first",
        ("first_guess", "temperature"),
        sharded=True,
        fused=True,
    ),
    "cross-entropy": LossInfo(
        make_cross_entropy,
        "the usual loss, for one guess",
        ("temperature",),
        takes_k=False,
        sharded=True,
        fused=True,
    ),
    "smooth": LossInfo(
        topklass.SmoothTopKLoss,
        "smooth top-k SVM (Berrada et al. 2018)",
        ("tau", "margin", "temperature"),
        matched=make_matched_smooth,
        sharded=True,
        fused=True,
    ),
    "topk-cross-entropy": LossInfo(
        make_topk_cross_entropy,
        "−log of the probability that a list holds the label",
        ("first_guess", "margin", "temperature"),
        sharded=True,
        fused=True,
    ),
    "noised": LossInfo(
        topklass.NoisedTopKLoss,
        "noised top-k hinge (Garcin et al. 2022)",
        ("epsilon", "samples", "margin", "scale"),
        sharded=True,
        on_cosines={"epsilon": 0.01, "margin": 0.2, "scale": 60.0},
    ),
    "noised-imbalanced": LossInfo(
        topklass.NoisedTopKLoss,
        "the same with a margin for each class, for long tails and cosine scores",
        ("epsilon", "samples", "margin", "scale"),
        margin_by_count=True,
        sharded=True,
        on_cosines={"epsilon": 0.01, "scale": 60.0},
    ),
    "calibrated-hinge": LossInfo(
        topklass.CalibratedTopKHingeLoss, "the label above the (k+1)-th largest score", ("margin",)
    ),
    "hinge": LossInfo(
        topklass.TopKHingeLoss, "the label above its k-th largest rival", ("margin",)
    ),
    "convex-hinge": LossInfo(
        topklass.ConvexTopKHingeLoss, "a convex upper bound of the hinge", ("margin",)
    ),
    "ldam": LossInfo(
        topklass.LDAMLoss,
        "cross-entropy with larger margins for rarer classes (Cao et al. 2019)",
        ("margin", "scale"),
        takes_k=False,
        margin_by_count=True,
        sharded=True,
        on_logits={"scale": 1.0},
    ),
    "focal": LossInfo(
        topklass.FocalLoss,
        "cross-entropy with less weight on easy samples",
        ("gamma",),
        takes_k=False,
    ),
}


def loss_info(name: str) -> LossInfo:
    """The loss of that name, or an error that lists them all.

    To train with a loss of your own, name it ``module:ATTRIBUTE``, an importable :class:`LossInfo`.
    A recipe stays text, so other processes and later sessions find the same loss.

    Example:
        >>> loss_info("topklass.train.criterion:INFO")
        Traceback (most recent call last):
        ...
        ValueError: topklass.train.criterion has no LossInfo 'INFO' to train with
    """
    if name in LOSSES:
        return LOSSES[name]
    module, colon, attribute = name.partition(":")
    if colon:
        info = getattr(import_module(module), attribute, None)
        if not isinstance(info, LossInfo):
            raise ValueError(f"{module} has no LossInfo {attribute!r} to train with")
        return info
    listed = ", ".join(LOSSES)
    raise ValueError(f"unknown loss {name!r}.{did_you_mean(name, LOSSES)} There are: {listed}")


def unknown_options(name: str, options: Iterable[str]) -> str:
    """Options that a loss does not have, and those that it has; nothing if it has them all."""
    known = loss_info(name).options
    unknown = ", ".join(option for option in options if option not in known)
    takes = f"takes {', '.join(known)}" if known else "has no options"
    return f"{unknown}; it {takes}" if unknown else ""


def build_loss(
    name: str,
    k: int,
    counts: Tensor,
    options: dict[str, Any],
    *,
    label_smoothing: float | None = None,
    match: bool = True,
) -> nn.Module:
    """A criterion for training samples of these class counts.

    Args:
        name: one of ``LOSSES``, or ``module:ATTRIBUTE``, see :func:`loss_info`.
        k: length of the list, for losses that take it.
        counts: number of training samples of each class.
        options: parameters of the loss; one that it does not have is an error.
        label_smoothing: share of the target that is spread over all classes; None for the loss's
            own default.
        match: take the loss on the scale of cross-entropy, so that its learning rate fits. The
            smooth loss is the only one that this changes.

    Returns:
        The criterion, a function of logits and target.

    Example:
        >>> import torch
        >>> build_loss("noised", k=5, counts=torch.tensor([50, 20, 10]), options={"epsilon": 0.5})
        NoisedTopKLoss(dim=1, ..., k=5, epsilon=0.5, samples=10, scale=1.0)
    """
    info = loss_info(name)
    if wrong := unknown_options(name, options):
        raise ValueError(f"the loss {name!r} has no option {wrong}")
    arguments: dict[str, Any] = dict(options)
    if label_smoothing is not None:
        arguments["label_smoothing"] = label_smoothing
    if info.takes_k:
        arguments["k"] = k
    if info.margin_by_count:
        largest = [arguments["margin"]] if "margin" in arguments else []
        arguments["margin"] = topklass.class_margins(counts, *largest)
    make = info.matched if match and info.matched is not None else info.make
    return make(**arguments)
