"""Predictions: the k labels that most probably belong to the top k, from one or several crops."""

from math import inf
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from topklass._checks import (
    check_count,
    check_not_distributed,
    check_scores,
    check_temperature,
    is_integer,
)
from topklass.operators import topk_marginals
from topklass.reference.power_sums import wide_dtype

METHODS = ("marginals", "softmax")


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
    dim: int = -1,
    crop_dim: int | None = None,
    method: str = "marginals",
    temperature: float = 1.0,
) -> TopK:
    r"""The k labels with the largest probability of belonging to the top k.

    .. math:: \bar\pi_i = \frac1M \sum_{m=1}^M \pi_i(s^{(m)} / T), \qquad
        \pi_i(s) = \frac{\partial \log \sigma_k(e^s)}{\partial s_i}

    (Berrada et al. 2018, section 5.2 and Appendix C, equations 63-66): the probability that class i
    is in a random k-subset, :func:`topklass.topk_marginals`, averaged over M crops of an image or
    members of an ensemble.

    With a single crop these are the k largest logits, whatever the method and the temperature,
    since π grows with the logit. With several crops the lists may differ: a crop that is certain of
    its k labels gives each of them nearly 1 by marginals, but by softmax nearly all to the first.

    It can be exported by ``torch.export`` and to ONNX, with a dynamic batch.

    Args:
        logits: of any shape, by default (…, C); −inf marks an absent class, of probability 0.
        k: length of the list, 1 ≤ k ≤ C.
        dim: the dimension of the classes.
        crop_dim: the dimension to average over: 1 for (N, crops, C), 0 for (members, N, C); None
            for a single crop.
        method: what is averaged over crops: "marginals", or "softmax", which suits k = 1.
        temperature: T divides the logits. 1 is Appendix C as printed, and the temperature of
            cross-entropy. :func:`topklass.functional.smooth_topk_loss` weighs subsets by
            ``exp(s / (kτ))``: ``k * tau`` is the distribution that a model was trained with.

    Returns:
        ``TopK(labels, probabilities)``, each of the logits' shape without ``crop_dim`` and with k
        in place of the classes, descending. Ties are in the order of the averaged softmax, then of
        the class index. Where fewer than k classes are present, absent ones fill the list with
        probability 0. A row with NaN has probabilities NaN, and any labels.

    Example:
        The first crop is certain of the labels 0 and 1, but its softmax is nearly all on 0:

        >>> import torch
        >>> logits = torch.tensor([[9.0, 4.0, 1.0, 0.0], [3.0, 0.0, 1.0, 0.0]])
        >>> predict_topk(logits, k=2, crop_dim=0)
        TopK(labels=tensor([0, 1]), probabilities=tensor([0.9680, 0.5857]))
        >>> predict_topk(logits, k=2, crop_dim=0, method="softmax")
        TopK(labels=tensor([0, 2]), probabilities=tensor([0.9013, 0.0550]))
    """
    logits = classes_last(logits, dim)
    check_count("k", k, logits.shape[-1], "the number of classes")
    check_temperature(temperature, name="temperature")
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    scores = tempered(logits.to(torch.promote_types(logits.dtype, torch.float32)), temperature)
    chances = topk_marginals(scores, k) if method == "marginals" else softmax(scores)
    place = dim % logits.dim()
    if crop_dim is None:
        labels = largest(k, logits)
    else:
        check_crop_dim(crop_dim, dim, logits)
        crop_dim %= logits.dim()
        crops = crop_dim - (crop_dim > place)  # after the classes have moved to the end
        if logits.shape[crops] == 0:
            raise ValueError(f"there must be at least one crop, got none in crop_dim={crop_dim}")
        place -= crop_dim < place
        chances = chances.mean(crops)
        keys = (chances,) if method == "softmax" else (chances, softmax(scores).mean(crops))
        labels = largest(k, *keys)
    probabilities = chances.gather(-1, labels).to(scores.dtype)
    return TopK(labels.movedim(-1, place), probabilities.movedim(-1, place))


def softmax(scores: Tensor) -> Tensor:
    """In float64 where the device has it, for the order of unlikely classes; 0 for absent ones."""
    wide = wide_dtype(scores)
    return scores.to(wide).softmax(-1).masked_fill(scores == -inf, 0.0)


def largest(k: int, *keys: Tensor) -> Tensor:
    """The k first classes, (…, k): by the first key, descending, ties by the next, then by index.

    PyTorch's topk leaves the order of ties open, and ONNX has no stable sort.
    """
    mask = among_first(k, *keys)
    descending = torch.arange(mask.shape[-1], 0, -1, device=mask.device)
    labels = (mask * descending).topk(k).indices
    for key in reversed(keys):
        labels = labels.gather(-1, stable_order(key.gather(-1, labels)))
    return labels


def among_first(k: int, *keys: Tensor) -> Tensor:
    """Mask (…, C) of the k first classes in the order of :func:`largest`, exactly k."""
    above = torch.zeros_like(keys[0], dtype=torch.bool)
    tied, room = ~above, torch.full_like(keys[0][..., :1], k, dtype=torch.long)
    for key in keys:
        last = key.masked_fill(~tied, -inf).topk(k).values.gather(-1, room - 1)
        above = above | (tied & (key > last))
        tied = tied & (key == last)
        room = k - above.sum(-1, keepdim=True)
    return above | (tied & (tied.long().cumsum(-1) <= room))


def stable_order(values: Tensor) -> Tensor:
    """``argsort(descending=True, stable=True)`` of the last dimension, by top-k alone."""
    size = values.shape[-1]
    ordered, places = values.topk(size)
    level = F.pad((ordered[..., 1:] != ordered[..., :-1]).long().cumsum(-1), (1, 0))
    return (level * size + places).topk(size, largest=False).values % size


def tempered(scores: Tensor, temperature: float) -> Tensor:
    """Scores over a temperature, after a shift that keeps their differences exact."""
    if temperature == 1:
        return scores
    top = scores.amax(-1, keepdim=True)
    return (scores - top.masked_fill(top == -inf, 0.0)) / temperature


def classes_last(logits: Tensor, dim: int) -> Tensor:
    """Require logits with at least one class in a dimension; move that to the end."""
    check_not_distributed(logits=logits)
    check_scores(logits, "logits", dim)
    return logits if dim == -1 else logits.movedim(dim, -1)


def check_crop_dim(crop_dim: int, dim: int, logits: Tensor) -> None:
    """Require a dimension, other than that of the classes, with something to average."""
    if not is_integer(crop_dim):
        raise TypeError(f"crop_dim must be a dimension or None, got {crop_dim!r}")
    dims = logits.dim()
    if not -dims <= crop_dim < dims:
        raise IndexError(
            f"crop_dim must be from {-dims} to {dims - 1} for logits of {dims} dimensions, "
            f"got crop_dim={crop_dim}"
        )
    if crop_dim % dims == dim % dims:
        raise ValueError(
            f"crop_dim must not be the dimension of the classes, got crop_dim={crop_dim} and "
            f"dim={dim} for logits of {dims} dimensions"
        )
