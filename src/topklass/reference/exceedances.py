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

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Random numbers from 0 to 1."""
        return torch.rand(shape, generator=self.generator, dtype=dtype, device="cpu")

    def coarse(self, count: int) -> Tensor:
        """Random numbers from 0 to 1, rounded down to 16 binary digits: four from one number."""
        words = torch.empty(-(-count // 4), dtype=torch.int64, device="cpu")
        words.random_(-(2**63), None, generator=self.generator)
        return words.view(torch.int16)[:count].float().add_(2**15).mul_(2**-16)


class Exceedances(NamedTuple):
    """Noised scores above the threshold of their row, (M) each, those of a sample together."""

    sizes: Tensor
    """How many each row and sample has, (R·B)."""
    pair: Tensor
    """Row · B + sample, ascending."""
    place: Tensor
    """The class."""
    shift: Tensor
    """Its noise, times ε; of one row and sample such that noised scores descend."""


def kth_noised(rows: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """The classes that are k-th largest in each sample, and their noise times ε, (R, B) each."""
    highest = torch.nan_to_num(rows.amax(1, keepdim=True), 0.0, 0.0, 0.0)
    rows = (rows - highest).contiguous()  # so that noise is not lost beside large scores
    step = max(1, BLOCK // max(rows.shape[1], noise.samples * enough(noise.k)))
    limits = thresholds(rows, noise.k, noise.epsilon)
    blocks = zip(torch.split(rows, step), torch.split(limits, step), strict=True)
    places, shifts = zip(*(_of_block(*block, noise) for block in blocks), strict=True)
    return torch.cat(places).view(-1, noise.samples), torch.cat(shifts).view(-1, noise.samples)


def enough(k: int) -> int:
    """Classes that should exceed the threshold: k do then in 99.5 % of all samples.

    Example:
        >>> enough(1), enough(6), enough(51)
        (6, 15, 74)
    """
    return int(k + 3 * sqrt(k) + 2)


def _of_block(rows: Tensor, limits: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    above = exceedances(rows, limits, noise)
    short = above.sizes < noise.k
    kth = (above.sizes.cumsum(0) - above.sizes).add_(noise.k - 1).masked_fill_(short, 0)
    places, shifts = torch.zeros_like(kth), rows.new_zeros(len(kth))
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
    even = torch.frac(torch.arange(1, n + 1, dtype=torch.float64, device="cpu") * GOLDEN)
    shift = torch.special.ndtri(even).mul_(epsilon).to(rows.dtype)
    groups = 8 * count
    whole = n // groups * groups
    trials = []
    for block in torch.split(rows, max(1, BLOCK // n)):
        trial = block + shift
        if whole > groups:
            largest = trial[:, :whole].unflatten(1, (-1, groups)).amax(1)
            trial = torch.cat([largest, trial[:, whole:]], 1)
        trials.append(trial.topk(count).values)
    top = torch.cat(trials)
    last = top[:, -1:]
    if bool((last == -inf).any()):  # there are few classes, which all exceed it
        present = top.masked_fill(top == -inf, inf).amin(1, keepdim=True)
        last = torch.where(last == -inf, present - 8 * epsilon, last)
    return torch.nan_to_num(last, inf, inf)


def exceedances(rows: Tensor, limits: Tensor, noise: Noise) -> Exceedances:
    """The noised scores of all samples that exceed the limits, (R, 1)."""
    n, samples = rows.shape[1], noise.samples
    distance = torch.sub(limits, rows).mul_(sqrt(0.5) / noise.epsilon)
    chances = distance.clamp_max_(8.0).erfc_().mul_(0.5).view(-1)
    u = noise.coarse(rows.numel())
    hit = (u < samples * chances).nonzero().squeeze(1)
    chance = chances.index_select(0, hit).double()
    rate = chance.neg().log1p_()
    digits = noise.uniform(len(hit)).mul_(2**-16)  # the others of a hit
    sample = digits.add_(u.index_select(0, hit)).neg_().log1p_().div_(rate)
    who, found = torch.arange(len(hit), device="cpu"), []
    while len(who):
        still = (sample < samples).nonzero().squeeze(1)
        who, sample = who.index_select(0, still), sample.index_select(0, still).floor_()
        found.append((who, sample))
        skipped = noise.uniform(len(who)).neg_().log1p_()
        sample = skipped.div_(rate.index_select(0, who)).add_(sample).add_(1)
    if not found:
        return Exceedances(hit.new_zeros(len(rows) * samples), hit, hit, rows.new_empty(0))
    who, sample = (torch.cat(parts) for parts in zip(*found, strict=True))
    pair = (hit // n).mul_(samples).index_select(0, who).add_(sample.long())
    # −Φ⁻¹(V p) is √2 times the inverse of erf at 1 − 2 V p, which is faster.
    tail = noise.uniform(len(who)).mul_(chance.index_select(0, who)).clamp_min_(2**-53)
    shift = tail.mul_(-2).add_(1).erfinv_().mul_(sqrt(2) * noise.epsilon).to(rows.dtype)
    place = hit.index_select(0, who)
    # By row and sample, and by height above the limit, whose bits have the order of numbers.
    gap = torch.sub(rows, limits).view(-1).index_select(0, place).add_(shift)
    height = gap.clamp_min_(0).float().view(torch.int32)
    order = (pair << 31).add_(2**31 - 1 - height.long()).argsort()
    pair, place = pair.index_select(0, order), place.index_select(0, order).remainder_(n)
    sizes = torch.bincount(pair, minlength=len(rows) * samples)
    return Exceedances(sizes, pair, place, shift.index_select(0, order))


def _with_all_noise(
    rows: Tensor, limits: Tensor, which: Tensor, above: Exceedances, noise: Noise
) -> tuple[Tensor, Tensor]:
    """Classes and shifts of some pairs, with noise below the limit for classes without."""
    row = which.nonzero().squeeze(1) // noise.samples
    scores = rows[row]
    below = torch.special.ndtr((limits[row] - scores) / noise.epsilon)
    below = torch.nan_to_num(below, 1.0)  # infinite scores and limits
    u = noise.uniform(*scores.shape, dtype=rows.dtype)
    shift = noise.epsilon * torch.special.ndtri(u.mul_(below))
    known = which.index_select(0, above.pair).nonzero().squeeze(1)
    line = (which.cumsum(0) - 1)[above.pair[known]]
    shift[line, above.place[known]] = above.shift[known]
    place = (scores + shift).topk(noise.k).indices[:, -1:]
    return place.squeeze(1), shift.gather(1, place).squeeze(1)
