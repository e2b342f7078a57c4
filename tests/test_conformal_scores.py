"""Scores of conformal sets: how badly a label fits."""

import math

import pytest
import torch
from torch import Tensor

from set_samples import covered, samples
from test_conformal_classes import COUNTS, KINDS
from topklass import AverageKSets, ConformalSets
from topklass.sets.scores import label_scores, largest_score

INF = math.inf


def by_hand(row: list[float], score: str, u: float, penalty: float, max_size: float) -> list[float]:
    """E of every label of a row, by its definition."""
    largest = max(row)
    weights = [math.exp(s - largest) for s in row]
    chances = [w / math.fsum(weights) for w in weights]
    seen = [max(n, 5) for n in COUNTS]
    if score == "pas":
        chances = [p / (n / sum(seen)) for p, n in zip(chances, seen, strict=True)]
    order = sorted(range(len(row)), key=lambda i: (-chances[i], i))
    found = [0.0] * len(row)
    for r, label in enumerate(order, 1):
        found[label] = -chances[label]
        if score == "saps":
            first = chances[order[0]]
            found[label] = u * first if r == 1 else first + (r - 2 + u) * penalty
        if r > max_size or row[label] == -INF:
            found[label] = INF
    return found


@pytest.mark.parametrize("kind", ["lac", "saps", "randomized saps", "pas"])
@pytest.mark.parametrize("max_size", [None, 3])
def test_scores_by_hand(kind, max_size):
    logits, _ = samples(50)
    logits[::2] = logits[::2].round()
    logits[::5, 2] = -INF
    sets = ConformalSets(0.2, **KINDS[kind], max_size=max_size)
    drawn = torch.zeros(50)
    if sets.randomized:
        drawn = torch.rand(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = sets._scores(logits, torch.Generator().manual_seed(1))
    rows = [
        by_hand(row, sets.score, u, sets.penalty, max_size or INF)
        for row, u in zip(logits.tolist(), drawn.tolist(), strict=True)
    ]
    torch.testing.assert_close(found, torch.tensor(rows, dtype=torch.float64))


def test_lac_is_a_threshold_on_the_probability():
    """The same sets as those of so many labels on average."""
    logits, target = samples(400)
    sets = ConformalSets(0.2, score="lac").calibrate(logits, target)
    members = sets(logits)
    assert torch.equal(members, logits.softmax(1) >= -sets.threshold)
    average = members.sum().item() / len(target)
    assert torch.equal(AverageKSets(average).calibrate(logits)(logits), members)


def test_lac_of_unlikely_labels():
    """1 − p is 1 for all of them; −p still has their order."""
    logits = torch.tensor([[0.0, -50.0, -60.0, -70.0]]).expand(9, 4).double()
    target = torch.tensor([0, 0, 0, 0, 0, 0, 0, 0, 2])
    members = ConformalSets(0.1, score="lac").calibrate(logits, target)(logits[0])
    assert members.tolist() == [True, True, True, False]


def test_pas_of_equal_classes_is_lac():
    logits, target = samples(400)
    lac = ConformalSets(0.2, score="lac").calibrate(logits, target)
    pas = ConformalSets(0.2, score="pas", counts=[7] * 8).calibrate(logits, target)
    assert pas.threshold == pytest.approx(8 * lac.threshold)
    assert torch.equal(pas(logits), lac(logits))


def test_pas_covers_classes_better():
    """With true probabilities no sets of that size have more macro coverage (Ding et al. 2025)."""
    torch.manual_seed(0)
    frequency = 0.7 ** torch.arange(8, dtype=torch.float64)
    likelihood, label = 2 * torch.randn(40_000, 8).double(), None
    label = frequency.multinomial(40_000, replacement=True)
    likelihood.scatter_add_(1, label[:, None], torch.full((40_000, 1), 4.0).double())
    logits = likelihood + frequency.log()  # Gaussian with deviation 2, mean 4 for the label
    pas = ConformalSets(0.1, score="pas", counts=frequency).calibrate(logits, label)
    size = pas(logits).sum(1).double().mean().item()
    lac = AverageKSets(size).calibrate(logits)

    def macro(members: Tensor) -> float:
        hits = covered(members, label)
        return torch.stack([hits[label == c].mean() for c in range(8)]).mean().item()

    assert macro(pas(logits)) > macro(lac(logits)) + 0.02
    assert covered(lac(logits), label).mean() > covered(pas(logits), label).mean() + 0.02


@pytest.mark.parametrize("kind", ["saps", "randomized saps", "lac"])
def test_largest_score(kind):
    options = {"score": "lac", "penalty": 0.0, **KINDS[kind]}
    logits = torch.tensor([[50.0] + [0.0] * 7, [0.0] * 8]).double()
    uniform = torch.full((2, 1), 0.999).double() if "randomized" in kind else None
    largest = largest_score(options["score"], 8, options["penalty"], 5)
    found = label_scores(logits, options["score"], penalty=options["penalty"], uniform=uniform)
    assert largest - 0.2 < found.max() <= largest
