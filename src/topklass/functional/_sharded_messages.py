"""The exchange of a sharded loss: what ranks tell each other of rows and labels, and its checks."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from topklass._checks import labels_in_range
from topklass._collectives import ClassShards, gathered
from topklass._targets import labels_within
from topklass._transforms import can_read_values
from topklass.functional._sharded_forms import Known, ShardedLoss


class Received(NamedTuple):
    """What all ranks have told each other."""

    known: Known
    """Of the rows."""
    labels: Tensor
    """As each rank has them, (W, R, m)."""
    chances: Tensor
    """Of the labels, as each rank has them, (W, R, m); (W, R, 0) if they are certain."""
    of_label: Tensor
    """Score, margin and weight of a certain label, from the rank that has its class, (R, 3); for
    other targets (R, 0)."""


def exchange(
    form: ShardedLoss,
    scores: Tensor,
    labels: Tensor,
    here: Tensor,
    chances: Tensor | None,
    every: bool,
    weight: Tensor | None,
    shards: ClassShards,
) -> Received:
    """Tell all ranks about the rows in one message, and read theirs.

    Args:
        form: the loss.
        scores: of this rank's classes, (R, n).
        labels: (R, m).
        here: those among this rank's classes, −1 for others.
        chances: of the labels, (R, m); None if each row has one certain label, whose score is
            wanted.
        every: whether losses of every class as the label are wanted.
        weight: of these classes.
        shards: the classes of all ranks.
    """
    nowhere = torch.full((len(scores), 1), -1, device=scores.device)
    told = form.tell(scores, nowhere if every else here, every)
    parts = [told.numbers, labels]
    if chances is not None:
        parts += [chances.detach()]
    else:
        parts += [told.label, values_of(form.loss.margin, here), values_of(weight, here)]
    sent = torch.cat([each.to(told.numbers.dtype) for each in parts], 1)
    received = gathered(sent, shards.group) if len(sent) else sent.unsqueeze(0)
    certain, count = chances is None, labels.shape[1]
    sizes = [told.numbers.shape[1], count, 0 if certain else count, 3 * certain]
    numbers, of_labels, of_chances, of_owner = torch.split(received, sizes, -1)
    known = form.know(numbers, told.places, shards)
    return Received(known, of_labels, of_chances, of_owner.sum(0))  # others told 0


def own_labels(labels: Tensor, ignored: Tensor, shards: ClassShards) -> Tensor:
    """Labels among the classes of this rank, −1 for those of other ranks and ignored ones."""
    return labels_within(labels, shards.start, shards.size).masked_fill(ignored, -1)


def values_of(values: float | Tensor | None, labels: Tensor) -> Tensor:
    """The values of labels, (R, m), 0 for the label −1 and where there is no value per class."""
    if not isinstance(values, Tensor) or values.dim() == 0:
        return torch.zeros_like(labels)
    return F.pad(values, (0, 1))[labels]


def wrong_labels(
    of_ranks: Tensor, labels: Tensor, ignore_index: int, shards: ClassShards
) -> Tensor:
    """Rows whose labels differ between ranks, (W, R, m), or that no rank owns, (R, 1).

    An error where values may be read.
    """
    different = different_rows(of_ranks)
    if not can_read_values(labels):
        nowhere = (labels < 0) | (labels >= shards.classes)
        return different | (nowhere & (labels != ignore_index)).any(1, keepdim=True)
    labels_in_range(labels, shards.classes, ignore_index)
    return different


def different_rows(of_ranks: Tensor) -> Tensor:
    """Rows of targets that differ between ranks, (W, R, m) to (R, 1).

    An error where values may be read.
    """
    first = of_ranks[:1]
    unequal = (of_ranks != first) & ~(of_ranks.isnan() & first.isnan())
    different = unequal.any(0).any(1, keepdim=True)
    if can_read_values(of_ranks) and different.any():
        row = int(different.long().argmax())
        given = of_ranks[:, row].squeeze(-1)
        whole = given.long()
        raise ValueError(
            f"target must be the same on all ranks, got "
            f"{(whole if (whole == given).all() else given).tolist()} in row {row}: every rank "
            f"needs the same samples, with labels that are counted among all classes"
        )
    return different
