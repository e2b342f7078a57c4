"""``_contract.py`` for ranks that each have a slice of the classes.

One exchange tells all ranks the losses of rows. With label smoothing or class probabilities every
class is a label: each rank adds up the losses of its own classes, and a second exchange adds those.
"""

from math import inf, nan
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from topklass._checks import (
    Options,
    check_count,
    check_logits,
    check_margin,
    check_options,
    check_same_device,
    check_target,
    index_shape,
    labels_in_range,
    to_rows,
)
from topklass._collectives import Agreement, ClassShards, copied, fact, gathered, summed
from topklass._targets import check_not_sparse
from topklass._transforms import can_read_values, is_differentiated
from topklass.functional._contract import (
    check_indices_are_ignored,
    reduced,
    result_dtype,
    working,
)
from topklass.functional._sharded_forms import Known, ShardedLoss
from topklass.reference.power_sums import working_dtype
from topklass.reference.row_blocks import GRAPH_ELEMENTS


def agree(
    agreement: Agreement,
    form: ShardedLoss,
    logits: Tensor,
    target: Tensor,
    dim: int,
    options: Options,
    **parameters: Any,
) -> None:
    """Check the arguments of a rank, and note what must be the same on all ranks."""
    classes, margin = check_logits(logits, dim), form.loss.margin
    check_margin(margin, classes)
    check_options(options, classes)
    check_not_sparse(target)
    probabilities = check_target(logits, target, dim)
    check_indices_are_ignored(probabilities, options)
    per_class = isinstance(margin, Tensor) and margin.dim() > 0
    check_same_device(
        logits, target=target, weight=options.weight, margin=margin if per_class else None
    )
    form.check(logits.dtype)
    agreement.classes = classes
    agreement.facts |= {name: fact(value) for name, value in parameters.items()}
    agreement.facts |= {
        "margin": "a tensor" if isinstance(margin, Tensor) else float(margin),
        "weight": options.weight is not None,
        "ignore_index": int(options.ignore_index),
        "reduction": options.reduction,
        "label_smoothing": float(options.label_smoothing),
        "the number of rows": index_shape(logits, dim).numel(),
        "the logits' dtype": str(logits.dtype),
        "whether the target has class probabilities": probabilities,
    }
    if probabilities or options.label_smoothing:
        wanted = torch.is_grad_enabled() and logits.requires_grad
        agreement.facts["whether the logits require a gradient"] = wanted


def sharded_classification_loss(
    form: ShardedLoss,
    logits: Tensor,
    target: Tensor,
    dim: int,
    options: Options,
    shards: ClassShards,
    factor: float = 1.0,
) -> Tensor:
    """``classification_loss`` of the classes of all ranks, the same on each."""
    losses, total = sharded_losses(form, logits, target, dim, options, shards)
    result = reduced(losses, total, options.reduction)
    if options.reduction == "none":
        result = result.reshape(index_shape(logits, dim))
    return (result * factor).to(result_dtype(logits))


def sharded_losses(
    form: ShardedLoss,
    logits: Tensor,
    target: Tensor,
    dim: int,
    options: Options,
    shards: ClassShards,
) -> tuple[Tensor, Tensor]:
    """Losses of rows, (R, 1), and what their mean divides by.

    Margins, weights and class probabilities are those of this rank's classes.
    """
    classes = shards.classes
    check_count("k", form.longest, classes - 1, f"one less than the {classes} classes")
    scores = to_rows(logits, dim)
    probabilities = target.is_floating_point()
    if probabilities:
        labels = scores.new_full((len(scores), 1), -1, dtype=torch.long)
    else:
        labels = target.reshape(-1, 1).long()
    ignored = (labels == options.ignore_index) & (not probabilities)
    here = own_labels(labels, ignored, shards)
    every = probabilities or options.label_smoothing > 0
    margin, weight = form.loss.margin, None if probabilities else options.weight

    told = form.tell(scores, torch.full_like(here, -1) if every else here, every)
    about_label = [told.label, values_of(margin, here), values_of(weight, here), labels]
    sent = torch.cat([told.numbers, *(each.to(told.numbers.dtype) for each in about_label)], 1)
    received = gathered(sent, shards.group) if len(sent) else sent.unsqueeze(0)
    numbers, of_owner, of_ranks = torch.split(received, [told.numbers.shape[1], 3, 1], -1)
    known = form.know(numbers, told.places, shards)
    score, label_margin, label_weight = torch.split(of_owner.sum(0), 1, -1)  # others told 0
    weights = torch.ones_like(score) if weight is None else label_weight

    if every:
        chances = working(to_rows(target, dim)) if probabilities else _one_hot(here, scores)
        losses = _expected(form, scores, chances, known, options, shards)
    else:
        per_class = isinstance(margin, Tensor) and margin.dim() > 0
        losses = form.of_label(known, score, label_margin if per_class else margin) * weights
    if not probabilities:
        losses = losses.masked_fill(
            wrong_labels(of_ranks, labels, options.ignore_index, shards), nan
        )
    return losses.masked_fill(ignored, 0.0), weights.masked_fill(ignored, 0.0).sum()


