"""Targets of a few classes: mixed images, votes of annotators, short lists of a teacher."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from topklass._checks import check_count, class_dimension, labels_in_range, to_rows
from topklass._transforms import can_read_values


class SparseTarget(NamedTuple):
    """Class probabilities of which at most m of a sample are not 0.

    Every loss but the multi-label one takes it in place of class probabilities, with the same
    result, on the CPU at little more than the cost of class indices. On a GPU the smooth loss and
    top-k cross-entropy read the logits once for all classes of a sample, up to m = 16 and k = 32,
    and once for each beyond. Its tensors have the shape of the logits with m in place of the C
    classes: (N, m) for (N, C), (N, m, d1, …) for (N, C, d1, …). Weights need not sum to 1, and
    those of a class that is listed twice add up. "mean" divides by the number of samples. Label
    smoothing takes every class into account, at the cost of class probabilities.

    Attributes:
        indices: classes, integers; entries equal to the loss's ``ignore_index``, −100 unless told
            otherwise, are padding.
        weights: how much each class counts, floating point; may require a gradient.

    Example:
        >>> import topklass
        >>> logits = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
        >>> target = SparseTarget(
        ...     torch.tensor([[0, 2], [3, -100]]), torch.tensor([[0.7, 0.3], [1.0, 0.0]])
        ... )
        >>> topklass.SmoothTopKLoss(k=2)(logits, target)
        tensor(0.8275)
    """

    indices: Tensor
    weights: Tensor

    @classmethod
    def from_dense(
        cls, probabilities: Tensor, m: int | None = None, *, dim: int = 1
    ) -> "SparseTarget":
        """The classes of class probabilities that are not 0.

        Args:
            probabilities: (C), (N, C) or (N, C, d1, …).
            m: classes of a sample. By default the largest number of classes that are not 0 in any
                sample; finding it synchronises a GPU.
            dim: the class dimension.

        Returns:
            The classes of the m largest probabilities. An error says if more than m are not 0, on
            the CPU; other devices, compilers and transformations drop the smallest.

        Example:
            >>> SparseTarget.from_dense(torch.tensor([[0.0, 0.25, 0.75, 0.0]]))
            SparseTarget(indices=tensor([[2, 1]]), weights=tensor([[0.7500, 0.2500]]))
        """
        if not isinstance(probabilities, Tensor) or not probabilities.is_floating_point():
            given = getattr(probabilities, "dtype", type(probabilities).__name__)
            raise TypeError(f"probabilities must be a floating-point tensor, got {given}")
        at = class_dimension(probabilities, dim)
        if m is not None and m != 0:
            check_count("m", m)
        if m is None or can_read_values(probabilities):
            each = (probabilities != 0).sum(at)
            most = int(each.max()) if each.numel() else 0
            m = most if m is None else m
            if m < most:
                raise ValueError(
                    f"a sample has {most} classes that are not 0, got m={m}: raise m, or "
                    f"leave it out"
                )
        indices = probabilities.detach().abs().topk(min(m, probabilities.shape[at]), at).indices
        return cls(indices, probabilities.gather(at, indices))

    def to_dense(self, classes: int, *, dim: int = 1, ignore_index: int = -100) -> Tensor:
        """Class probabilities, with so many classes in the class dimension.

        Example:
            >>> SparseTarget(torch.tensor([[2, -100]]), torch.tensor([[0.5, 0.1]])).to_dense(4)
            tensor([[0.0000, 0.0000, 0.5000, 0.0000]])
        """
        at = class_dimension(self.indices, dim)
        labels, weights = without_padding(self, ignore_index)
        shape = (*labels.shape[:at], classes, *labels.shape[at + 1 :])
        return weights.new_zeros(shape).scatter_add(at, labels, weights)


Target = Tensor | SparseTarget
"""Class indices, class probabilities, or those of a few classes."""


def check_sparse_target(logits: Tensor, target: SparseTarget, dim: int) -> None:
    """Require indices and weights of the logits' shape but for the number of classes."""
    indices, weights = target
    for name, tensor in target._asdict().items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} of a SparseTarget must be a tensor, got {type(tensor)}")
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise RuntimeError(f"indices of a SparseTarget must be integers, got {indices.dtype}")
    if not weights.is_floating_point():
        raise RuntimeError(f"weights of a SparseTarget must be floats, got {weights.dtype}")
    at = class_dimension(logits, dim)
    expected = list(logits.shape)
    if indices.dim() == logits.dim():
        expected[at] = indices.shape[at]
    if list(indices.shape) != expected or indices.shape != weights.shape:
        wanted = ", ".join("m" if i == at else str(size) for i, size in enumerate(logits.shape))
        raise RuntimeError(
            f"for logits of shape {tuple(logits.shape)} with classes in dimension {at}, indices "
            f"and weights of a SparseTarget must have shape ({wanted}), got "
            f"{tuple(indices.shape)} and {tuple(weights.shape)}"
        )


def target_rows(target: SparseTarget, dim: int) -> SparseTarget:
    """Indices and weights as (R, m), one row for each sample."""
    return SparseTarget(to_rows(target.indices, dim).long(), to_rows(target.weights, dim))


def some_rows(target: Target, rows: slice) -> Target:
    """The targets of some rows."""
    if isinstance(target, SparseTarget):
        return SparseTarget(target.indices[rows], target.weights[rows])
    return target[rows]


def labels_and_chances(
    target: SparseTarget, classes: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Labels that are classes, and their weights, (R, m) with m ≥ 1; padding has weight 0."""
    if not labels_in_range(target.indices, classes, ignore_index):
        target = without_padding(target, ignore_index)
    if target.indices.shape[1] == 0:
        return F.pad(target.indices, (0, 1)), F.pad(target.weights, (0, 1))
    return target


def without_padding(target: SparseTarget, ignore_index: int) -> SparseTarget:
    """Padding as class 0 of weight 0."""
    padding = target.indices == ignore_index
    return SparseTarget(
        target.indices.masked_fill(padding, 0), target.weights.masked_fill(padding, 0.0)
    )


def labels_within(labels: Tensor, start: int, count: int, nowhere: int = -1) -> Tensor:
    """Labels counted from ``start``, and ``nowhere`` for those outside of so many classes.

    Example:
        >>> labels_within(torch.tensor([4, 5, 9, -100]), 5, 3)
        tensor([-1,  0, -1, -1])
    """
    here = labels - start
    return here.masked_fill((here < 0) | (here >= count), nowhere)
