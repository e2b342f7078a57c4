"""Predictions: the k labels that most probably belong to the top k, from one or several crops."""

from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from topklass._checks import check_scores_and_k, check_temperature, is_integer
from topklass.operators import topk_marginals
from topklass.reference.power_sums import wide_dtype, working_dtype

AVERAGES = ("marginal", "softmax")


class TopK(NamedTuple):
    """Labels and their probabilities, the most probable first."""

    labels: Tensor
    """Class indices, (…, k)."""
    probabilities: Tensor
    """Of the same shape, descending; float32, or float64 for float64 logits."""


def predict_topk(
    logits: Tensor,
    k: int,
    *,
    crops: int | None = None,
    average: str = "marginal",
    temperature: float = 1.0,
) -> TopK:
    r"""The k labels with the largest probability of belonging to the top k.

    .. math:: \bar\pi_i = \frac1M \sum_{m=1}^M \pi_i(s^{(m)} / T), \qquad
        \pi_i(s) = \frac{\partial \log \sigma_k(e^s)}{\partial s_i}

    (Berrada et al. 2018, section 5.2 and Appendix C, equations 63-66): the probability that class i
    is in a random k-subset, :func:`topklass.topk_marginals`, averaged over M crops of an image or
    members of an ensemble.

    With a single crop these are the k largest scores, whatever the average and the temperature,
    since π grows with the score. With several crops the lists may differ: a crop gives the k labels
    of a sure list nearly 1 each by marginals, but by softmax nearly all to the first of them.

    Args:
        logits: (…, C), classes last; −inf marks an absent class, of probability 0.
        k: length of the list, 1 ≤ k ≤ C.
        crops: the dimension to average over, not the last one: 1 for (N, crops, C), 0 for
            (members, N, C); None for a single crop.
        average: "marginal", or "softmax" for the usual average, which is made for k = 1.
        temperature: T divides the logits. 1 is Appendix C as printed, and the temperature of
            cross-entropy. :func:`topklass.functional.smooth_topk_loss` weighs subsets by
            ``exp(s / (kτ))``: ``k * tau`` is the distribution that a model was trained with.

    Returns:
        ``TopK(labels, probabilities)``, (…, k) each without the dimension of crops, descending.
        Ties are in the order of the averaged softmax, then of the class index. Where fewer than k
        classes are present, absent ones fill the list with probability 0.

    Example:
        The first crop is sure of the list 0, 1; its softmax hides the second behind the first:

        >>> import torch
        >>> logits = torch.tensor([[9.0, 4.0, 1.0, 0.0], [3.0, 0.0, 1.0, 0.0]])
        >>> predict_topk(logits, k=2, crops=0)
        TopK(labels=tensor([0, 1]), probabilities=tensor([0.9680, 0.5857]))
        >>> predict_topk(logits, k=2, crops=0, average="softmax")
        TopK(labels=tensor([0, 2]), probabilities=tensor([0.9013, 0.0550]))
    """
    check_scores_and_k(logits, k, name="logits")
    check_temperature(temperature, name="temperature")
    if average not in AVERAGES:
        raise ValueError(f"average must be one of {', '.join(AVERAGES)}, got {average!r}")
    if crops is not None:
        check_crops(crops, logits)
    scores = tempered(logits.to(working_dtype(logits.dtype)), temperature)
    chances = topk_marginals(scores, k) if average == "marginal" else softmax(scores)
    if crops is None:
        labels = sorted_by(first_k(logits, k), logits)
    else:
        chances = chances.mean(crops)
        among_ties = softmax(scores).mean(crops) if average == "marginal" else chances
        order = among_ties.argsort(dim=-1, descending=True, stable=True)
        labels = sorted_by(order, chances)[..., :k]
    return TopK(labels, chances.gather(-1, labels).to(scores.dtype))


def softmax(scores: Tensor) -> Tensor:
    """In float64, for the order of unlikely classes; 0 for absent ones."""
    return scores.to(wide_dtype(scores)).softmax(-1).masked_fill(scores == -inf, 0.0)


def first_k(scores: Tensor, k: int) -> Tensor:
    """The classes of the k largest scores, (…, k), by index."""
    classes = scores.shape[-1]
    descending = torch.arange(classes, 0, -1, device=scores.device)
    return (among_first(scores, k) * descending).topk(k).indices


def among_first(scores: Tensor, k: int) -> Tensor:
    """Mask (…, C) of the k largest scores: exactly k, of equal ones those of the lowest index."""
    last = scores.topk(k).values[..., -1:]
    above, tied = scores > last, scores == last
    room = k - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= room))


def sorted_by(labels: Tensor, scores: Tensor) -> Tensor:
    """Labels (…, k) by descending score; equal ones stay as they are."""
    order = scores.gather(-1, labels).argsort(dim=-1, descending=True, stable=True)
    return labels.gather(-1, order)


def tempered(scores: Tensor, temperature: float) -> Tensor:
    """Scores over a temperature, after a shift that keeps their differences exact."""
    if temperature == 1:
        return scores
    largest = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    return (scores - largest) / temperature


def check_crops(crops: int, logits: Tensor) -> None:
    """Require a dimension, other than that of classes, with something to average."""
    if not is_integer(crops):
        raise TypeError(f"crops must be a dimension or None, got {crops!r}")
    shape = tuple(logits.shape)
    if not -len(shape) <= crops < len(shape) or crops % len(shape) == len(shape) - 1:
        raise ValueError(
            f"crops must be a dimension of the logits other than the last, which holds the "
            f"classes; got crops={crops} for shape {shape}"
        )
    if shape[crops] == 0:
        raise ValueError(f"there must be at least one crop, got crops={crops} for shape {shape}")
