"""Conformal sets: their definition by plain loops, coverage by simulation, caps."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from set_samples import covered, samples
from test_bad_input import raises
from topklass import ConformalSets, TopKSets

INF = math.inf

every_method = pytest.mark.parametrize("randomized", [False, True], ids=["plain", "randomized"])


# By plain loops


def scores_by_hand(row, u, penalty, k_reg, max_size):
    """E of every label of one row: what stands before it, a part of itself, and the penalty."""
    largest = max(row)
    weights = [math.exp(s - largest) for s in row]
    total, before, scores = math.fsum(weights), 0.0, {}
    for place, label in enumerate(sorted(range(len(row)), key=lambda i: (-row[i], i))):
        chance = weights[label] / total
        late = max(0, place + 1 - k_reg)
        scores[label] = before + u * chance + penalty * late if place < max_size else INF
        before += chance
    return scores


@pytest.mark.parametrize(
    ("alpha", "penalty", "k_reg", "max_size", "randomized", "ties"),
    [
        (0.05, 0.0, 5, None, False, False),
        (0.3, 0.0, 5, 6, True, True),
        (0.7, 0.0, 5, None, True, False),
        (0.3, 0.05, 2, None, False, True),
        (0.05, 0.05, 2, None, True, True),
        (0.7, 0.05, 2, 6, False, False),
        (0.05, 1.0, 1, 6, True, False),
        (0.3, 1.0, 1, None, True, False),
        (0.7, 1.0, 1, 6, False, True),
    ],
)
def test_conformal_by_hand(alpha, penalty, k_reg, max_size, randomized, ties):
    n = 60
    logits, target = samples(2 * n, spread=3.0)
    if ties:
        logits = logits.round()
    options = {"penalty": penalty, "k_reg": k_reg, "max_size": max_size}
    sets = ConformalSets(alpha, randomized=randomized, **options)
    sets.calibrate(logits[:n], target[:n], generator=torch.Generator().manual_seed(1))
    members = sets(logits[n:], generator=torch.Generator().manual_seed(2))

    def by_hand(rows: Tensor, seed: int) -> list[dict[int, float]]:
        drawn = torch.zeros(n)
        if randomized:
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.rand(n, generator=generator, dtype=torch.float64)
        pairs = zip(rows.tolist(), drawn.tolist(), strict=True)
        return [scores_by_hand(row, u, penalty, k_reg, max_size or INF) for row, u in pairs]

    known = by_hand(logits[:n], seed=1)
    ordered = sorted(scores[y] for scores, y in zip(known, target[:n].tolist(), strict=True))
    threshold = ordered[math.ceil((n + 1) * (1 - Fraction(str(alpha)))) - 1]
    assert sets.threshold == pytest.approx(threshold, abs=1e-12)
    for scores, found in zip(by_hand(logits[n:], seed=2), members.tolist(), strict=True):
        assert [scores[y] <= threshold + 1e-12 for y in range(8)] == found


def test_ties_in_the_order_of_indices():
    """Nine of ten samples, the new one included, have no more than 29 labels before theirs."""
    logits = torch.zeros(9, 100)
    target = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 29])
    members = ConformalSets(0.1).calibrate(logits, target)(logits[:1])
    assert members.nonzero()[:, 1].tolist() == list(range(30))


@pytest.mark.parametrize(
    ("randomized", "penalty", "k_reg"), [(False, 0.05, 2), (True, 0.0, 5), (True, 1.0, 1)]
)
def test_sets_are_first_labels_and_grow_as_alpha_falls(randomized, penalty, k_reg):
    (known, target), (new, _) = samples(300), samples(100)
    smaller = torch.zeros(100, 8, dtype=torch.bool)
    for alpha in (0.9, 0.5, 0.2, 0.1, 0.01, 0.004):
        sets = ConformalSets(alpha, penalty=penalty, k_reg=k_reg, randomized=randomized)
        sets.calibrate(known, target, generator=torch.Generator().manual_seed(1))
        members = sets(new, generator=torch.Generator().manual_seed(2))
        in_order = members.gather(-1, new.argsort(-1, descending=True)).int()
        assert (in_order.diff(dim=-1) <= 0).all()
        assert (members | ~smaller).all()
        smaller = members


def test_empty_sets():
    """Plain sets always have the first label; randomised ones cover no more than they must."""
    logits, target = samples(2000, spread=8.0)
    assert covered(TopKSets(1)(logits), target).mean() > 0.75
    plain = ConformalSets(0.4).calibrate(logits, target)(logits)
    assert torch.equal(plain, TopKSets(1)(logits))
    randomized = ConformalSets(0.4, randomized=True).calibrate(logits, target)(logits)
    assert (randomized.sum(-1) == 0).any()
    assert covered(randomized, target).mean().item() == pytest.approx(0.6, abs=0.05)


# Coverage


def wrong_model(logits: Tensor) -> Tensor:
    """Overconfident, and partial to some classes."""
    return 3 * logits + torch.linspace(-2, 2, logits.shape[-1], dtype=logits.dtype)


def mean_coverage(sets: ConformalSets, n: int, trials: int, model=None) -> tuple[float, float]:
    """Of one new sample after each of many calibrations: the mean, and its standard error."""
    logits, target = samples(trials * (n + 1))
    logits = model(logits) if model else logits
    logits, target = logits.reshape(trials, n + 1, -1), target.reshape(trials, n + 1)
    hits = torch.stack(
        [
            covered(sets.calibrate(x[:n], y[:n])(x[n:]), y[n:]).squeeze()
            for x, y in zip(logits, target, strict=True)
        ]
    )
    return hits.mean().item(), hits.std().item() / trials**0.5


@pytest.mark.parametrize(
    ("alpha", "n", "options", "model"),
    [
        (0.1, 25, {}, None),
        (0.2, 9, {"randomized": True}, wrong_model),
        (0.1, 25, {"penalty": 0.1, "k_reg": 1, "randomized": True}, wrong_model),
        (0.2, 9, {"penalty": 0.1, "k_reg": 1}, None),
    ],
    ids=["APS", "randomized APS", "randomized RAPS", "RAPS"],
)
def test_coverage(alpha, n, options, model):
    """Without ties it is ⌈(n + 1)(1 − α)⌉/(n + 1), for any model; top-1 accuracy is lower."""
    sets = ConformalSets(alpha, **options)
    mean, error = mean_coverage(sets, n, 800, model)
    exact = math.ceil((n + 1) * (1 - Fraction(str(alpha)))) / (n + 1)
    assert 1 - alpha <= exact <= 1 - alpha + 1 / (n + 1)
    assert abs(mean - exact) <= 4 * error


@pytest.mark.parametrize("model", [None, wrong_model], ids=["true", "wrong"])
def test_coverage_of_capped_sets(model):
    sets = ConformalSets(0.4, max_size=5)
    mean, error = mean_coverage(sets, 99, 400, model)
    assert abs(mean - 0.6) <= 4 * error


def test_coverage_with_ties():
    """Scores of few values: plain sets cover at least as much, randomised ones exactly."""
    row = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    n, trials = 19, 600
    for randomized in (False, True):
        hits = []
        for _ in range(trials):
            target = row.exp().multinomial(n + 1, replacement=True).squeeze(0)
            sets = ConformalSets(0.35, randomized=randomized)
            sets.calibrate(row.expand(n, 3), target[:n])
            hits.append(covered(sets(row), target[n:]).item())
        mean, error = sum(hits) / trials, (0.25 / trials) ** 0.5
        assert mean > 0.65 - 4 * error
        assert (abs(mean - 0.65) <= 4 * error) == randomized


# Caps


def test_cap_that_does_not_bind_changes_nothing():
    logits, target = samples(400, spread=5.0)
    free = ConformalSets(0.3).calibrate(logits, target)
    largest = int(free(logits).sum(-1).max())
    capped = ConformalSets(0.3, max_size=largest).calibrate(logits, target)
    assert torch.equal(free(logits), capped(logits))


def test_cap_that_is_too_small():
    """19 of 20 samples are needed; of the calibration labels 18 are among the first two."""
    logits = torch.tensor([[2.0, 1.0, 0.0]]).expand(19, 3)
    target = torch.tensor([0] * 10 + [1] * 8 + [2])
    sets = ConformalSets(0.05, max_size=2)
    with raises(ValueError, "alpha=0.05", "max_size=2", "19 of 19", "only 18", "raise max_size"):
        sets.calibrate(logits, target)
    with raises(RuntimeError, "calibrate"):
        sets(logits)
    assert ConformalSets(0.1, max_size=2).calibrate(logits, target)(logits).sum(-1).max() == 2


@pytest.mark.parametrize(
    ("alpha", "needed"), [(0.05, 19), (0.1, 9), (0.3, 3), (0.29, 3), (0.5, 1), (0.01, 99)]
)
def test_samples_that_a_coverage_needs(alpha, needed):
    logits, target = samples(needed)
    ConformalSets(alpha).calibrate(logits, target)
    expected = f"alpha={alpha}", f"at least {needed} samples", f"got {needed - 1}"
    with raises(ValueError, *expected):
        ConformalSets(alpha).calibrate(logits[1:], target[1:])


@pytest.mark.parametrize(("alpha", "n", "place"), [(0.29, 99, 71), (0.1, 99, 90), (0.7, 9, 3)])
def test_quantile_is_not_rounded(alpha, n, place):
    """Floating point makes 28.999999999999996 of 0.29 · 100."""
    ranks = torch.arange(n).flip(0)
    logits = torch.full((n, n), -1e-3, dtype=torch.float64).cumsum(-1)
    sets = ConformalSets(alpha).calibrate(logits, ranks)
    assert sets(logits[:1]).sum().item() == place
