"""``_contract.py`` for ranks that each have a slice of the classes.

One exchange tells all ranks the losses of rows. With label smoothing, class probabilities or a few
labels in a row, each rank adds up the losses of its own classes as labels, and a second exchange
adds those.
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
    check_not_distributed,
    every_class_counts,
    index_shape,
    to_rows,
)
from topklass._collectives import Agreement, ClassShards, copied, fact, summed
from topklass._targets import SparseTarget, Target, without_padding
from topklass._transforms import can_read_values, is_differentiated
from topklass.functional._contract import (
    check_targets,
    possible,
    reduced,
    result_dtype,
    working,
)
from topklass.functional._sharded_forms import Known, ShardedLoss
from topklass.functional._sharded_messages import (
    different_rows,
    exchange,
    own_labels,
    values_of,
    wrong_labels,
)
from topklass.reference.power_sums import working_dtype
from topklass.reference.row_blocks import GRAPH_ELEMENTS


def agree(
    agreement: Agreement,
    form: ShardedLoss,
    logits: Tensor,
    target: Target,
    dim: int,
    options: Options,
    **parameters: Any,
) -> Target:
    """Check the arguments of a rank, and note what must be the same on all ranks.

    Returns the targets of rows: class indices (R, 1), the probabilities of this rank's classes,
    (R, n), or those of a few classes, (R, m).
    """
    few = target if isinstance(target, SparseTarget) else (target, None)
    check_not_distributed(local_logits=logits, target=few[0], weights=few[1])
    check_not_distributed(margin=form.loss.margin, weight=options.weight)
    classes, margin = check_logits(logits, dim), form.loss.margin
    check_margin(margin, classes)
    targets = check_targets(form.loss, logits, target, dim, options)
    form.check(logits.dtype)
    agreement.classes = classes
    agreement.facts |= {name: fact(value) for name, value in parameters.items()}
    agreement.facts |= {
        "margin": _margin(margin),
        "whether weight is given": options.weight is not None,
        "ignore_index": int(options.ignore_index),
        "reduction": options.reduction,
        "label_smoothing": float(options.label_smoothing),
        "the number of rows": index_shape(logits, dim).numel(),
        "the logits' dtype": str(logits.dtype),
        "the target": _kind(targets),
    }
    if isinstance(targets, SparseTarget) or every_class_counts(targets, options):
        wanted = torch.is_grad_enabled() and logits.requires_grad
        agreement.facts["whether the logits require a gradient"] = wanted
    if isinstance(targets, SparseTarget):
        wanted = is_differentiated(targets.weights)
        agreement.facts["whether the target's weights require a gradient"] = wanted
    return targets


def _margin(margin: float | Tensor) -> str | float:
    if _is_per_class(margin):
        return "one per class"
    if isinstance(margin, Tensor):
        return float(margin.detach()) if can_read_values(margin) else "a number"
    return float(margin)


def _kind(targets: Target) -> str:
    if isinstance(targets, SparseTarget):
        return f"SparseTarget of {targets.indices.shape[1]}"
    return "class probabilities" if targets.is_floating_point() else "class indices"


def sharded_classification_loss(
    form: ShardedLoss,
    logits: Tensor,
    targets: Target,
    dim: int,
    options: Options,
    shards: ClassShards,
    factor: float = 1.0,
) -> Tensor:
    """``classification_loss`` of the classes of all ranks, the same on each.

    ``targets`` are what :func:`agree` returns.
    """
    losses, total = sharded_losses(form, to_rows(logits, dim), targets, options, shards)
    result = reduced(losses, total, options.reduction)
    if options.reduction == "none":
        result = result.reshape(index_shape(logits, dim))
    return (result * factor).to(result_dtype(logits))


def sharded_losses(
    form: ShardedLoss,
    scores: Tensor,
    targets: Target,
    options: Options,
    shards: ClassShards,
) -> tuple[Tensor, Tensor]:
    """Losses of (R, n) scores, (R, 1), and what their mean divides by.

    Margins, weights and class probabilities are those of this rank's classes.
    """
    classes = shards.classes
    check_count("k", form.longest, classes - 1, f"one less than the {classes} classes")
    labels, chances = _labels_and_chances(targets, options.ignore_index)
    here = own_labels(labels, labels == options.ignore_index, shards)
    every = chances is not None or options.label_smoothing > 0
    of_labels = None if chances is None else chances[:, : labels.shape[1]]
    received = exchange(form, scores, labels, here, of_labels, every, options.weight, shards)
    wrong = wrong_labels(received.labels, labels, options.ignore_index, shards)
    if of_labels is not None:
        wrong = wrong | different_rows(received.chances)
    weights = received.known.numbers.new_ones(len(scores), 1)
    if every:
        losses = _expected(form, scores, here, chances, received.known, options, shards)
    if chances is None:
        score, margin, weight = torch.split(received.of_label, 1, -1)
        if options.weight is not None:
            weights = weight
        if not every:
            own, per_class = form.loss.margin, _is_per_class(form.loss.margin)
            losses = form.of_label(received.known, score, margin if per_class else own) * weights
        ignored = labels == options.ignore_index
        losses, weights = losses.masked_fill(ignored, 0.0), weights.masked_fill(ignored, 0.0)
    return losses.masked_fill(wrong, nan), weights.sum()


def _labels_and_chances(targets: Target, ignore_index: int) -> tuple[Tensor, Tensor | None]:
    """Labels, (R, m), and their chances, None if they are certain.

    There are none, (R, 0), where the chances are those of all classes.
    """
    if isinstance(targets, SparseTarget):
        padded = without_padding(targets, ignore_index)
        labels, chances = (F.pad(each, (0, not each.shape[1])) for each in padded)
        return labels, working(chances)
    if targets.is_floating_point():
        return targets.new_empty(len(targets), 0, dtype=torch.long), working(targets)
    return targets, None


def _is_per_class(margin: float | Tensor) -> bool:
    return isinstance(margin, Tensor) and margin.dim() > 0


def _expected(
    form: ShardedLoss,
    scores: Tensor,
    here: Tensor,
    chances: Tensor | None,
    known: Known,
    options: Options,
    shards: ClassShards,
) -> Tensor:
    """``Σ_c w_c P_c ℓ(s, c)`` over the classes of all ranks, (R, 1).

    Args:
        form: the loss.
        scores: of this rank's classes, (R, n).
        here: labels among these, (R, m), −1 for those of other ranks.
        chances: of the labels, (R, m), or if there are none, of all classes here, (R, n); None
            for labels that are certain.
        known: of the rows.
        options: with the weights of these classes.
        shards: the classes of all ranks.
    """
    margin, weight, smoothing = form.loss.margin, options.weight, options.label_smoothing
    if isinstance(margin, Tensor) and margin.dim() == 0 and is_differentiated(margin):
        margin = copied(margin, shards.group)
    known = known._replace(numbers=copied(known.numbers, shards.group))
    if chances is None:
        chances = torch.ones_like(here, dtype=working_dtype(scores.dtype))
    elif here.shape[1] and is_differentiated(chances):
        chances = copied(chances, shards.group)
    if here.shape[1] and not smoothing:
        own = _of_labels(form, scores, here, chances, known, weight, margin)
    else:
        if here.shape[1]:
            chances = _dense(here, chances, scores.shape[1])
        chances = chances * (1 - smoothing) + smoothing / shards.classes
        if weight is not None:
            chances = chances * working(weight)
        own = _of_classes(form, scores, chances, known, margin)
    return summed(own, shards.group) if len(own) else own


def _dense(here: Tensor, chances: Tensor, classes: int) -> Tensor:
    """The chances of this rank's classes, (R, n), from those of labels, (R, m)."""
    columns = here.masked_fill(here < 0, classes)
    return chances.new_zeros(len(here), classes + 1).scatter_add(1, columns, chances)[:, :classes]


