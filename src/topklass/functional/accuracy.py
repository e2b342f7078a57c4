"""Top-k accuracy: whether the label is among the k largest scores, for every k from one rank."""

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from topklass._checks import (
    check_count,
    check_target,
    class_dimension,
    to_rows,
)
from topklass._checks import (
    check_logits as check_input,
)
from topklass._checks import (
    labels_in_range as known_in_range,
)
from topklass.reference.row_blocks import by_rows

AVERAGES = ("micro", "macro", "none")


def target_rank(input: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    r"""Rank of the label: how many scores are larger than its own.

    .. math:: r(s, y) = \#\{ i : s_i > s_y \}

    The label is among the k largest scores if and only if its rank is below k, which is Garcin et
    al. 2022, equation 3: an error is ``top_k(s) > s_y``. Scores are compared as they are, so
    rounding changes no rank.

    The rank is C, beyond every k, if the label's score is −inf (an absent class is never shown), if
    any score of the row is NaN, and if the target is ignored.

    Args:
        input: logits (C), (N, C) or (N, C, d1, …); −inf marks an absent class.
        target: class indices (), (N) or (N, d1, …). On a GPU an index that is no class has rank C.
        ignore_index: a target that is no label.

    Returns:
        Integers of the target's shape, from 0 to C.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 2.0, 4.0]])
        >>> target_rank(logits, torch.tensor([0, 1]))
        tensor([0, 1])
    """
    check_input(input)
    classes = check_labelled(input, target)
    labels, known = labels_of(target, classes, ignore_index)

    def rank(scores: Tensor, labels: Tensor) -> Tensor:
        score = scores.gather(1, labels)
        larger = (scores > score).sum(1, keepdim=True)
        never = (score == -inf) | scores.amax(1, keepdim=True).isnan()
        return larger.masked_fill(never, classes)

    # A block's sum makes a tensor of int64 for its scores.
    ranks = by_rows(rank, to_rows(input.detach()), labels, cost=8)
    return ranks.masked_fill(~known, classes).reshape(target.shape)


def topk_accuracy(
    input: Tensor,
    target: Tensor,
    k: int | Sequence[int] = 5,
    average: str = "micro",
    *,
    ignore_index: int = -100,
) -> Tensor:
    r"""Top-k accuracy: the share of labels that are among the k largest scores.

    .. math:: \frac{1}{N} \sum_n \mathbb{1}\{ \#\{ i : s_{n,i} > s_{n,y_n} \} < k \}

    (Garcin et al. 2022, one minus equation 3). A label whose score equals the k-th largest is
    right, so constant scores are right for every k. A label with a score of −inf is never right,
    nor is one of a row that holds NaN, see :func:`target_rank`. It never falls as k grows.

    Args:
        input: logits (C), (N, C) or (N, C, d1, …); −inf marks an absent class.
        target: class indices (), (N) or (N, d1, …). On a GPU an index that is no class counts as
            wrong, for the first or the last class.
        k: length of the list that should hold the label, 1 ≤ k ≤ C, or several lengths.
        average: "micro", over samples; "macro", over the accuracies of the classes, those without
            samples left out (Garcin et al. 2022, section 4.5); "none", one for each class, NaN for
            those without samples.
        ignore_index: a target that does not count.

    Returns:
        A scalar for one k, or with "none" (C), and one more dimension in front for several k. NaN
        without samples.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
        >>> topk_accuracy(logits, torch.tensor([0, 1]), k=1)
        tensor(0.5000)
        >>> topk_accuracy(logits, torch.tensor([0, 1]), k=(1, 2, 3))
        tensor([0.5000, 0.5000, 1.0000])
    """
    check_average(average)
    check_input(input)
    classes = check_labelled(input, target)
    ks = list_lengths(k, classes)
    right = among_largest(target_rank(input, target, ignore_index), ks)
    hits, samples = count_by_class(right, target, classes, ignore_index)
    accuracy = averaged(hits, samples, average)
    return accuracy if isinstance(k, Sequence) else accuracy[0]


def check_average(average: str) -> None:
    """Require a known average."""
    if average not in AVERAGES:
        raise ValueError(f"average must be one of {', '.join(AVERAGES)}, got {average!r}")


def list_lengths(k: int | Sequence[int], classes: int | None = None) -> tuple[int, ...]:
    """Require one k or several, from 1 to the number of classes; return them all."""
    ks = tuple(k) if isinstance(k, Sequence) else (k,)
    if not ks:
        raise ValueError(f"k must be an integer or several, got k={k!r}")
    for each in ks:
        check_count("k", each, classes, "the number of classes")
    return ks


def check_labelled(input: Tensor, target: Tensor) -> int:
    """Require class indices that belong to the input; return the number of classes."""
    classes = input.shape[class_dimension(input)]
    if classes == 0:
        raise ValueError(f"input must have at least one class, got shape {tuple(input.shape)}")
    if isinstance(target, Tensor) and target.shape == input.shape and input.dim() > 1:
        raise TypeError(
            f"target must hold class indices, got class probabilities or one-hot vectors; their "
            f"largest is target.argmax({class_dimension(input)})"
        )
    if check_target(input, target):
        raise TypeError(f"target must hold class indices, got {target.dtype}: target.long()")
    return classes


def labels_of(target: Tensor, classes: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Class indices that can be looked up, (R, 1), and whether they are the target's, (R, 1)."""
    labels = target.long().reshape(-1, 1)
    known_in_range(labels, classes, ignore_index)
    known = (labels >= 0) & (labels < classes) & (labels != ignore_index)
    return labels.clamp(0, classes - 1), known


def among_largest(ranks: Tensor, ks: tuple[int, ...]) -> Tensor:
    """Whether labels of these ranks are among the k largest scores, (K, R) for K lengths."""
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


def averaged(hits: Tensor, samples: Tensor, average: str) -> Tensor:
    """Average (K, C) hits of (C) samples over samples or classes, (K), or not, (K, C)."""
    if average == "micro":
        return hits.sum(1) / samples.sum()
    of_class = hits / samples
    return of_class.nanmean(1) if average == "macro" else of_class
