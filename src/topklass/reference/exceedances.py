r"""The k-th largest score under sampled noise, from the few noised scores above a threshold.

**Idea.** The k-th largest of ``s + εZ`` depends on the classes that exceed a threshold t alone, if
at least k do. Class i does so with probability ``p_i = Φ((s_i − t) / ε)``, in each sample anew. The
time until it does, in samples, is exponential: ``log(1 − U) / log(1 − p_i)``, rounded down. So most
classes need a single random number for all samples, of which eight bits mostly tell that it will
not happen. Noise that exceeds is ``−Φ⁻¹(V p_i)``. With t such that some more than k classes exceed
it, few do. Classes that exceed it often get normal noise in all samples instead.

**Exactness.** This is the law of the noise for every t that does not depend on it. In a sample in
which fewer than k classes exceed t, the others get their noise, normal below ``(t − s_i) / ε``.
So they do where the digits by which noised scores are sorted do not tell which is the k-th.
"""

from functools import lru_cache
from math import ceil, expm1, inf, log1p, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 2**18
"""Scores that are worked on together, and about as many exceedances at most."""
BITS_OF_ONE = 127 << 23
AT_ONCE = 4
"""Times at which a class exceeds the threshold again that are drawn together."""
TINY = 2.0**-100
"""The least probability, so that its logarithm is not 0."""
OFTEN = -1.0
"""Height, in units of ε, from which a class gets noise in all samples: Φ(−1) = 0.16."""
UPPER = (0.169560432, 1.99158662, 2.7687285, -3.80743881, -2.93123597)
LOWER = (0.169519604, 1.99645183, 3.53265814, 1.0)
"""Coefficients of :func:`upper_quantile`, of the highest power first."""


