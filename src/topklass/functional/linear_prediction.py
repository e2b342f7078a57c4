"""The k best classes of a linear layer, without all logits in memory."""

from math import inf
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from topklass._checks import check_count
from topklass._transforms import all_eager
from topklass.functional._chunks import LEAST_BYTES
from topklass.functional.linear import check_layer, logits_dtype

MOST_ROWS = 4096
"""Rows at once: more would not read the weight faster."""
BYTES_OF_INDEX = 12
"""Of a logit: its place among ties, and what is compared."""


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

    ``F.linear(input, linear_weight, linear_bias).topk(k)``, in chunks of classes, ties in the order
    of the classes. Not differentiable.

    Args:
        input: (d), (N, d) or (…, d).
        linear_weight: (C, d), as in :class:`torch.nn.Linear`.
        k: length of the list, 1 ≤ k ≤ C.
        linear_bias: (C).
        chunk_bytes: memory for the logits of a chunk, by default 0.5 GiB.

    Returns:
        ``BestClasses(labels, scores)``, each (…, k), descending. A NaN counts as the largest.

    Example:
        >>> import torch
        >>> input, weight = torch.tensor([1.0, 2.0]), torch.tensor([[4.0, 0], [1, 1], [0, 1]])
        >>> linear_predict_topk(input, weight, k=2)
        BestClasses(labels=tensor([0, 1]), scores=tensor([4., 3.]))
    """
    check_layer(input, linear_weight, linear_bias)
    classes = len(linear_weight)
    check_count("k", k, classes, "the number of classes")
    if chunk_bytes is not None:
        check_count("chunk_bytes", chunk_bytes)
    features = input.reshape(-1, input.shape[-1])
    if all_eager(input, linear_weight, linear_bias):
        rows = min(MOST_ROWS, max(1, len(features)))
        each = rows * (logits_dtype(input).itemsize + BYTES_OF_INDEX)
        step = max(k, (LEAST_BYTES if chunk_bytes is None else chunk_bytes) // each)
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
        found, values = _candidates(logits, min(k, logits.shape[1]), len(weight) - start)
        del logits
        labels, scores = torch.cat([labels, found + start], 1), torch.cat([scores, values], 1)
        by_label = labels.argsort(1)
        labels, scores = labels.gather(1, by_label), scores.gather(1, by_label)
        best = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
        labels, scores = labels.gather(1, best), scores.gather(1, best)
    return labels, scores


def _candidates(logits: Tensor, k: int, nothing: int) -> tuple[Tensor, Tensor]:
    """Classes and logits among which are the k first, ties in the order of classes, (N, 2k).

    ``topk`` finds any of those that tie with the k-th: they give way to the first of them. What is
    no candidate has the label ``nothing``.
    """
    values, found = logits.topk(k)
    last = values[:, -1:]
    order = torch.arange(logits.shape[1], 0, -1, dtype=torch.int32, device=logits.device)
    ties, tied = torch.where(logits == last, order, 0).topk(k)
    labels = [found.masked_fill(values == last, nothing), tied.masked_fill(ties == 0, nothing)]
    scores = torch.cat([values, last.expand_as(values)], 1)
    chosen = torch.cat(labels, 1)
    return chosen, scores.masked_fill(chosen == nothing, -inf)
