r"""The noised k-th largest of a row in which many classes are near it.

The idea is that of ``reference/exceedances.py``. About twice as many noised scores as needed exceed
a threshold t, class i with probability p in each sample. One uniform number u says in which sample
a class does so first: ``⌊log(1 − u) / log(1 − p)⌋``. Its noise is normal below ``(t − s) / ε`` in
samples before that one, above it in that one, and normal in those after it: the law of the noise
for any t. Classes with ``u < samples · p`` get their noise. If that leaves fewer than k noised
scores above t in some sample, all others do, too.
"""

import triton
import triton.language as tl

from topklass.kernels.noised.noise import normal, size_of_tail
from topklass.kernels.smooth.row_state import (
    ABSENT,
    NOWHERE,
    as_key,
    as_score,
    no_heads,
    take_heads,
)

GOLDEN = tl.constexpr(-1640531527)
"""2^32 / golden ratio: its multiples are spread evenly."""
REACH = tl.constexpr(9.0)
"""So far below the k-th score, in units of noise, a class is hardly ever the k-th largest."""
MANY = tl.constexpr(192)
"""So many groups of classes with one in reach make the row one with many."""


@triton.jit
def chance_above(a):
    """Probability that normal noise exceeds ``a``; relative error below 1e-6 for a ≥ 0."""
    x = tl.abs(a)
    t = 1.0 / (1.0 + 0.3 * x)
    p = 0.699431717 - 0.175682098 * t
    p = -0.932114184 + p * t
    p = 0.406456202 + p * t
    p = -0.158245295 + p * t
    p = 0.182672858 + p * t
    p = 0.407117546 + p * t
    p = 1.00012898 + p * t
    p = -2.12291312 + p * t
    tail = t * tl.exp(p - 0.5 * x * x)
    return tl.where(a < 0, 1.0 - tail, tail)


@triton.jit
def log_complement(x):
    """``log(1 − x)``, accurate for small x."""
    rest = 1.0 - x
    small = rest == 1.0
    return tl.where(small, -x, x * tl.log(rest) / tl.where(small, 1.0, 1.0 - rest))


@triton.jit
def uniform(bits):
    """A number between 0 and 1, from all bits of a random integer."""
    u = tl.maximum(bits.to(tl.uint32, bitcast=True).to(tl.float32), 0.5) * (2.0**-32)
    return tl.minimum(u, 1.0 - 2.0**-24)


@triton.jit
def first_numbers(noise, begin, BLOCK: tl.constexpr):
    """The numbers u of BLOCK classes from ``begin`` on, a multiple of 4."""
    quarter = begin // 4 + tl.arange(0, BLOCK // 4)
    zero = quarter * 0
    a, b, c, d = tl.philox(noise.seed, quarter, zero + noise.row, zero, zero + 1)
    return uniform(tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK,)))


@triton.jit
def first_number(noise, classes):
    """The same for any classes."""
    zero = classes * 0
    a, b, c, d = tl.philox(noise.seed, classes // 4, zero + noise.row, zero, zero + 1)
    word = classes % 4
    return uniform(tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d)))


@triton.jit
def exact_noise(noise, classes, p, SAMPLES: tl.constexpr, TILE: tl.constexpr):
    """Noise of TILE classes in all samples, (SAMPLES, TILE), which exceeds with probability p."""
    GROUPS: tl.constexpr = SAMPLES // 4
    group = tl.arange(0, GROUPS)[:, None]
    zero = group * 0 + classes[None, :] * 0
    a, b, c, d = tl.philox(
        noise.seed, zero + classes[None, :], zero + noise.row, zero + group, zero + 2
    )
    four = tl.join(tl.join(a, b), tl.join(c, d))
    v = uniform(tl.reshape(tl.permute(four, (0, 2, 3, 1)), (SAMPLES, TILE)))
    first = log_complement(first_number(noise, classes)) / log_complement(p)
    sample = tl.arange(0, SAMPLES)[:, None].to(tl.float32)
    is_first = sample == tl.floor(first)[None, :]
    before = sample + 1.0 <= first[None, :]
    v = v * tl.where(is_first, p[None, :], tl.where(before, 1.0 - p[None, :], 1.0))
    size = size_of_tail(tl.maximum(tl.minimum(v, 1.0 - v), 1e-30))
    z = tl.where(v < 0.5, -size, size)
    return tl.where(is_first, -z, z)


