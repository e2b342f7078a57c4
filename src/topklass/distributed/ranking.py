"""Accuracy and predictions of logits whose classes are split over ranks."""

from collections.abc import Sequence
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from topklass._checks import (
    check_count,
    check_dim,
    check_logits,
    check_not_distributed,
    check_same_device,
    check_target,
    check_temperature,
    class_dimension,
    index_shape,
    to_rows,
)
from topklass._collectives import Agreement, ClassShards, all_gather, all_reduce, fact, uncompiled
from topklass.functional._sharded_messages import own_labels, wrong_labels
from topklass.functional.accuracy import (
    among_largest,
    averaged,
    check_average,
    count_by_class,
    list_lengths,
)
from topklass.operators.row_states import row_states
from topklass.prediction import METHODS, TopK, largest
from topklass.reference.power_sums import LARGEST_K, wide_dtype, working_dtype
from topklass.reference.row_blocks import by_rows
from topklass.reference.row_states import marginals_of_heads, merged, softmax_of


@uncompiled
@torch.no_grad()
def sharded_topk_accuracy(
    local_logits: Tensor,
    target: Tensor,
    k: int | Sequence[int] = 5,
    average: str | None = "micro",
    *,
    group: ProcessGroup | ClassShards | None = None,
    dim: int = 1,
    ignore_index: int = -100,
) -> Tensor:
    """Top-k accuracy of logits whose classes are split over ranks.

    What :func:`topklass.topk_accuracy` returns for all classes, on every rank. The ranks exchange
    the labels and their scores, and then how many scores exceed them.

    Args:
        local_logits: of this rank's classes, (n), (N, n) or (N, n, d1, …).
        target: class indices among all classes, the same on all ranks.
        k: length of the list that should contain the label, or several lengths.
        average: "micro", "macro", "weighted", "none" or None.
        group: the process group, or :class:`ClassShards`.
        dim: the class dimension.
        ignore_index: a target that does not count.

    Returns:
        A scalar for one k, or (C) if not averaged, and one more dimension in front for several k.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> logits = torch.tensor([[4.0, 3.0, 2.0], [4.0, 3.0, 2.0]])
        >>> sharded_topk_accuracy(logits, torch.tensor([1, 2]), k=[1, 2, 3])
        tensor([0.0000, 0.5000, 1.0000])
        >>> dist.destroy_process_group()
    """
    with Agreement("sharded_topk_accuracy", group) as agreement:
        check_average(average)
        ks = list_lengths(k)
        agreement.facts["k"] = fact(ks)
        _agree(agreement, local_logits, target, dim, ignore_index)
    shards = agreement.shards
    list_lengths(ks, shards.classes)
    ranks = _ranks(local_logits, target, dim, ignore_index, shards)
    hits, samples = count_by_class(among_largest(ranks, ks), target, shards.classes, ignore_index)
    accuracy = averaged(hits, samples, average)
    return accuracy if isinstance(k, Sequence) else accuracy[0]


@uncompiled
@torch.no_grad()
def sharded_target_rank(
    local_logits: Tensor,
    target: Tensor,
    *,
    group: ProcessGroup | ClassShards | None = None,
    dim: int = 1,
    ignore_index: int = -100,
) -> Tensor:
    """How many logits exceed the label's, for classes that are split over processes.

    What :func:`topklass.functional.target_rank` returns for all classes, on every rank of the
    group: how many logits are larger than that of the label. It tells for every k whether a list
    holds the label.

    Args:
        local_logits: of this rank's classes, (n), (N, n) or (N, n, d1, …).
        target: class indices among all classes, the same on all ranks.
        group: the process group, or :class:`ClassShards`.
        dim: the class dimension.
        ignore_index: a target that is no label.

    Returns:
        Integers of the target's shape, from 0 to the number of all classes.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> logits = torch.tensor([[4.0, 3.0, 2.0], [4.0, 3.0, 2.0]])
        >>> sharded_target_rank(logits, torch.tensor([1, 2]))
        tensor([1, 2])
        >>> dist.destroy_process_group()
    """
    with Agreement("sharded_target_rank", group) as agreement:
        _agree(agreement, local_logits, target, dim, ignore_index)
    return _ranks(local_logits, target, dim, ignore_index, agreement.shards).reshape(target.shape)


def _agree(
    agreement: Agreement, logits: Tensor, target: Tensor, dim: int, ignore_index: int
) -> None:
    """Check the arguments of a rank, and note what must be the same on all ranks."""
    check_not_distributed(local_logits=logits, target=target)
    agreement.classes = check_logits(logits, dim)
    if check_target(logits, target, dim):
        raise TypeError("target must hold class indices, got class probabilities")
    check_same_device(logits, target=target)
    agreement.facts |= {
        "ignore_index": int(ignore_index),
        "the number of rows": target.numel(),
        "the logits' dtype": str(logits.dtype),
    }


