"""From scores of calibration labels to thresholds: of all samples, of each class, of clusters."""

from __future__ import annotations

from math import ceil, inf

import torch
from torch import Tensor

LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Quantiles of its scores that describe a class (Ding et al. 2023)."""
STARTS, STEPS = 10, 300
"""Of k-means."""


def samples_needed(alpha: float) -> int:
    """The least number of samples whose threshold is finite, ⌈1/α⌉ − 1."""
    return ceil(1 / alpha - 1e-9) - 1


def places(counts: Tensor, alpha: float) -> Tensor:
    """⌈(n + 1)(1 − α)⌉ for each number of samples n; 1e-9 keeps what is whole from being rounded.

    Example:
        >>> places(torch.tensor([8, 9, 99]), alpha=0.1)
        tensor([ 9,  9, 90])
    """
    return counts + 1 - ((counts + 1).double() * alpha + 1e-9).floor().long()


def group_thresholds(scores: Tensor, groups: Tensor, number: int, alpha: float) -> Tensor:
    """The ⌈(n + 1)(1 − α)⌉-th smallest score of each group; ∞ if it has too few.

    Args:
        scores: of the labels, (N).
        groups: of the samples, (N); −1 for none.
        number: of groups.
        alpha: as in :class:`topklass.ConformalSets`.

    Returns:
        (number).

    Example:
        >>> group_thresholds(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0, 0, 1]), 2, alpha=0.4)
        tensor([3., inf])
    """
    known = groups >= 0
    scores, groups = scores[known], groups[known]
    order = scores.argsort()
    order = order[groups[order].argsort(stable=True)]
    counts = torch.bincount(groups, minlength=number)
    place = places(counts, alpha)
    last = (counts.cumsum(0) - counts + place - 1).clamp(max=max(len(scores) - 1, 0))
    found = scores[order][last] if len(scores) else scores.new_full((number,), inf)
    return found.masked_fill(place > counts, inf)


def clustered_thresholds(
    scores: Tensor,
    labels: Tensor,
    classes: int,
    alpha: float,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One threshold for classes whose scores are alike (Ding et al. 2023).

    A random part of the samples makes the clusters, the others their thresholds. A class with fewer
    than ⌈1/α⌉ − 1 samples in the first part has no cluster, and the threshold of all samples.

    Args:
        scores: of the labels, (N).
        labels: (N).
        classes: C.
        alpha: as in :class:`topklass.ConformalSets`.
        generator: source of the random part, and of k-means.

    Returns:
        (C); that of all samples everywhere if there are too few for two clusters.
    """
    number, share = clusters_and_share(torch.bincount(labels, minlength=classes), alpha)
    if number > 1:
        drawn = torch.rand(len(labels), generator=generator, device=_device(generator))
        first = drawn.to(labels.device) < share
        clusters = cluster_classes(scores[first], labels[first], classes, alpha, number, generator)
        return thresholds_of_clusters(scores[~first], labels[~first], clusters, alpha)
    return thresholds_of_clusters(scores, labels, labels.new_full((classes,), -1), alpha)


def clusters_and_share(counts: Tensor, alpha: float) -> tuple[int, float]:
    """How many clusters, and the share of samples to make them with, by the paper's heuristic.

    Example:
        >>> clusters_and_share(torch.tensor([40] * 25), alpha=0.1)
        (5, 0.25)
    """
    fewest = max(int(counts.min()), samples_needed(alpha))
    common = int((counts >= fewest).sum())
    used = int(fewest * common / (75 + common))
    return used // 2, used / fewest


def cluster_classes(
    scores: Tensor,
    labels: Tensor,
    classes: int,
    alpha: float,
    number: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The cluster of each class, (C), or −1: k-means of the quantiles of their scores."""
    counts = torch.bincount(labels, minlength=classes)
    common = (counts >= samples_needed(alpha)).nonzero().squeeze(1)
    clusters = labels.new_full((classes,), -1)
    if len(common) <= number:
        return clusters
    finite = scores.clamp(max=scores[scores < inf].amax())
    levels = finite.new_tensor(LEVELS)
    of_class = torch.split(finite[labels.argsort(stable=True)], counts.tolist())
    points = torch.stack([of_class[each].quantile(levels) for each in common.tolist()])
    clusters[common] = k_means(points, counts[common].to(points).sqrt(), number, generator)
    return clusters


def thresholds_of_clusters(
    scores: Tensor, labels: Tensor, clusters: Tensor, alpha: float
) -> Tensor:
    """The threshold of each class, (C): of its cluster, or of all samples if it has none."""
    everything = group_thresholds(scores, torch.zeros_like(labels), 1, alpha)
    number = int(clusters.max()) + 1
    of_clusters = group_thresholds(scores, clusters[labels], number, alpha)
    return torch.cat([of_clusters, everything])[clusters]


def k_means(
    points: Tensor, weights: Tensor, number: int, generator: torch.Generator | None = None
) -> Tensor:
    """The cluster of each weighted point, (N): the best of ten starts of k-means++.

    Example:
        >>> points = torch.tensor([[0.0], [0.1], [5.0], [5.1]])
        >>> found = k_means(points, torch.ones(4), 2)
        >>> (found == found[0]).tolist()
        [True, True, False, False]
    """
    best, least = torch.zeros(len(points), dtype=torch.long, device=points.device), inf
    for _ in range(STARTS):
        centres = _spread_centres(points, weights, number, generator)
        for _ in range(STEPS):
            nearest = _distances(points, centres).argmin(1)
            mass = weights.new_zeros(number).index_add(0, nearest, weights)
            sums = torch.zeros_like(centres).index_add(0, nearest, weights[:, None] * points)
            moved = torch.where(mass[:, None] > 0, sums / mass[:, None], centres)
            if torch.equal(moved, centres):
                break
            centres = moved
        distance = float((weights * _distances(points, centres).amin(1) ** 2).sum())
        if distance < least:
            best, least = nearest, distance
    return best


def _spread_centres(
    points: Tensor, weights: Tensor, number: int, generator: torch.Generator | None
) -> Tensor:
    """Random points, each drawn by its squared distance to those before it."""
    chances = weights
    chosen: list[Tensor] = []
    for _ in range(number):
        drawn = chances.to(_device(generator)).multinomial(1, generator=generator)
        chosen.append(points[drawn.to(points.device)])
        distances = _distances(points, torch.cat(chosen)).amin(1)
        chances = weights * distances**2
        chances = chances if chances.any() else weights  # fewer points differ than clusters
    return torch.cat(chosen)


def _distances(points: Tensor, centres: Tensor) -> Tensor:
    return torch.cdist(points, centres, compute_mode="donot_use_mm_for_euclid_dist")


def _device(generator: torch.Generator | None) -> torch.device:
    """Where random numbers are drawn: with the generator, or on the CPU."""
    return torch.device("cpu") if generator is None else generator.device
