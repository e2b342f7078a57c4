"""The k best classes of a linear layer, without all logits in memory."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from topklass._checks import check_count, check_not_distributed
from topklass._transforms import all_eager, is_eager
from topklass.functional.linear import check_layer, logits_dtype, to_samples

CHUNK_BYTES = 2**30
BYTES_OF_TIE = 12
"""Of a logit in a row whose k-th largest has ties, beyond its own."""
FEWEST_ROWS = 8
"""Of a chunk; ties are resolved in an eighth of its rows at a time."""


class BestClasses(NamedTuple):
    """Labels and their logits, the largest first."""

    labels: Tensor
    """Class indices, (…, k)."""
    scores: Tensor
    """Their logits, (…, k), descending."""


@torch.no_grad()
def linear_predict_topk(
    input: Tensor,
    linear_weight: Tensor,
    k: int,
    *,
    linear_bias: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> BestClasses:
    """The k largest logits of a linear layer and their classes, without all logits in memory.

    ``F.linear(input, linear_weight, linear_bias).topk(k)``, in chunks of rows, ties in the order of
    the classes. Where rows are so long that few fit into a chunk, it has some of the classes. Not
    differentiable.

    Args:
        input: (d), (N, d) or (…, d).
        linear_weight: (C, d), as in :class:`torch.nn.Linear`.
        k: length of the list, 1 ≤ k ≤ C.
        linear_bias: (C).
        chunk_bytes: memory for the logits of a chunk, by default 1 GiB.

    Returns:
        ``BestClasses(labels, scores)``, each (…, k), descending. A NaN counts as the largest.

    Example:
        >>> import torch
        >>> input, weight = torch.tensor([1.0, 2.0]), torch.tensor([[4.0, 0], [1, 1], [0, 1]])
        >>> linear_predict_topk(input, weight, k=2)
        BestClasses(labels=tensor([0, 1]), scores=tensor([4., 3.]))
    """
    check_not_distributed(input=input, linear_weight=linear_weight, linear_bias=linear_bias)
    check_layer(input, linear_weight, linear_bias)
    classes = len(linear_weight)
    check_count("k", k, classes, "the number of classes")
    if chunk_bytes is not None:
        check_count("chunk_bytes", chunk_bytes)
    features = to_samples(input)
    if all_eager(input, linear_weight, linear_bias):
        room = CHUNK_BYTES if chunk_bytes is None else chunk_bytes
        each = logits_dtype(input).itemsize + BYTES_OF_TIE // FEWEST_ROWS
        rows = max(FEWEST_ROWS, room // (classes * each))
        step = max(k, min(classes, room // (rows * each)))
        parts = [
            _best(features[start : start + rows], linear_weight, linear_bias, k, step)
            for start in range(0, max(1, len(features)), rows)
        ]
        labels, scores = (torch.cat(part) for part in zip(*parts, strict=True))
    else:
        labels, scores = _best(features, linear_weight, linear_bias, k, classes)
    shape = (*input.shape[:-1], k)
    return BestClasses(labels.reshape(shape), scores.reshape(shape))


def _best(
    features: Tensor, weight: Tensor, bias: Tensor | None, k: int, step: int
) -> tuple[Tensor, Tensor]:
    """Labels and logits of (N, d) features, (N, k), from so many classes at once."""
    labels = torch.empty(len(features), 0, dtype=torch.long, device=features.device)
    scores = features.new_empty((len(features), 0), dtype=logits_dtype(features))
    for start in range(0, len(weight), step):
        some = slice(start, start + step)
        logits = F.linear(features, weight[some], None if bias is None else bias[some])
        found, values = _largest(logits, min(k, logits.shape[1]))
        del logits
        labels, scores = torch.cat([labels, found + start], 1), torch.cat([scores, values], 1)
        best = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
        labels, scores = labels.gather(1, best), scores.gather(1, best)
    return labels, scores


def _largest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Classes and logits of the k largest, (N, k), ties in the order of classes.

    ``topk`` finds any of those that tie with the k-th: in such rows they give way to the first.
    """
    values, found = logits.topk(min(k + 1, logits.shape[1]))
    if values.shape[1] > k:
        last, next_one = values[:, k - 1], values[:, k]
        tied = (last == next_one) | (last.isnan() & next_one.isnan())
        values, found = values[:, :k], found[:, :k]
        if is_eager(logits) and not logits.is_meta:
            rows = tied.nonzero().squeeze(1)
            for part in torch.split(rows, max(1, len(logits) // FEWEST_ROWS)):
                found[part] = _first_of_ties(logits[part], values[part], found[part])
        else:
            found = _first_of_ties(logits, values, found)
    by_class, order = found.sort(1)
    best = values.gather(1, order).argsort(dim=1, descending=True, stable=True)
    return by_class.gather(1, best), values


def _first_of_ties(logits: Tensor, values: Tensor, found: Tensor) -> Tensor:
    """The classes of the k largest, (N, k), where the k-th value is that of the first that tie."""
    k, classes = values.shape[1], logits.shape[1]
    last = values[:, -1:]
    above = (values > last) | (values.isnan() & ~last.isnan())
    order = torch.arange(classes, 0, -1, dtype=torch.int32, device=logits.device)
    equal = torch.where(last.isnan(), logits.isnan(), logits == last)
    tied = torch.where(equal, order, 0).topk(k).indices  # the first k of them
    before = above.sum(1, keepdim=True)
    place = torch.arange(k, device=logits.device)
    return torch.where(place < before, found, tied.gather(1, (place - before).clamp(min=0)))
