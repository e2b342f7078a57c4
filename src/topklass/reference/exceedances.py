r"""The k-th largest score under sampled noise, from the few noised scores above a threshold.

**Idea.** The k-th largest of ``s + εZ`` depends on the classes that exceed a threshold t alone, if
at least k do. Class i does so with probability ``p_i = Φ((s_i − t) / ε)``, in each sample anew. The
number of samples until it does is geometric, ``⌊log U / log(1 − p_i)⌋``: most classes need one
random number for all samples. Its noise is then normal above ``(t − s_i) / ε``, that is
``−Φ⁻¹(V p_i)``. With t such that some more than k classes exceed it, few do.

**Exactness.** This is the law of the noise for every t that does not depend on it. In a sample in
which fewer than k classes exceed t, the others get their noise, normal below ``(t − s_i) / ε``.
"""

from math import inf, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 2**18
"""Scores that are worked on together, and about as many exceedances at most."""
GOLDEN = (sqrt(5) - 1) / 2


class Noise(NamedTuple):
    """What is drawn for each row."""

    k: int
    epsilon: float
    samples: int
    generator: torch.Generator | None

    def uniform(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Random numbers from 0 to 1."""
        return torch.rand(shape, generator=self.generator, dtype=dtype)


class Exceedances(NamedTuple):
    """Noised scores above the threshold of their row, (M) each."""

    pair: Tensor
    """Row · samples + sample, ascending."""
    place: Tensor
    """The class."""
    shift: Tensor
    """Its noise, times ε."""
    value: Tensor
    """The noised score."""


def kth_noised(rows: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """The classes that are k-th largest in each sample, and their noise times ε, (R, B) each."""
    step = max(1, BLOCK // max(rows.shape[1], noise.samples * enough(noise.k)))
    blocks = [_of_block(block, noise) for block in torch.split(rows, step)]
    places, shifts = zip(*blocks, strict=True)
    return torch.cat(places).view(-1, noise.samples), torch.cat(shifts).view(-1, noise.samples)


def enough(k: int) -> int:
    """Classes that should exceed the threshold: k do then in 99.5 % of all samples.

    Example:
        >>> enough(1), enough(6), enough(51)
        (6, 15, 74)
    """
    return int(k + 3 * sqrt(k) + 2)


def _of_block(rows: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    k, samples = noise.k, noise.samples
    limits = thresholds(rows, k, noise.epsilon)
    above = exceedances(rows, limits, noise)
    count = torch.bincount(above.pair, minlength=len(rows) * samples)
    first = count.cumsum(0).sub_(count)
    width = max(k, int(count.max()))
    table = rows.new_full((len(count), width), -inf)
    cell = torch.arange(len(above.pair)).sub_(first.index_select(0, above.pair))
    table.view(-1).scatter_(0, cell.add_(above.pair, alpha=width), above.value)
    top, order = table.topk(k)
    short = (top[:, -1].view(-1, samples) < limits).flatten()
    kth = first.add_(order[:, -1]).masked_fill_(short, 0)
    places, shifts = torch.zeros_like(count), rows.new_zeros(len(count))
    if len(above.pair):
        places, shifts = above.place.index_select(0, kth), above.shift.index_select(0, kth)
    if bool(short.any()):
        places[short], shifts[short] = _with_all_noise(rows, limits, short, above, noise)
    return places, shifts


def thresholds(rows: Tensor, k: int, epsilon: float) -> Tensor:
    """Scores that about ``enough(k)`` noised scores of a row exceed, (R, 1); inf if none is finite.

    They come from a trial with evenly spread noise: the least of the largest noised scores, one
    from each of many groups of classes.
    """
    count, n = enough(k), rows.shape[1]
    even = torch.frac(torch.arange(1, n + 1, dtype=torch.float64) * GOLDEN)
    trial = rows + epsilon * torch.special.ndtri(even).to(rows.dtype)
    groups = 8 * count
    whole = n // groups * groups
    if whole > groups:
        largest = trial[:, :whole].unflatten(1, (-1, groups)).amax(1)
        trial = torch.cat([largest, trial[:, whole:]], 1)
    top = trial.topk(count).values
    last = top[:, -1:]
    if bool((last == -inf).any()):  # there are few classes, which all exceed it
        present = top.masked_fill(top == -inf, inf).amin(1, keepdim=True)
        last = torch.where(last == -inf, present - 8 * epsilon, last)
    return torch.nan_to_num(last, inf, inf)


def exceedances(rows: Tensor, limits: Tensor, noise: Noise) -> Exceedances:
    """The noised scores of all samples that exceed the limits, (R, 1)."""
    n, dtype = rows.shape[1], rows.dtype
    distance = torch.sub(limits, rows).mul_(sqrt(0.5) / noise.epsilon)
    chances = distance.clamp_max_(8.0).erfc_().mul_(0.5).view(-1)
    u = noise.uniform(rows.numel(), dtype=torch.float32)  # 24 digits, more where they matter
    hit = (u < noise.samples * chances).nonzero().squeeze(1)
    chance = chances.index_select(0, hit)
    rate = chance.neg().log1p_()
    digits = noise.uniform(len(hit), dtype=torch.float64).mul_(2**-24)
    sample = digits.add_(u.index_select(0, hit)).neg_().log1p_().div_(rate).to(dtype)
    who, found = torch.arange(len(hit)), []
    while len(who):
        still = (sample < noise.samples).nonzero().squeeze(1)
        who, sample = who.index_select(0, still), sample.index_select(0, still).floor_()
        found.append((who, sample))
        skipped = noise.uniform(len(who), dtype=dtype).neg_().log1p_()
        sample = skipped.div_(rate.index_select(0, who)).add_(sample).add_(1)
    if not found:
        return Exceedances(hit, hit, chance, chance)
    who, sample = (torch.cat(parts) for parts in zip(*found, strict=True))
    pair = (hit // n).mul_(noise.samples).index_select(0, who).add_(sample.long())
    pair, order = pair.int().sort(stable=True)
    who = who.index_select(0, order)
    tail = noise.uniform(len(who), dtype=dtype).clamp_min_(2**-25)
    shift = torch.special.ndtri(tail.mul_(chance.index_select(0, who))).mul_(-noise.epsilon)
    place = hit.index_select(0, who)
    value = rows.flatten().index_select(0, place).add_(shift)
    return Exceedances(pair.long(), place.remainder_(n), shift, value)


def _with_all_noise(
    rows: Tensor, limits: Tensor, which: Tensor, above: Exceedances, noise: Noise
) -> tuple[Tensor, Tensor]:
    """Classes and shifts of some pairs, with noise below the limit for classes without."""
    row = which.nonzero().squeeze(1) // noise.samples
    scores = rows[row]
    below = torch.special.ndtr((limits[row] - scores) / noise.epsilon)
    u = noise.uniform(*scores.shape, dtype=rows.dtype)
    shift = noise.epsilon * torch.special.ndtri(u.mul_(below))
    known = which.index_select(0, above.pair).nonzero().squeeze(1)
    line = (which.cumsum(0) - 1)[above.pair[known]]
    shift[line, above.place[known]] = above.shift[known]
    place = (scores + shift).topk(noise.k).indices[:, -1:]
    return place.squeeze(1), shift.gather(1, place).squeeze(1)
