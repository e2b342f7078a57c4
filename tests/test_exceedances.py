"""Sampled noise from exceedances of a threshold has the law of noise for all classes."""

from math import inf, nan, sqrt

import pytest
import torch
from torch import Tensor

from topklass import expected_topk, noised_topk
from topklass.functional import noised_topk_loss
from topklass.reference import exceedances, noised
from topklass.reference.exceedances import (
    OFTEN,
    Noise,
    _bound,
    enough,
    kth_noised,
    thresholds,
    upper_quantile,
)

ROWS, SAMPLES, N = 4_000, 10, 90
SIZE = ROWS * SAMPLES


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def cases() -> dict[str, tuple[Tensor, int, float]]:
    """Scores, k, ε: alike, spread, apart, some absent, with one far above the others."""
    normal = torch.randn(N, generator=seeded(1))
    absent = normal.clone()
    absent[5:] = -inf
    return {
        "alike": (torch.zeros(N), 6, 0.3),
        "many": (torch.zeros(600), 3, 0.3),
        "spread": (torch.linspace(-2, 2, N), 4, 1.0),
        "apart": (-torch.arange(float(N)), 3, 1.5),
        "gap": (normal + 40 * (torch.arange(N) < 2), 5, 0.7),
        "absent": (absent, 4, 0.7),
        "double": (normal.double(), 1, 0.5),
        "long": (normal, 30, 2.0),
    }


def assert_law(row: Tensor, k: int, epsilon: float, seed: int = 0) -> None:
    """Classes have their chances, values their distribution, alone and given the class.

    Chances are the gradient of the expectation. With fixed seeds: 4 standard errors.
    """
    rows = row.expand(ROWS, -1)
    places, shifts = kth_noised(rows, Noise(k, epsilon, SAMPLES, seeded(seed)))
    values = rows.gather(1, places) + shifts
    leaf = row.double().requires_grad_()
    mean = expected_topk(leaf, k, epsilon)
    (chances,) = torch.autograd.grad(mean, leaf)
    error = values.std() / sqrt(SIZE)
    assert abs(values.mean() - mean) < 4 * error
    expected = SIZE * chances
    likely = expected > 5
    counts = torch.bincount(places.flatten(), minlength=len(row))
    deviation = ((counts - expected).square() / expected)[likely].sum()
    freedom = int(likely.sum()) - 1
    assert abs(deviation - freedom) < 4 * sqrt(2 * freedom) + 4
    assert counts[~likely].sum() <= 2 * expected[~likely].sum() + 10
    assert abs(values.mean(1).var() / values.var() * SAMPLES - 1) < 4 * sqrt(2 / ROWS)

    noise = Noise(k, epsilon, SAMPLES, seeded(seed + 1))
    other_places, other_shifts = noised._one_after_another(rows, noise)
    others = rows.gather(1, other_places) + other_shifts
    grid = others.flatten().quantile(torch.linspace(0.1, 0.9, 9, dtype=row.dtype))
    below = (values.flatten() <= grid[:, None]).double().mean(1)
    expected_below = torch.linspace(0.1, 0.9, 9, dtype=torch.float64)
    assert (below - expected_below).abs().max() < 4 * sqrt(0.5 / SIZE)
    frequent = int(counts.argmax())
    ours, theirs = shifts[places == frequent], other_shifts[other_places == frequent]
    spread = (ours.var() / len(ours) + theirs.var() / len(theirs)).sqrt()
    assert abs(ours.mean() - theirs.mean()) < 4 * spread


@pytest.mark.parametrize("case", cases().values(), ids=cases().keys())
def test_law(case):
    assert_law(*case)


@pytest.mark.parametrize("count", [4, 80])
def test_law_for_every_threshold(monkeypatch, count):
    """Where about half of the samples need noise for all classes, and where none does."""
    monkeypatch.setattr(exceedances, "enough", lambda k: count)
    assert_law(*cases()["spread"])


def test_law_where_digits_do_not_tell(monkeypatch):
    """Pairs whose k-th largest is not known from the digits that are sorted."""
    monkeypatch.setattr(exceedances, "by_pair_and_height", lambda hits, pairs: hits.pair.int())
    assert_law(*cases()["spread"])


def test_threshold_that_nothing_exceeds(monkeypatch):
    """Classes without noise above it are not mistaken for some that have it; row by row."""
    monkeypatch.setattr(exceedances, "thresholds", lambda rows, k: torch.full((len(rows), 1), 40.0))
    monkeypatch.setattr(exceedances, "BLOCK", 1)
    rows = torch.zeros(30, 50)
    rows[:, 0] = -100
    places, shifts = kth_noised(rows, Noise(1, 1.0, 2, seeded(0)))
    assert (places > 0).all()
    assert (shifts > 1).all()
    assert (shifts < 5).all()