def _one_hot(labels: Tensor, scores: Tensor) -> Tensor:
    """1 at the labels, 0 elsewhere and throughout the rows of the label −1, (R, n)."""
    classes = torch.arange(scores.shape[1], device=scores.device)
    return (labels == classes).to(working_dtype(scores.dtype))


def own_labels(labels: Tensor, ignored: Tensor, shards: ClassShards) -> Tensor:
    """Labels among the classes of this rank, −1 for those of other ranks and ignored ones."""
    here = labels - shards.start
    return here.masked_fill(ignored | (here < 0) | (here >= shards.size), -1)


def values_of(values: float | Tensor | None, labels: Tensor) -> Tensor:
    """The values of labels, (R, 1), 0 for the label −1 and where there is no value per class."""
    if not isinstance(values, Tensor) or values.dim() == 0:
        return torch.zeros_like(labels)
    return F.pad(values, (0, 1))[labels]


def wrong_labels(
    of_ranks: Tensor, labels: Tensor, ignore_index: int, shards: ClassShards
) -> Tensor:
    """Rows whose labels differ between ranks, (W, R, 1), or that no rank owns, (R, 1).

    An error where values may be read.
    """
    different = (of_ranks != of_ranks[:1]).any(0)
    if not can_read_values(labels):
        nowhere = (labels < 0) | (labels >= shards.classes)
        return different | (nowhere & (labels != ignore_index))
    if different.any():
        row = int(different.long().argmax())
        given = [int(each) for each in of_ranks[:, row, 0]]
        raise ValueError(
            f"target must be the same on all ranks, got {given} in row {row}: every rank needs "
            f"the same samples"
        )
    labels_in_range(labels, shards.classes, ignore_index)
    return different


def _expected(
    form: ShardedLoss,
    scores: Tensor,
    chances: Tensor,
    known: Known,
    options: Options,
    shards: ClassShards,
) -> Tensor:
    """``Σ_c w_c P_c ℓ(s, c)`` over the classes of all ranks, (R, 1).

    In blocks of rows, whose graphs are built again in the backward pass.
    """
    smoothing = options.label_smoothing
    chances = chances * (1 - smoothing) + smoothing / shards.classes
    if options.weight is not None:
        chances = chances * working(options.weight)
    margin = form.loss.margin
    if isinstance(margin, Tensor) and margin.dim() == 0 and is_differentiated(margin):
        margin = copied(margin, shards.group)

    def of_own_classes(scores: Tensor, chances: Tensor, numbers: Tensor, places: Tensor) -> Tensor:
        losses = form.of_classes(scores, Known(numbers, places), margin)
        impossible = (chances == 0) & (losses == inf)
        return (losses.masked_fill(impossible, 0.0) * chances).sum(1, keepdim=True)

    elements = GRAPH_ELEMENTS["cpu" if scores.device.type == "cpu" else "other"]
    rows = max(1, elements // (form.loss.cost() * max(1, scores.shape[1])))
    tensors = (scores, chances, copied(known.numbers, shards.group), known.places)
    blocks = list(zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True))
    if len(blocks) > 1:
        parts = [checkpoint(of_own_classes, *block, use_reentrant=False) for block in blocks]
        own = torch.cat(parts)
    else:
        own = of_own_classes(*tensors)
    return summed(own, shards.group) if len(own) else own
