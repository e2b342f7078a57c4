"""Top-k accuracy: whether the label is among the k largest logits, for every k from one rank."""

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from topklass._checks import (
    check_count,
    check_logits,
    check_not_distributed,
    check_target,
    labels_in_range,
    to_rows,
)
from topklass.reference.row_blocks import by_rows

AVERAGES = ("micro", "macro", "weighted", "none", None)


def target_rank(
    logits: Tensor, target: Tensor, *, dim: int = 1, ignore_index: int = -100
) -> Tensor:
    r"""Rank of the label: how many logits are larger than its own.

    .. math:: r(s, y) = \#\{ i : s_i > s_y \}

    The label is among the k largest logits if and only if its rank is below k, which is Garcin et
    al. 2022, equation 3: an error is ``top_k(s) > s_y``. Logits are compared as they are, so
    rounding changes no rank.

    The rank is C, beyond every k, if the label's logit is −inf (an absent class is never
    predicted), if any logit of the row is NaN, and if the target is ignored.

    Args:
        logits: (C), (N, C) or (N, C, d1, …); −inf marks an absent class.
        target: class indices, of the logits' shape without the classes. On a GPU an index that is
            not a class has rank C.
        dim: the dimension of the classes; −1 for (N, T, C).
        ignore_index: a target that is no label.

    Returns:
        Integers of the target's shape, from 0 to C.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 2.0, 4.0]])
        >>> target_rank(logits, torch.tensor([0, 1]))
        tensor([0, 1])
    """
    check_not_distributed(logits=logits, target=target)
    check_logits(logits, dim)
    rows = labelled_rows(logits, target, dim)
    classes = rows.shape[1]
    labels, known = labels_of(target, classes, ignore_index)

    def rank(scores: Tensor, labels: Tensor) -> Tensor:
        score = scores.gather(1, labels)
        larger = (scores > score).sum(1, keepdim=True)
        never = (score == -inf) | scores.amax(1, keepdim=True).isnan()
        return larger.masked_fill(never, classes)

    # A block's sum makes a tensor of int64 for its scores.
    ranks = by_rows(rank, rows.detach(), labels, cost=8)
    return ranks.masked_fill(~known, classes).reshape(target.shape)


def topk_accuracy(
    logits: Tensor,
    target: Tensor,
    k: int | Sequence[int] = 5,
    average: str | None = "micro",
    *,
    dim: int = 1,
    ignore_index: int = -100,
    num_classes: int | None = None,
) -> Tensor:
    r"""Top-k accuracy: the fraction of labels that are among the k largest logits.

    .. math:: \frac{1}{N} \sum_n \mathbb{1}\{ \#\{ i : s_{n,i} > s_{n,y_n} \} < k \}

    (Garcin et al. 2022, one minus equation 3). A label whose logit equals the k-th largest is
    right, so constant logits are right for every k. A label with a logit of −inf is never right,
    nor is one of a row that has NaN, see :func:`target_rank`. Accuracy never falls as k grows.

    docs/metrics.md compares it with torchmetrics' ``multiclass_accuracy``.

    Args:
        logits: (C), (N, C) or (N, C, d1, …); −inf marks an absent class. Or predicted labels,
            integers of the target's shape, with k = 1 and ``num_classes``.
        target: class indices, of the logits' shape without the classes. On a GPU an index that is
            not a class counts as wrong, for the first or the last class.
        k: length of the list that should contain the label, 1 ≤ k ≤ C, or several lengths.
        average: "micro", over samples; "macro", over the accuracies of the classes, those without
            samples left out (Garcin et al. 2022, section 4.5); "weighted", over the classes by
            their numbers of samples, which is the same as "micro"; "none" or None, one for each
            class, NaN for those without samples.
        dim: the dimension of the classes; −1 for (N, T, C).
        ignore_index: a target that does not count.
        num_classes: C, which predicted labels do not tell.

    Returns:
        A scalar for one k, or (C) if not averaged, and one more dimension in front for several k.
        NaN without samples.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
        >>> topk_accuracy(logits, torch.tensor([0, 1]), k=1)
        tensor(0.5000)
        >>> topk_accuracy(logits, torch.tensor([0, 1]), k=(1, 2, 3))
        tensor([0.5000, 0.5000, 1.0000])
        >>> topk_accuracy(logits.argmax(1), torch.tensor([0, 1]), k=1, num_classes=4)
        tensor(0.5000)
    """
    check_average(average)
    hits, samples = count_hits(logits, target, k, dim, ignore_index, num_classes)
    accuracy = averaged(hits, samples, average)
    return accuracy if isinstance(k, Sequence) else accuracy[0]