def test_thresholds():
    """About as many noised scores exceed it as should, also where groups of classes stand."""
    for row, k, epsilon in (*cases().values(), (torch.randn(5_000), 6, 0.2)):
        if enough(k) < row.isfinite().sum():
            limit = thresholds(row[None] / epsilon, k)[0] * epsilon
            count = torch.special.ndtr((row - limit) / epsilon).sum()
            assert enough(k) / 2.5 < count < 1.5 * enough(k)
    rows = torch.tensor([[-inf], [nan], [inf]]).expand(3, N)
    assert (thresholds(rows, 3) == inf).all()


@pytest.mark.parametrize("samples", [1, 2, 10, 100, 10_000])
def test_bound(samples):
    """No class that exceeds the threshold in some sample is left out by its byte."""
    shift, factor = _bound(samples)
    height = torch.linspace(-12, 4, 20_001, dtype=torch.float64)
    chance = -torch.expm1(samples * torch.log1p(-torch.special.ndtr(height)))
    bytes_taken = (height + shift).mul(factor).clamp(0, 255.9**0.25).pow(4).floor() + 1
    assert (256 * chance <= bytes_taken).all()
    assert (bytes_taken[height >= OFTEN] == 256).all()


def test_upper_quantile():
    z = torch.linspace(-OFTEN, 11, 2_001, dtype=torch.float64)
    tail = torch.special.erfc(z * sqrt(0.5)) / 2
    torch.testing.assert_close(upper_quantile(tail), z, rtol=0, atol=1e-7)
    assert upper_quantile(torch.zeros(1)).isfinite().all()


def test_rows_with_few_classes():
    """As many classes as k, fewer, none, NaN, and +inf."""
    rows = torch.full((6, 400), -inf)
    rows[0, :3] = torch.tensor([1.0, 2.0, 3.0])
    rows[1, 7:9] = 1.0
    rows[3] = torch.randn(400)
    rows[3, 399] = nan
    rows[4] = torch.randn(400)
    rows[4, 5] = inf
    rows[5] = torch.randn(400)
    leaf = rows.requires_grad_()
    value = noised_topk(leaf, 3, samples=50)
    (gradient,) = torch.autograd.grad(value[[0, 3, 4, 5]].sum(), leaf)
    assert value[[0, 4, 5]].isfinite().all()
    assert (value[[1, 2]] == -inf).all()
    assert value[3].isnan()
    assert gradient[3].isnan().all()
    torch.testing.assert_close(gradient[[0, 4, 5]].sum(1), torch.ones(3))
    assert gradient[0, 3:].eq(0).all()


def test_rows_of_any_strides():
    """Also those of a matrix that was transposed, which PyTorch keeps so."""
    columns = torch.randn(800, 20)
    for scores in (columns.T, columns.T.expand(20, 800), torch.randn(20, 1600)[:, ::2]):
        results = [
            noised_topk(each, 4, samples=50, generator=seeded(1))
            for each in (scores, scores.clone(memory_format=torch.contiguous_format))
        ]
        torch.testing.assert_close(*results)


def test_default_device():
    scores = torch.randn(20, 800)
    expected = noised_topk(scores, 4, generator=seeded(1))
    with torch.device("meta"):
        found = noised_topk(scores, 4, generator=seeded(1))
    assert torch.equal(found, expected)


def test_infinite_scores():
    rows = torch.randn(20, 800)
    rows[:, :100] = inf
    assert (noised_topk(rows, 4) == inf).all()


def test_noise_that_is_small_beside_the_scores():
    """Not even seen in their digits; it chooses among equal scores all the same."""
    rows = torch.full((100, 800), 100.0, requires_grad=True)
    value = noised_topk(rows, 4, 1e-7, samples=50)
    assert (value == 100).all()
    (chosen,) = torch.autograd.grad(value.sum(), rows)
    assert (chosen.sum(0) > 0).float().mean() > 0.99


def test_large_rows_take_it_and_follow_the_generator():
    scores, target = torch.randn(20, 800), torch.arange(20)
    first, again, other = (
        noised_topk_loss(scores, target, generator=seeded(s), reduction="none") for s in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(3)
    places, shifts = kth_noised(scores, Noise(4, 0.5, 10, None))
    torch.manual_seed(3)
    expected = (scores.gather(1, places) + shifts).mean(1)
    torch.testing.assert_close(noised_topk(scores, 4, 0.5), expected)
    blocks = kth_noised(torch.zeros(500, 1_200), Noise(4, 0.5, 3, None))
    assert [part.shape for part in blocks] == [(500, 3)] * 2