def _of_labels(
    form: ShardedLoss,
    scores: Tensor,
    here: Tensor,
    chances: Tensor,
    known: Known,
    weight: Tensor | None,
    margin: float | Tensor,
) -> Tensor:
    """``Σ_c w_c P_c ℓ(s, c)`` over the labels of this rank, (R, 1).

    Every label is the only class of a row of its own.
    """
    rows, count = here.shape
    score = torch.full_like(chances, -inf)
    if scores.shape[1]:
        score = working(scores.gather(1, here.clamp(min=0))).masked_fill(here < 0, -inf)
    chances = chances.masked_fill(here < 0, 0.0)
    if weight is not None:
        chances = chances * working(values_of(weight, here))
    if isinstance(margin, Tensor) and margin.dim():
        margin = values_of(margin, here).reshape(-1, 1)
    places = (known.places.unsqueeze(1) != here.unsqueeze(2)).long()
    numbers = known.numbers.unsqueeze(1).expand(-1, count, -1)
    each = Known(numbers.flatten(0, 1), places.flatten(0, 1))
    losses = possible(form.of_classes(score.reshape(-1, 1), each, margin), chances.reshape(-1, 1))
    return losses.reshape(rows, count).sum(1, keepdim=True)


def _of_classes(
    form: ShardedLoss, scores: Tensor, chances: Tensor, known: Known, margin: float | Tensor
) -> Tensor:
    """``Σ_c P_c ℓ(s, c)`` over the classes of this rank, (R, 1).

    In blocks of rows, whose graphs are built again in the backward pass.
    """

    def expected(scores: Tensor, chances: Tensor, numbers: Tensor, places: Tensor) -> Tensor:
        losses = form.of_classes(scores, Known(numbers, places), margin)
        return possible(losses, chances).sum(1, keepdim=True)

    elements = GRAPH_ELEMENTS["cpu" if scores.device.type == "cpu" else "other"]
    rows = max(1, elements // (form.loss.cost() * max(1, scores.shape[1])))
    tensors = (scores, chances, *known)
    blocks = list(zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True))
    if len(blocks) > 1:
        return torch.cat([checkpoint(expected, *block, use_reentrant=False) for block in blocks])
    return expected(*tensors)