def check_average(average: str | None) -> None:
    """Require a known average."""
    if average not in AVERAGES:
        raise ValueError(f"average must be one of {', '.join(map(str, AVERAGES))}, got {average!r}")


def list_lengths(k: int | Sequence[int], classes: int | None = None) -> tuple[int, ...]:
    """Require one k or several, from 1 to the number of classes; return them all."""
    ks = tuple(k) if isinstance(k, Sequence) else (k,)
    if not ks:
        raise ValueError(f"k must be an integer or several, got k={k!r}")
    for each in ks:
        check_count("k", each, classes, "the number of classes")
    return ks


def labelled_rows(values: Tensor, target: Tensor, dim: int) -> Tensor:
    """Require a class index for each row of logits, or of masks; return the rows, (R, C)."""
    if check_target(values, target, dim):
        raise TypeError(
            f"target must hold class indices, got class probabilities or one-hot vectors; their "
            f"largest is target.argmax({dim})"
        )
    rows = to_rows(values, dim)
    if rows.shape[1] == 0:
        raise ValueError(f"there must be at least one class, got shape {tuple(values.shape)}")
    return rows


def labels_of(target: Tensor, classes: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Class indices that can be looked up, (R, 1), and whether they are the target's, (R, 1)."""
    labels = target.long().reshape(-1, 1)
    labels_in_range(labels, classes, ignore_index)
    known = (labels >= 0) & (labels < classes) & (labels != ignore_index)
    return labels.clamp(0, classes - 1), known


def count_hits(
    logits: Tensor,
    target: Tensor,
    k: int | Sequence[int],
    dim: int,
    ignore_index: int,
    num_classes: int | None,
) -> tuple[Tensor, Tensor]:
    """Count for each class the labels among the k largest, (K, C) for K lengths, and all, (C)."""
    if _are_labels(logits):
        right = _predicted(logits, target, k, ignore_index, num_classes)
        return count_by_class(right, target, int(num_classes or 0), ignore_index)
    ranks = target_rank(logits, target, dim=dim, ignore_index=ignore_index)
    classes = check_logits(logits, dim)
    if num_classes is not None:
        check_num_classes(num_classes, classes)
    right = among_largest(ranks, list_lengths(k, classes))
    return count_by_class(right, target, classes, ignore_index)


def check_num_classes(num_classes: int, classes: int) -> None:
    """Require as many classes as were announced."""
    if classes != num_classes:
        raise ValueError(f"expected num_classes={num_classes}, got {classes} classes")


def _are_labels(logits: Tensor) -> bool:
    """Whether these are integers: predicted labels instead of logits."""
    if not isinstance(logits, Tensor) or logits.dtype == torch.bool:
        return False
    return not (logits.is_floating_point() or logits.is_complex())


def _predicted(
    labels: Tensor,
    target: Tensor,
    k: int | Sequence[int],
    ignore_index: int,
    num_classes: int | None,
) -> Tensor:
    """Whether predicted labels are right, (1, R)."""
    if num_classes is None:
        raise ValueError("predicted labels do not tell the number of classes: pass num_classes")
    if list_lengths(k, num_classes) != (1,):
        raise ValueError(f"predicted labels are lists of one: they need k=1, or logits; got k={k}")
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor of class indices, got {type(target).__name__}")
    if not _are_labels(target):
        raise RuntimeError(f"target must hold class indices (integers), got {target.dtype}")
    if labels.shape != target.shape:
        raise ValueError(
            f"predicted labels (integers) must have the target's shape {tuple(target.shape)}, got "
            f"{tuple(labels.shape)}; logits must be floating point"
        )
    classes, known = labels_of(target, num_classes, ignore_index)
    return ((labels.long().reshape(-1, 1) == classes) & known).t()


def among_largest(ranks: Tensor, ks: tuple[int, ...]) -> Tensor:
    """Whether labels of these ranks are among the k largest logits, (K, R) for K lengths."""
    return torch.stack([ranks.reshape(-1) < k for k in ks])


def count_by_class(
    right: Tensor, target: Tensor, classes: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Count for each class the samples that are right, (K, C) of (K, R), and all of them, (C)."""
    labels = target.long().reshape(-1)
    of_class = labels.clamp(0, classes - 1)
    hits = labels.new_zeros(len(right), classes).index_add(1, of_class, right.long())
    samples = labels.new_zeros(classes).index_add(0, of_class, (labels != ignore_index).long())
    return hits, samples


def averaged(hits: Tensor, samples: Tensor, average: str | None) -> Tensor:
    """Average (K, C) hits of (C) samples over samples or classes, (K), or not, (K, C)."""
    if average in ("micro", "weighted"):
        return hits.sum(1) / samples.sum()
    of_class = hits / samples
    return of_class.nanmean(1) if average == "macro" else of_class
