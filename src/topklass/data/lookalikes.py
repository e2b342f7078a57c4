"""Groups of characters that look most alike."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 5
ALIKE = 0.05
"""A distance at which characters still resemble each other."""


def lookalike_groups(ink: Tensor, where: Tensor) -> Tensor:
    """Divide classes into groups of about five that look most alike.

    Args:
        ink: see :func:`topklass.data.rendering.masks`.
        where: see :func:`topklass.data.rendering.masks`.

    Returns:
        The group of each class, int64 (C), numbered by first member; ⌈C / 5⌉ groups, whose sizes
        differ by at most one.
    """
    # All that look different are equally so: what keeps twins together is worth most. Whole
    # numbers have exact sums, so that all machines find the same groups.
    unlike = 1 - (-distances(ink, where) / ALIKE).exp()
    return grouped((1000 * unlike).round(), GROUP)


def distances(ink: Tensor, where: Tensor) -> Tensor:
    r"""How different classes look, (C, C), from 0 for the same to about 1.

    .. math:: d_{ij} = \frac{\sum_f \lVert m_{if} - m_{jf} \rVert^2}
                            {\sum_f \lVert m_{if} \rVert^2 + \lVert m_{jf} \rVert^2}

    over the faces f that have both, for blurred masks m; 1 for classes without a common face.
    """
    small = F.avg_pool2d(ink[:, None].float() / 255, 4)
    vectors = F.avg_pool2d(small, 3, 1, 1).flatten(1)
    classes = len(where)
    different, total = torch.zeros(2, classes, classes)
    for index in where.unbind(1):
        present = (index >= 0).float()
        rows = vectors[index] * present[:, None]
        norms = rows.square().sum(1)
        sums = (norms[:, None] + norms) * present[:, None] * present
        different += sums - 2 * rows @ rows.T
        total += sums
    result = torch.where(total > 0, different / total.clamp_min(1e-12), 1.0)
    return result.clamp_min(0).fill_diagonal_(0)


def grouped(distance: Tensor, size: int) -> Tensor:
    """Divide n items into ⌈n / size⌉ groups of nearly equal size with small distances inside.

    The tightest group first, of an item and the nearest that are left; then exchanges of two items
    as long as the sum of all distances within groups falls.

    Args:
        distance: (n, n), symmetric, 0 on the diagonal, whole numbers.
        size: largest size of a group.

    Returns:
        The group of each item, int64 (n), numbered by first member.
    """
    number = -(-len(distance) // size)
    group = _greedy(distance, number)
    while _exchange(distance, group, number):
        pass
    first = [int((group == index).nonzero()[0]) for index in range(number)]
    return torch.tensor(first).argsort().argsort()[group]


def _greedy(distance: Tensor, number: int) -> Tensor:
    """Form one group after the other, of the items left that are closest to one of them."""
    group = torch.full((len(distance),), -1)
    left = distance.clone()
    largest = -(-len(distance) // number)
    near = left.topk(largest, largest=False)
    for index in range(number):
        size = (len(distance) + number - 1 - index) // number
        best = near.values[:, :size].sum(1).argmin()
        members = near.indices[best, :size]
        group[members] = index
        left[members], left[:, members] = torch.inf, torch.inf
        stale = torch.isin(near.indices, members).any(1)
        values, indices = left[stale].topk(largest, largest=False)
        near.values[stale], near.indices[stale] = values, indices
    return group


def _exchange(distance: Tensor, group: Tensor, number: int) -> bool:
    """Exchange pairs of items of different groups, each group at most once; tell if any."""
    within = torch.zeros(len(group), number).index_add_(1, group, distance)
    to_other = within[:, group]
    own = to_other.diagonal()
    gain = own[:, None] + own - to_other - to_other.T + 2 * distance
    gain[group[:, None] == group] = 0
    best, partner = gain.max(1)
    moved = torch.zeros(number, dtype=torch.bool)
    for item in best.argsort(descending=True, stable=True).tolist():
        if best[item] <= 0:
            break
        pair = torch.tensor([item, int(partner[item])])
        if not moved[group[pair]].any():
            moved[group[pair]] = True
            group[pair] = group[pair.flip(0)]
    return bool(moved.any())