class Noise(NamedTuple):
    """What is drawn for each row."""

    k: int
    epsilon: float
    samples: int
    generator: torch.Generator | None
    given: Tensor | None = None
    """Noise vectors that are given, not drawn, (R, n, B)."""

    def uniform(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Random numbers from 0 to 1."""
        return torch.rand(shape, generator=self.generator, dtype=dtype, device="cpu")

    def bytes(self, count: int) -> Tensor:
        """Random numbers from 0 to 255: eight from one word."""
        words = torch.empty(-(-count // 8), dtype=torch.int64, device="cpu")
        words.random_(-(2**63), None, generator=self.generator)
        return words.view(torch.uint8)[:count]


class Hits(NamedTuple):
    """Classes that may exceed the threshold of their row, or noised scores that do, (M) each."""

    cell: Tensor
    """Row · n + class."""
    pair: Tensor
    """Row · (B + 1), plus the sample of a noised score; the sample B stands for none."""
    height: Tensor
    """Above the threshold, in units of ε."""

    def take(self, which: Tensor) -> "Hits":
        """Some of them."""
        return Hits(*(field.index_select(0, which) for field in self))


def kth_noised(rows: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """The classes that are k-th largest in each sample, and their noise times ε, (R, B) each."""
    highest = torch.nan_to_num(rows.amax(1, keepdim=True), 0.0, 0.0, 0.0)
    rows = (rows - highest).contiguous()  # so that noise is not lost beside large scores
    rows = rows if noise.epsilon == 1 else rows.div_(noise.epsilon)
    step = max(1, BLOCK // max(rows.shape[1], noise.samples * enough(noise.k)))
    results = [_of_block(block, noise) for block in torch.split(rows, step)]
    places, shifts = (torch.cat(parts) for parts in zip(*results, strict=True))
    return places, shifts.mul_(noise.epsilon)


def enough(k: int) -> int:
    """Classes that should exceed the threshold: k do then in 99.5 % of all samples.

    Example:
        >>> enough(1), enough(6), enough(51)
        (6, 15, 74)
    """
    return int(k + 3 * sqrt(k) + 2)


def thresholds(rows: Tensor, k: int) -> Tensor:
    """Scores that about ``enough(k)`` noised scores of a row exceed, (R, 1); inf if none is finite.

    They come from a trial with evenly spread noise in random order. Among the largest noised
    scores of groups of classes, as many are taken as groups that should have such a class.
    """
    trial = rows + _even_noise(rows.shape[1], rows.dtype)
    while trial.shape[1] > 5 * enough(k):
        half = (trial.shape[1] + 1) // 2
        trial = torch.maximum(trial[:, :half], trial[:, -half:])
    groups = trial.shape[1]
    count = enough(k)
    if groups < rows.shape[1]:
        count = ceil(groups * (1 - (1 - 1 / groups) ** count))
    last = trial.kthvalue(groups - count + 1, keepdim=True).values
    if bool((last == -inf).any()):  # there are few classes, which all exceed it
        present = trial.masked_fill(trial == -inf, inf).amin(1, keepdim=True)
        last = torch.where(last == -inf, present - 8, last)
    return torch.nan_to_num(last, inf, inf)


@lru_cache(maxsize=8)
def _even_noise(n: int, dtype: torch.dtype) -> Tensor:
    order = torch.randperm(n, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    quantiles: Tensor = torch.special.ndtri(order.double().add_(0.5).div_(n))
    return quantiles.to(dtype)


def _of_block(rows: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """The classes that are k-th largest and their noise, (R, B) each."""
    heights = rows - thresholds(rows, noise.k)
    above = exceedances(heights, noise)
    if not len(above.pair):
        cell, pair, height = (field.new_zeros(1) for field in above)
        above = Hits(cell, pair.add_(noise.samples), height)  # in no sample
    shape = len(rows), noise.samples + 1
    keys, order = by_pair_and_height(above, shape[0] * shape[1]).sort()
    sizes = torch.bincount(above.pair, minlength=shape[0] * shape[1])
    ends, sizes = (each.view(shape)[:, :-1] for each in (sizes.cumsum(0), sizes))
    kth = (ends - noise.k).clamp_min_(0)
    neighbours = (kth - 1).clamp_min_(0), kth, (kth + 1).clamp_max_(len(keys) - 1)
    lower, key, upper = (keys.index_select(0, each.view(-1)) for each in neighbours)
    # Fewer than k exceed it, or equal digits do not tell which is the k-th.
    unsure = (key == lower).logical_or_(key == upper).view_as(kth).logical_or_(sizes < noise.k)
    found = _places_and_noise(above.take(order.index_select(0, kth.view(-1))), heights)
    places, z = (each.view_as(kth) for each in found)
    lines, step = unsure.nonzero(), max(1, BLOCK // rows.shape[1])
    for start in range(0, len(lines), step):
        row, sample = lines[start : start + step].unbind(1)
        line, which = _in_ranges((ends - sizes)[row, sample], ends[row, sample])
        known = above.take(order.index_select(0, which))
        result = _with_all_noise(heights, row, line, known, noise)
        places[row, sample], z[row, sample] = result
    return places, z


def _in_ranges(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """The number of the range and the integer, for all integers from starts up to ends."""
    integers = start.unsqueeze(1) + torch.arange(int((end - start).max()), device="cpu")
    inside = integers < end.unsqueeze(1)
    return inside.nonzero()[:, 0], integers[inside]


def by_pair_and_height(hits: Hits, pairs: int) -> Tensor:
    """Integers in the order of pairs, and in each of as many digits of heights as there is room."""
    bits = min(28, 31 - (pairs - 1).bit_length())
    # From 1 to 2^32 the bits of numbers have their order, and differ in 28 places.
    height = hits.height.float().clamp(0, 2**31).add_(1).view(torch.int32) - BITS_OF_ONE
    return hits.pair.int().bitwise_left_shift_(bits).add_(height.bitwise_right_shift_(28 - bits))


def _places_and_noise(hits: Hits, heights: Tensor) -> tuple[Tensor, Tensor]:
    """Classes, and what was added to their heights; 0 if these are infinite."""
    z = hits.height - heights.view(-1).index_select(0, hits.cell)
    return hits.cell % heights.shape[1], z.nan_to_num_(0.0)


def exceedances(heights: Tensor, noise: Noise) -> Hits:
    """The noised scores of all samples that exceed 0, with some that do not; in any order."""
    n, samples = heights.shape[1], noise.samples
    digits = noise.bytes(heights.numel())
    offset, factor = _bound(samples)
    bound = (heights + offset).mul_(factor).clamp_(0, 255.9**0.25).square_().square_()
    row, place = (digits.view_as(heights) <= bound.short().byte()).nonzero().unbind(1)
    cell = place.add_(row, alpha=n)
    height = heights.view(-1).index_select(0, cell).nan_to_num_(-inf, inf, -inf)
    hits = Hits(cell, row * (samples + 1), height)
    often = hits.height > OFTEN
    which = often.nonzero().squeeze(1)
    if not len(which):
        return _first_times(hits, digits, noise)
    rest = often.logical_not_().nonzero().squeeze(1)
    parts = _all_times(hits.take(which), noise), _first_times(hits.take(rest), digits, noise)
    return Hits(*(torch.cat(fields) for fields in zip(*parts, strict=True)))


@lru_cache(maxsize=8)
def _bound(samples: int) -> tuple[float, float]:
    """Numbers a and c of a bound on how likely a class of height h exceeds 0 in some sample.

    It is ``⌊1 + (c (h + a))^4⌋ / 256``, and at least 1 from the height OFTEN on.
    """
    chance = torch.tensor(-expm1(log1p(-1 / 256) / samples), device="cpu")
    least = float(torch.special.ndtri(chance))
    shift = 0.8 - least
    height = torch.linspace(least, OFTEN, 1_000, dtype=torch.float64, device="cpu")
    chance = -torch.expm1(samples * torch.log1p(-torch.special.ndtr(height)))
    factor = float((256 * chance / (height + shift) ** 4).max())
    return shift, (1.001 * max(factor, 256 / (OFTEN + shift) ** 4)) ** 0.25


def _all_times(hits: Hits, noise: Noise) -> Hits:
    """The noised scores of classes in all samples."""
    shape = len(hits.cell), noise.samples
    z = torch.randn(shape, generator=noise.generator, dtype=hits.height.dtype, device="cpu")
    heights = z.add_(hits.height.unsqueeze(1))
    who, sample = (heights > 0).nonzero().unbind(1)
    pair = hits.pair.index_select(0, who).add_(sample)
    height = heights.view(-1).index_select(0, sample.add_(who, alpha=noise.samples))
    return Hits(hits.cell.index_select(0, who), pair, height)


def _first_times(hits: Hits, digits: Tensor, noise: Noise) -> Hits:
    """The noised scores of classes that exceed 0, from the first bits of U for each class."""
    samples, dtype = noise.samples, hits.height.dtype
    chance = hits.height.mul(-sqrt(0.5)).erfc_().mul_(0.5).clamp_min_(TINY)
    rate = chance.neg().log1p_()
    u = noise.uniform(len(chance), dtype=dtype).sub_(digits.index_select(0, hits.cell)).sub_(1)
    time = u.mul_(1 / 256).log1p_().div_(rate)
    sample = time.floor().clamp_max_(samples)
    # What is left of the time is a random number too, for the next time.
    time.sub_(sample)
    who = (time < (samples - 1 - sample).mul_(chance)).nonzero().squeeze(1)
    if len(who):
        times = time.index_select(0, who)
        rates, last = rate.index_select(0, who), sample.index_select(0, who)
        v = noise.uniform(AT_ONCE, len(who), dtype=dtype).neg_()
        torch.div(times.mul_(rates).expm1_(), chance.index_select(0, who), out=v[0])
        again, later = [], [sample]
        while len(who):
            times = v.log1p_().div_(rates).floor_().add_(1).cumsum_(0).add_(last)
            place = (times < samples).view(-1).nonzero().squeeze(1)
            later.append(times.view(-1).index_select(0, place))
            again.append(who.index_select(0, place.remainder_(len(who))))
            still = (times[-1] < samples).nonzero().squeeze(1)
            who, last, rates = (x.index_select(0, still) for x in (who, times[-1], rates))
            v = noise.uniform(AT_ONCE, len(who), dtype=dtype).neg_()
        more = torch.cat(again)
        hits = Hits(*map(torch.cat, zip(hits, hits.take(more), strict=True)))
        chance, sample = torch.cat([chance, chance.index_select(0, more)]), torch.cat(later)
    z = upper_quantile(noise.uniform(len(chance), dtype=dtype).mul_(chance))
    return Hits(hits.cell, hits.pair.add_(sample.long()), z.add_(hits.height))


def upper_quantile(tail: Tensor) -> Tensor:
    """``−Φ⁻¹(q)`` for q below Φ(OFTEN), in place of q: a quotient of polynomials in √(−2 log q).

    Its coefficients are fitted; they miss the quantile by less than 1e-7.
    """
    w = tail.clamp_min_(TINY).log_().mul_(-2).sqrt_()
    upper, lower = w * UPPER[0], w * LOWER[0]
    for coefficient in UPPER[1:-1]:
        upper.add_(coefficient).mul_(w)
    for coefficient in LOWER[1:-1]:
        lower.add_(coefficient).mul_(w)
    return upper.add_(UPPER[-1]).div_(lower.add_(LOWER[-1]))


def _with_all_noise(
    heights: Tensor, row: Tensor, line: Tensor, known: Hits, noise: Noise
) -> tuple[Tensor, Tensor]:
    """Classes and noise of one sample for each row; those that exceed 0 are known, by lines."""
    scores = heights.index_select(0, row)
    below = torch.nan_to_num(scores.mul(sqrt(0.5)).erfc_(), 2.0)  # infinite scores and limits
    u = noise.uniform(*scores.shape, dtype=scores.dtype).mul_(below)
    z = u.sub_(1).clamp_(2**-24 - 1, 1 - 2**-24).erfinv_().mul_(sqrt(2))
    places, exceeding = _places_and_noise(known, heights)
    z[line, places] = exceeding
    place = (scores + z).topk(noise.k).indices[:, -1:]
    return place.squeeze(1), z.gather(1, place).squeeze(1)
