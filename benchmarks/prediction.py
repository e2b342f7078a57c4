"""Lists and sets of labels from saved logits: how many crops are averaged, how labels are chosen.

A file holds what ``torch.save`` makes of ``{"name": str, "logits": (crops, N, C), "target": (N)}``.
Accuracies are of all samples. Sets are calibrated on one random half and measured on the other, and
that is averaged over several splits.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.environment import describe, write
from benchmarks.rows import Row, say
from topklass import AverageKSets, ConformalSets, TopKSets, predict_topk

KS = (1, 3, 5, 10)
K = 5
COVERAGES = (0.9, 0.95)
PENALTY, K_REG = 0.01, 5
SPLITS = 10
ROWS = 4096
"""So many samples at once."""

BASE = "softmax averaged"
METHODS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "one crop": lambda logits, k: predict_topk(logits[0], k).labels,
    "logits averaged": lambda logits, k: predict_topk(logits.mean(0), k).labels,
    BASE: lambda logits, k: predict_topk(logits, k, crop_dim=0, method="softmax").labels,
    "marginals averaged": lambda logits, k: predict_topk(logits, k, crop_dim=0).labels,
    "marginals averaged, T = k": lambda logits, k: (
        predict_topk(logits, k, crop_dim=0, temperature=k).labels
    ),
}
"""The k labels, (N, k), of logits (crops, N, C)."""

Sets = TopKSets | AverageKSets | ConformalSets


def main(files: Sequence[str], quick: bool) -> None:
    accuracies: list[Row] = []
    sets: list[Row] = []
    for file in files:
        saved = torch.load(file, weights_only=True)
        name, logits, target = checked(saved, file)
        found = accuracy(logits, target)
        chosen = compare_sets(logits, target, splits=1 if quick else SPLITS)
        for rows, new in ((accuracies, found), (sets, chosen)):
            for row in new:
                rows.append({"name": name, "crops": len(logits)} | row)
                say(rows[-1])
    record = {
        "what": "top-k accuracy of averages over crops, paired difference to the averaged softmax "
        f"at k = {K}; sets from the averaged softmax, calibrated on one half, measured on the "
        f"other, mean of {SPLITS} splits; RAPS: penalty {PENALTY}, k_reg {K_REG}",
        **describe(torch.device("cpu")),
        "accuracy": accuracies,
        "sets": sets,
    }
    write("prediction", record, quick)


def checked(saved: Any, file: str) -> tuple[str, Tensor, Tensor]:
    """Name, logits in float32 and target of a file; an error says what it should hold."""
    wanted = "{'name': str, 'logits': (crops, N, C), 'target': (N)}"
    if not isinstance(saved, dict) or not {"name", "logits", "target"} <= saved.keys():
        raise ValueError(f"{file} must hold {wanted}")
    logits, target = saved["logits"], saved["target"]
    if logits.dim() != 3 or target.shape != logits.shape[1:2]:
        shapes = f"{tuple(logits.shape)} and {tuple(target.shape)}"
        raise ValueError(f"{file} must hold {wanted}, got logits and target of shape {shapes}")
    return str(saved["name"]), logits.float(), target.long()


# Lists


def accuracy(logits: Tensor, target: Tensor) -> list[Row]:
    """Top-k accuracies of every method, and at k = K its paired difference to the base."""
    _, samples, classes = logits.shape
    found: dict[str, dict[int, Tensor]] = {
        name: {k: hits(method, logits, target, k) for k in KS if k < classes}
        for name, method in METHODS.items()
    }
    rows = []
    for name, by_k in found.items():
        row: Row = {"samples": samples, "classes": classes, "method": name}
        row |= {f"top_{k}": round(hit.mean().item(), 5) for k, hit in by_k.items()}
        if K in by_k and name != BASE:
            row |= paired(by_k[K], found[BASE][K])
        rows.append(row)
    return rows


def hits(method: Callable[[Tensor, int], Tensor], logits: Tensor, target: Tensor, k: int) -> Tensor:
    """1 for each sample whose label is on the list, (N) in float64."""
    parts = [
        (method(some, k) == labels.unsqueeze(1)).any(1)
        for some, labels in zip(logits.split(ROWS, 1), target.split(ROWS), strict=True)
    ]
    return torch.cat(parts).double()


def paired(hit: Tensor, base: Tensor) -> Row:
    """Difference of two accuracies on the same samples, and its standard error (McNemar)."""
    gained = int((hit > base).sum())
    lost = int((hit < base).sum())
    n = len(hit)
    difference = (gained - lost) / n
    variance = (gained + lost) / n - difference**2
    return {
        "gained": gained,
        "lost": lost,
        "difference": round(difference, 6),
        "standard_error": round(math.sqrt(variance / n), 6),
    }


# Sets


def compare_sets(logits: Tensor, target: Tensor, splits: int) -> list[Row]:
    """Size and coverage on new samples, of sets with the same size, or the same coverage."""
    chances = torch.cat([some.softmax(-1).mean(0).log() for some in logits.split(ROWS, 1)])
    measured: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for split in range(splits):
        order = torch.randperm(len(target), generator=torch.Generator().manual_seed(split))
        known, new = order.chunk(2)
        for goal, name, sets in candidates(chances[known], target[known]):
            measured.setdefault((goal, name), []).append(measure(sets, chances[new], target[new]))
    rows = []
    for (goal, name), values in measured.items():
        coverage, size, empty = (sum(column) / splits for column in zip(*values, strict=True))
        rows.append(
            {
                "goal": goal,
                "sets": name,
                "coverage": round(coverage, 5),
                "size": round(size, 4),
                "empty": round(empty, 5),
            }
        )
    return rows


def candidates(logits: Tensor, target: Tensor) -> list[tuple[str, str, Sets]]:
    """Goal, name and calibrated sets: those of size K on average, and those of each coverage."""
    conformal: dict[str, Callable[[float], ConformalSets]] = {
        "APS": lambda alpha: ConformalSets(alpha),
        "RAPS": lambda alpha: ConformalSets(alpha, penalty=PENALTY, k_reg=K_REG),
    }
    found: list[tuple[str, str, Sets]] = []
    if logits.shape[1] > K:
        goal = f"{K} labels on average"
        found += [(goal, "top-k", TopKSets(K)), (goal, "average-k", AverageKSets(K))]
        for name, make in conformal.items():
            found.append((goal, name, make(alpha_of_size(make, logits, target, K))))
    for coverage in COVERAGES:
        goal = f"coverage {coverage:g}"
        k, average = k_of_coverage(logits, target, coverage)
        found += [(goal, "top-k", TopKSets(k)), (goal, "average-k", AverageKSets(average))]
        found += [(goal, name, make(1 - coverage)) for name, make in conformal.items()]
    return [(goal, name, sets.calibrate(logits, target)) for goal, name, sets in found]


def alpha_of_size(
    make: Callable[[float], ConformalSets], logits: Tensor, target: Tensor, size: float
) -> float:
    """The alpha that gives sets of this average size on these samples, by bisection."""
    low, high = 1 / len(target), 1 - 1 / len(target)
    for _ in range(12):
        middle = (low + high) / 2
        _, found, _ = measure(make(middle).calibrate(logits, target), logits, target)
        low, high = (middle, high) if found > size else (low, middle)
    return high


def k_of_coverage(logits: Tensor, target: Tensor, coverage: float) -> tuple[int, float]:
    """How many labels it takes to cover so many of these: a fixed number, and on average."""
    chances = logits.double().log_softmax(-1)
    of_label = chances.gather(1, target.unsqueeze(1))
    last = math.ceil(coverage * len(target)) - 1
    rank = (chances > of_label).sum(1) + 1
    threshold = of_label.flatten().sort(descending=True).values[last]
    average = (chances >= threshold).sum().item() / len(target)
    return int(rank.sort().values[last]), average


def measure(sets: Sets, logits: Tensor, target: Tensor) -> tuple[float, float, float]:
    """Coverage, average size and share of empty sets."""
    members = torch.cat([sets(some) for some in logits.split(ROWS)])
    sizes = members.sum(1)
    covered = members.gather(1, target.unsqueeze(1))
    return (
        covered.double().mean().item(),
        sizes.double().mean().item(),
        (sizes == 0).double().mean().item(),
    )