@triton.jit
def row_heads_and_groups(line, columns, epsilon, TILE: tl.constexpr):
    """Keys and places of the k largest scores of a row, whether it is spoilt, and how many groups.

    A group has every block-th class. Those count whose largest score is in reach of the k-th. That
    says, without looking at noise, whether many classes are.
    """
    heads, places = no_heads(1, TILE.k, TILE.slots)
    most = tl.full((1, TILE.block), float("-inf"), tl.float32)
    spoilt = 0
    for begin in range(0, columns, TILE.block):
        column = begin + tl.arange(0, TILE.block)[None, :]
        x = tl.load(line + column, column < columns, float("-inf")).to(tl.float32)
        spoilt = tl.maximum(spoilt, tl.max(tl.max((x != x).to(tl.int32), 1), 0))
        most = tl.maximum(most, x)
        x, heads, places, _ = take_heads(x, column, heads, places)
    limit = as_score(tl.min(tl.min(heads, 1), 0)) - REACH * epsilon
    near = (most >= limit) & (most > float("-inf"))
    return heads, places, spoilt, tl.sum(tl.sum(near.to(tl.int32), 1), 0)


@triton.jit
def threshold(line, columns, noise, TILE: tl.constexpr):
    """A score that some more than k noised scores exceed, from a trial with evenly spread noise."""
    most = tl.full((TILE.step,), float("-inf"), tl.float32)
    for begin in range(0, columns, TILE.step):
        column = begin + tl.arange(0, TILE.step)
        x = tl.load(line + column, column < columns, float("-inf")).to(tl.float32)
        most = tl.maximum(
            most, x + noise.epsilon * normal((column * GOLDEN).to(tl.uint32, bitcast=True))
        )
    keys = as_key(most)
    lanes = tl.arange(0, TILE.step)
    least = tl.max(keys, 0)
    for _ in range(TILE.enough - 1):
        lane = tl.min(tl.where(keys == least, lanes, NOWHERE), 0)
        keys = tl.where(lanes == lane, ABSENT, keys)
        least = tl.max(keys, 0)
    return tl.minimum(as_score(least), 3e38)


@triton.jit
def take_exact(line, room, found, noise, limit, heads, places, TILE: tl.constexpr):
    """Exchange the heads of samples for noised scores of the classes in the room."""
    SAMPLES: tl.constexpr = TILE.samples
    CANDIDATES: tl.constexpr = TILE.candidates
    for start in range(0, found, CANDIDATES):
        entry = start + tl.arange(0, CANDIDATES)
        classes = tl.load(room + entry, entry < found, 0)
        s = tl.load(line + classes, entry < found, float("-inf")).to(tl.float32)
        p = chance_above((limit - s) * noise.rate)
        z = exact_noise(noise, classes, p, SAMPLES, CANDIDATES)
        noised = tl.where(
            s[None, :] == float("-inf"), float("-inf"), s[None, :] + noise.epsilon * z
        )
        columns = tl.broadcast_to(classes[None, :], (SAMPLES, CANDIDATES))
        noised, heads, places, _ = take_heads(noised, columns, heads, places)
    return heads, places


@triton.jit
def kth_of_many(line, room, columns, noise, TILE: tl.constexpr):
    """Key of the k-th largest score with noise in each sample, and its class."""
    BLOCK: tl.constexpr = TILE.step
    limit = threshold(line, columns, noise, TILE)
    heads, places = no_heads(TILE.samples, TILE.k, TILE.slots)
    used = tl.arange(0, TILE.samples) < noise.samples
    for turn in range(2):  # classes that exceed the threshold; all others, if these are too few
        short = used & (as_score(tl.min(heads, 1)) < limit)
        end = tl.where(tl.max(short.to(tl.int32), 0) + (1 - turn) > 0, columns, 0)
        found = 0
        for begin in range(0, end, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            x = tl.load(line + column, column < columns, float("-inf")).to(tl.float32)
            p = chance_above((limit - x) * noise.rate)
            exceeds = first_numbers(noise, begin, BLOCK) < noise.samples * p
            takes = ((exceeds == (turn == 0)) & (x > float("-inf"))).to(tl.int32)
            tl.store(room + found + tl.cumsum(takes, 0) - 1, column, takes > 0)
            found += tl.sum(takes, 0)
            if (found > TILE.block) | (begin + BLOCK >= columns):
                tl.debug_barrier()
                heads, places = take_exact(line, room, found, noise, limit, heads, places, TILE)
                tl.debug_barrier()
                found = 0
    least = tl.min(heads, 1)
    return least, tl.max(tl.where(heads == least[:, None], places, -1), 1)