def _ranks(
    logits: Tensor, target: Tensor, dim: int, ignore_index: int, shards: ClassShards
) -> Tensor:
    """How many logits of all ranks are larger than the label's, (R, 1)."""
    labels = target.reshape(-1, 1).long()
    scores = to_rows(logits.detach(), dim)
    here = own_labels(labels, labels == ignore_index, shards)
    own = F.pad(scores, (0, 1)).gather(1, here.clamp(min=0)).masked_fill(here < 0, 0.0)
    columns = (own, labels)
    sent = torch.cat([each.to(wide_dtype(scores)) for each in columns], 1)
    scores_of_ranks, of_ranks = torch.split(all_gather(sent, shards.group), 1, -1)
    score = scores_of_ranks.sum(0)  # others told 0
    wrong = wrong_labels(of_ranks, labels, ignore_index, shards) | (labels == ignore_index)

    def count(scores: Tensor, score: Tensor) -> Tensor:
        return torch.stack([(scores > score).sum(1), scores.isnan().sum(1)], 1)

    larger, spoilt = all_reduce(by_rows(count, scores, score, cost=16), shards.group).unbind(1)
    never = wrong | (score == -inf) | score.isnan() | (spoilt.unsqueeze(1) > 0)
    return larger.unsqueeze(1).masked_fill(never, shards.classes)


@uncompiled
@torch.no_grad()
def sharded_predict_topk(
    local_logits: Tensor,
    k: int,
    *,
    group: ProcessGroup | ClassShards | None = None,
    dim: int = -1,
    method: str = "marginals",
    temperature: float = 1.0,
) -> TopK:
    """The k labels with the largest probability of belonging to the top k, of all classes.

    What :func:`topklass.predict_topk` returns for a single crop, on every rank. The ranks exchange
    5k numbers of each row, and 3k + 2 for the softmax. Without derivatives.

    Args:
        local_logits: of this rank's classes, by default (…, n).
        k: length of the list, up to the number of all classes; with marginals up to 32, or 12 for
            float64 logits.
        group: the process group, or :class:`ClassShards`.
        dim: the dimension of the classes.
        method: which probabilities: "marginals" or "softmax".
        temperature: T divides the logits.

    Returns:
        ``TopK(labels, probabilities)``, each with k in place of the classes, descending. Ties are
        in the order of the class index.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> best, chances = sharded_predict_topk(torch.tensor([[4.0, 3.0, 2.0]]), k=2)
        >>> best
        tensor([[0, 1]])
        >>> dist.destroy_process_group()
    """
    with Agreement("sharded_predict_topk", group) as agreement:
        check_dim(dim)
        check_not_distributed(local_logits=local_logits)
        agreement.classes = check_logits(local_logits, dim)
        check_count("k", k)
        check_temperature(temperature, name="temperature")
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
        marginals = method == "marginals"
        if marginals:
            most = LARGEST_K[working_dtype(local_logits.dtype)]
            check_count(
                "k", k, most, f"for {local_logits.dtype} and marginals; method='softmax' takes any"
            )
        agreement.facts |= {
            "k": int(k),
            "method": method,
            "temperature": float(temperature),
            "the number of rows": index_shape(local_logits, dim).numel(),
            "the logits' dtype": str(local_logits.dtype),
        }
    shards = agreement.shards
    check_count("k", k, shards.classes, "the number of classes")
    scores = to_rows(local_logits.detach(), dim)
    missing = max(0, k - shards.size)
    wider = F.pad(scores, (0, missing), value=-inf)
    first = largest(k, wider)
    real = first < shards.size
    nowhere = scores.new_full((len(scores), 1), -1, dtype=torch.long)
    count = k if marginals else 1
    states, _, _ = row_states(scores, nowhere, count, temperature)
    columns = (wider.gather(1, first), first + shards.start, real, *states)
    sent = torch.cat([each.to(states.sums.dtype) for each in columns], 1)
    received = all_gather(sent, shards.group).movedim(0, 1)  # (R, W, ·)
    *candidates, heads, sums = torch.split(received, [k, k, k, count, count], 2)
    best, first, real = (each.flatten(1) for each in candidates)
    order = largest(k, best, real)
    top, labels = best.gather(1, order), first.gather(1, order).long()
    whole, _ = merged(heads, sums, temperature)
    if marginals:
        chances = marginals_of_heads(whole, temperature)
    else:
        chances = softmax_of(top, whole, temperature)
    at = class_dimension(local_logits, dim)
    shape = (*index_shape(local_logits, dim), k)
    labels = labels.clamp(max=shards.classes - 1)  # any, in a row with NaN
    chances = chances.to(working_dtype(local_logits.dtype))
    return TopK(labels.reshape(shape).movedim(-1, at), chances.reshape(shape).movedim(-1, at))
