"""Metrics over a data set, for torchmetrics and Lightning; needs ``topklass[metrics]``.

States are sums of integers: the result does not depend on how the data are divided into batches and
processes. No update waits for a CUDA device.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from topklass._checks import check_count, check_dim, check_ignore_index, check_logits
from topklass._extras import requires
from topklass.functional.accuracy import (
    averaged,
    check_average,
    check_num_classes,
    count_by_class,
    count_hits,
    labelled_rows,
    labels_of,
    list_lengths,
)
from topklass.reference.row_blocks import by_rows

with requires("topklass.metrics", "torchmetrics", install="topklass[metrics]"):
    from torchmetrics import Metric

__all__ = ["AverageKAccuracy", "SetCoverage", "SetSize", "TopKAccuracy"]

DIGITS = 13
"""How many binary digits, after the leading one, average-K accuracy keeps of a log-probability."""
OCTAVES = 16
"""How many powers of two it tells apart, from −log p = 1/2 to 2^15."""
BINS = OCTAVES << DIGITS


class _Counts(Metric):
    """Integers that are summed."""

    full_state_update = False
    is_differentiable = False

    def __init__(self, dim: int, ignore_index: int, *parameters: int, **options: Any) -> None:
        super().__init__(**options)
        check_dim(dim)
        check_ignore_index(ignore_index)
        self.dim = dim
        self.ignore_index = ignore_index
        # A MetricCollection merges metrics whose states are equal after the first batch: this state
        # differs where later batches could.
        configuration = torch.tensor([dim, ignore_index, *parameters])
        self.add_state("configuration", configuration, dist_reduce_fx="max")

    def _add_count(self, name: str, *shape: int) -> None:
        self.add_state(name, torch.zeros(shape, dtype=torch.long), dist_reduce_fx="sum")


class _ClassCounts(_Counts):
    """Counts of right and of all samples of each class."""

    higher_is_better = True
    hits: Tensor
    samples: Tensor

    def __init__(
        self,
        num_classes: int,
        average: str | None,
        dim: int,
        ignore_index: int,
        *ks: int,
        **options: Any,
    ) -> None:
        check_count("num_classes", num_classes)
        check_average(average)
        super().__init__(dim, ignore_index, *ks, **options)
        self.num_classes = num_classes
        self.average = average
        self._add_count("hits", max(1, len(ks)), num_classes)
        self._add_count("samples", num_classes)

    def _add(self, hits: Tensor, samples: Tensor) -> None:
        self.hits = self.hits + hits
        self.samples = self.samples + samples


class TopKAccuracy(_ClassCounts):
    """Top-k accuracy of a data set, see :func:`topklass.functional.topk_accuracy`.

    Args:
        num_classes: C.
        k: length of the list that should contain the label, 1 ≤ k ≤ C, or several lengths.
        average: "micro", over samples; "macro", over classes that have samples; "weighted", over
            classes by their numbers of samples, which is the same as "micro"; "none" or None, one
            for each class.
        dim: the dimension of the classes; −1 for (N, T, C).
        ignore_index: a target that does not count.
        **options: those of :class:`torchmetrics.Metric`.

    ``update`` takes logits (C), (N, C) or (N, C, d1, …) and class indices; with k = 1 also
    predicted labels, integers of the target's shape, in place of the logits. ``compute`` returns a
    tensor for one k, for ``self.log`` of Lightning, and for several a dictionary from ``"top1"``,
    ``"top5"``, … to tensors, for ``self.log_dict``.

    Example:
        >>> metric = TopKAccuracy(num_classes=4, k=(1, 3))
        >>> logits = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
        >>> metric.update(logits, torch.tensor([0, 1]))
        >>> metric.compute()
        {'top1': tensor(0.5000), 'top3': tensor(1.)}
    """

    def __init__(
        self,
        num_classes: int,
        k: int | Sequence[int] = (1, 5),
        average: str | None = "micro",
        *,
        dim: int = 1,
        ignore_index: int = -100,
        **options: Any,
    ) -> None:
        check_count("num_classes", num_classes)
        ks = list_lengths(k, num_classes)
        super().__init__(num_classes, average, dim, ignore_index, *ks, **options)
        self.k = k

    def update(self, logits: Tensor, target: Tensor) -> None:
        """Count the labels among the k largest logits."""
        counts = count_hits(logits, target, self.k, self.dim, self.ignore_index, self.num_classes)
        self._add(*counts)

    def compute(self) -> Tensor | dict[str, Tensor]:
        """Divide by the numbers of samples."""
        return _named("top", self.k, averaged(self.hits, self.samples, self.average))


class AverageKAccuracy(_Counts):
    r"""Average-K accuracy: the fraction of labels in sets of K classes on average.

    A set contains the classes whose probabilities reach one threshold for all samples, so ambiguous
    samples have larger sets (Lorieul, Joly and Shasha 2021). With p the softmax of the logits, a
    label is right if fewer than N·K of all N·C probabilities are larger than its own:

    .. math:: \frac{1}{N} \sum_n \mathbb{1}\{
        \#\{ (m, i) : p_{m,i} > p_{n,y_n} \} < N K \}

    The threshold is that of the data seen, so ``forward`` takes the batch's own. A label that ties
    with it is right. Probabilities are kept as counts, in memory that does not grow with the data:
    those whose logarithms agree to 14 binary digits are ties. A label with a score of −inf is never
    right, nor is one of a row whose softmax is NaN. Probabilities go in as logarithms.

    Args:
        k: K, the average size of the sets, or several.
        dim: the dimension of the classes; −1 for (N, T, C).
        ignore_index: a target whose sample does not count.
        **options: those of :class:`torchmetrics.Metric`.

    ``update`` takes logits (C), (N, C) or (N, C, d1, …) and class indices. ``compute`` returns a
    tensor for one k, and for several a dictionary from ``"average1"``, ``"average5"``, … to them.

    Example:
        >>> metric = AverageKAccuracy(k=2)
        >>> certain, ambiguous = [9.0, 1.0, 0.0, 0.0], [2.1, 2.0, 1.9, -3.0]
        >>> metric.update(torch.tensor([certain, ambiguous]), torch.tensor([0, 2]))
        >>> metric.compute()
        tensor(1.)
    """

    higher_is_better = True
    scores: Tensor
    labels: Tensor
    samples: Tensor

    def __init__(
        self,
        k: int | Sequence[int] = 5,
        *,
        dim: int = 1,
        ignore_index: int = -100,
        **options: Any,
    ) -> None:
        super().__init__(dim, ignore_index, **options)
        list_lengths(k)
        self.k = k
        self._add_count("scores", BINS)
        self._add_count("labels", BINS)
        self._add_count("samples")

    def update(self, logits: Tensor, target: Tensor) -> None:
        """Count all probabilities, and those of the labels."""
        check_logits(logits, self.dim)
        rows = labelled_rows(logits.detach(), target, self.dim)
        list_lengths(self.k, rows.shape[1])
        labels, known = labels_of(target, rows.shape[1], self.ignore_index)
        counted = target.long().reshape(-1, 1) != self.ignore_index
        bins = by_rows(_bins, rows, counted, cost=8)
        self.scores = self.scores + _histogram(bins)
        self.labels = self.labels + _histogram(bins.gather(1, labels).masked_fill(~known, BINS))
        self.samples = self.samples + counted.sum()

    def compute(self) -> Tensor | dict[str, Tensor]:
        """Compare the labels' probabilities with the threshold of each k."""
        larger = self.scores.cumsum(0) - self.scores
        hits = [(self.labels * (larger < k * self.samples)).sum() for k in list_lengths(self.k)]
        return _named("average", self.k, torch.stack(hits) / self.samples)


class SetCoverage(_ClassCounts):
    """Coverage of predicted sets: the fraction of labels that are in their sets.

    Args:
        num_classes: C.
        average: as in :class:`TopKAccuracy`.
        dim: the dimension of the classes, by default the last, as in the sets of :mod:`topklass`.
        ignore_index: a target that does not count.
        **options: those of :class:`torchmetrics.Metric`.

    ``update`` takes boolean masks (…, C), true for classes in the set, and class indices (…).

    Example:
        >>> metric = SetCoverage(num_classes=3)
        >>> sets = torch.tensor([[True, True, False], [False, False, True]])
        >>> metric.update(sets, torch.tensor([1, 0]))
        >>> metric.compute()
        tensor(0.5000)
    """

    def __init__(
        self,
        num_classes: int,
        average: str | None = "micro",
        *,
        dim: int = -1,
        ignore_index: int = -100,
        **options: Any,
    ) -> None:
        super().__init__(num_classes, average, dim, ignore_index, **options)

    def update(self, sets: Tensor, target: Tensor) -> None:
        """Count the labels in their sets."""
        rows = _rows_of_sets(sets, target, self.dim)
        check_num_classes(self.num_classes, rows.shape[1])
        labels, known = labels_of(target, self.num_classes, self.ignore_index)
        inside = rows.gather(1, labels) & known
        self._add(*count_by_class(inside.t(), target, self.num_classes, self.ignore_index))

    def compute(self) -> Tensor:
        """Divide by the numbers of samples."""
        return averaged(self.hits, self.samples, self.average)[0]


class SetSize(_Counts):
    """Mean size of predicted sets.

    Args:
        dim: the dimension of the classes, by default the last, as in the sets of :mod:`topklass`.
        ignore_index: a target whose set does not count.
        **options: those of :class:`torchmetrics.Metric`.

    ``update`` takes what :class:`SetCoverage` takes.

    Example:
        >>> metric = SetSize()
        >>> sets = torch.tensor([[True, True, False], [False, False, True]])
        >>> metric.update(sets, torch.tensor([1, 0]))
        >>> metric.compute()
        tensor(1.5000)
    """

    higher_is_better = False
    total: Tensor
    samples: Tensor

    def __init__(self, *, dim: int = -1, ignore_index: int = -100, **options: Any) -> None:
        super().__init__(dim, ignore_index, **options)
        self._add_count("total")
        self._add_count("samples")

    def update(self, sets: Tensor, target: Tensor | None = None) -> None:
        """Add the sizes of the sets, or of those whose target is not ignored."""
        if target is None:
            target = torch.zeros_like(sets.select(self.dim, 0), dtype=torch.long)
        rows = _rows_of_sets(sets, target, self.dim)
        labels_of(target, rows.shape[1], self.ignore_index)
        counted = target.long().reshape(-1, 1) != self.ignore_index
        sizes = by_rows(lambda block: block.sum(1, keepdim=True), rows, cost=8)
        self.total = self.total + (sizes * counted).sum()
        self.samples = self.samples + counted.sum()

    def compute(self) -> Tensor:
        """Divide by the number of samples."""
        return self.total / self.samples


def _named(name: str, k: int | Sequence[int], values: Tensor) -> Tensor | dict[str, Tensor]:
    """The only value of (K, …), or a dictionary of them with the names of the k."""
    if not isinstance(k, Sequence):
        return values[0]
    return {f"{name}{each}": value for each, value in zip(k, values, strict=True)}


def _rows_of_sets(sets: Tensor, target: Tensor, dim: int) -> Tensor:
    """Require masks of classes, and a class index for each; return the masks as rows, (R, C)."""
    if not isinstance(sets, Tensor) or sets.dtype != torch.bool:
        given = sets.dtype if isinstance(sets, Tensor) else type(sets).__name__
        raise TypeError(f"sets must be a boolean tensor, true for classes in the set, got {given}")
    if sets.dim() == 0:
        raise ValueError("sets must have a dimension of classes, got shape ()")
    return labelled_rows(sets, target, dim)


def _bins(logits: Tensor, counted: Tensor) -> Tensor:
    """Bins of probabilities, the largest first; ``BINS`` for NaN and samples that do not count.

    Probabilities below exp(−2^15) are in ``BINS`` too: they count as absent. At most N of all are
    above 1/2, so these reach the threshold of every K and may share bins. The bits of positive
    floating-point numbers are integers in their order.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    surprise = -torch.log_softmax(wide, 1).float()
    hidden = ~counted | surprise[:, :1].isnan()
    bits = surprise.clamp_(0.5, 0.5 * 2.0**OCTAVES).view(torch.int32)
    bins = (bits >> (23 - DIGITS)) - (126 << DIGITS)  # 126 is the exponent of 1/2
    return bins.masked_fill(hidden, BINS)


def _histogram(bins: Tensor) -> Tensor:
    """How often each bin occurs, without the one beyond the last."""
    counts = torch.zeros(BINS + 1, dtype=torch.long, device=bins.device)
    return counts.index_add(0, bins.flatten(), counts.new_ones(()).expand(bins.numel()))[:BINS]
