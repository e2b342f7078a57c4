"""Coefficients of ``Π_i (1 − p_i(t) + p_i(t) X)`` for all nodes t of the integral at once.

Each product waits for the one before, and small batches leave a program alone with its wait. So the
candidates are halved, and both halves multiplied out side by side, (2, nodes): what comes after a
candidate then begins with the whole product of the other half. And a few candidates are taken at a
time: their chances do not depend on each other.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl


@dataclass(frozen=True)
class Tile:
    """What the kernel is compiled for."""

    k: int
    slots: int
    """Room for the heads, a power of two."""
    block: int
    """Classes that are read together."""
    nodes: int
    """Of the integral."""
    segment: int
    """Candidates of a half for which products are kept at the same time."""
    few: int
    """Candidates of a half that are taken together."""
    aligned: int
    """What divides the stride and the length of rows."""
    differentiate: bool
    reduction: str


class Candidates(NamedTuple):
    """The classes of a row that may be the k-th largest, inside a kernel."""

    classes: Any
    z: Any
    """In units of noise, relative to the k-th score."""
    found: Any
    """How many there are."""


@triton.jit
def upper_tail(x):
    """``Φ(−x)`` for x ≥ 0: exp(−x²/2) times a polynomial in 1 / (1 + 0.3 x).

    Fitted up to x = 12.5, relative error below 1e-7 and that of the exponential.
    """
    t = 1.0 / (1.0 + 0.3 * x)
    p = -0.160514187 + 0.0364651734 * t
    p = 0.212096028 + p * t
    p = -0.0590110579 + p * t
    p = 0.131407376 + p * t
    p = 0.0990409735 + p * t
    p = 0.120895751 + p * t
    p = 0.119619894 + p * t
    return p * t * tl.exp(-0.5 * x * x)


@triton.jit
def chances(z, t):
    """Probabilities of z with noise to be above thresholds t, and not to be, in float64."""
    x = z - t
    less = upper_tail(tl.abs(x)).to(tl.float64)
    more = 1.0 - less
    return tl.where(x > 0, more, less), tl.where(x > 0, less, more)


@triton.jit
def nothing_counted(K: tl.constexpr, NODES: tl.constexpr):
    """Coefficients of the empty product, up to X^(K−1), for both halves."""
    counts = (tl.full((2, NODES), 1.0, tl.float64),)
    for _ in tl.static_range(1, K):
        counts = counts + (tl.zeros((2, NODES), tl.float64),)
    return counts


@triton.jit
def count(counts, above, not_above, K: tl.constexpr):
    """Coefficients times ``not_above + above·X``."""
    result = (counts[0] * not_above,)
    for j in tl.static_range(1, K):
        result = result + (counts[j] * not_above + counts[j - 1] * above,)
    return result


@triton.jit
def candidate(near, i):
    """The i-th candidate of either half, (2, 1); −∞ where there is none: it is never above."""
    half = tl.cdiv(near.found, 2)
    begin = tl.arange(0, 2)[:, None] * half
    there = begin + i < tl.minimum(begin + half, near.found)
    return tl.load(near.z + begin + i, there, float("-inf"))


@triton.jit
def next_chances(near, i, t, FEW: tl.constexpr):
    """Chances of a few candidates of either half, from the i-th on."""
    above, not_above = (), ()
    for j in tl.static_range(FEW):
        one, other = chances(candidate(near, i + j), t[None, :])
        above, not_above = above + (one,), not_above + (other,)
    return above, not_above


@triton.jit
def keep(place, counts, K: tl.constexpr, NODES: tl.constexpr):
    """Write coefficients, rounded."""
    number = tl.arange(0, 2)[:, None] * NODES + tl.arange(0, NODES)[None, :]
    for j in tl.static_range(K):
        tl.store(place + 2 * j * NODES + number, counts[j].to(tl.float32))


@triton.jit
def kept(place, SWAPPED: tl.constexpr, K: tl.constexpr, NODES: tl.constexpr):
    """Read them again; swapped, each half gets those of the other."""
    half = tl.arange(0, 2)[:, None]
    if SWAPPED:
        half = 1 - half
    number = half * NODES + tl.arange(0, NODES)[None, :]
    counts = (tl.load(place + number).to(tl.float64),)
    for j in tl.static_range(1, K):
        counts = counts + (tl.load(place + 2 * j * NODES + number).to(tl.float64),)
    return counts


@triton.jit
def fewer_than_k(near, t, saved, TILE: tl.constexpr):
    """Probability that fewer than k candidates are above t.

    Coefficients of either half are kept at the end and, for a gradient, before each segment.
    """
    K: tl.constexpr = TILE.k
    NODES: tl.constexpr = TILE.nodes
    SIZE: tl.constexpr = 2 * K * NODES
    STEP: tl.constexpr = SIZE if TILE.differentiate else 0
    FEW: tl.constexpr = TILE.few
    half = tl.cdiv(near.found, 2)
    segments = tl.cdiv(half, TILE.segment)
    counts = nothing_counted(K, NODES)
    tl.debug_barrier()
    place = saved
    for segment in range(segments + 1):
        keep(place, counts, K, NODES)
        begin = segment * TILE.segment
        for i in range(begin, tl.minimum(half, begin + TILE.segment), FEW):
            above, not_above = next_chances(near, i, t, FEW)
            for j in tl.static_range(FEW):
                counts = count(counts, above[j], not_above[j], K)
        place += STEP
    tl.debug_barrier()
    others = kept(place - STEP, True, K, NODES)
    at_most = others[0]
    total = counts[K - 1] * at_most
    for j in tl.static_range(1, K):
        at_most += others[j]
        total += counts[K - 1 - j] * at_most
    return tl.sum(tl.where(tl.arange(0, 2)[:, None] == 0, total, 0.0), 0)
