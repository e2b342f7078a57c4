r"""Polynomials of a row in float64, one row for a program, one column for each leader.

Factors are linear, ``a_i + b_i X`` with ``b_i / a_i = exp((h_i − θ) / T)`` and the larger of the
two equal to 1: nothing overflows, on whichever side of the threshold θ the leader is.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from topklass.kernels.smooth.row_constants import newton
from topklass.kernels.smooth.row_state import LOWEST


@dataclass(frozen=True)
class ListTile:
    """What the kernels are compiled for; fields without meaning for one keep their defaults."""

    lengths: tuple[int, ...]
    chances: tuple[float, ...]
    """Of the lengths."""
    k: int
    """The longest list."""
    leaders: int
    slots: int
    """Room for the leaders, a power of two."""
    margin: bool
    rows: int = 1
    block: int = 1
    """Columns."""
    aligned: int = 1
    """What divides the stride and the length of rows."""
    reduction: str = "none"


class Row(NamedTuple):
    """What is known of a row in a kernel."""

    state: Any
    """Where its state lies."""
    q: Any
    """The tail's polynomial seen from the least leader, coefficients 0..K."""
    h: Any
    """The leaders, (slots)."""
    rank: Any
    """Their places in descending order."""
    least: Any
    inverse_t: Any
    """1 / T."""


@triton.jit
def leader(state, slots, LEADERS: tl.constexpr):
    """The scores of leaders, not below the lowest finite number; NaN stays."""
    h = tl.load(state + slots, slots < LEADERS, LOWEST)
    return tl.where(h < LOWEST, LOWEST, h)


@triton.jit
def ranks(state, LISTS: tl.constexpr):
    """The place of each leader in descending order, from 0; beyond them the largest number."""
    slots = tl.arange(0, LISTS.slots)
    mine, other = slots[:, None], slots[None, :]
    h, each = leader(state, mine, LISTS.leaders), leader(state, other, LISTS.leaders)
    before = (each > h) | ((each == h) & (other < mine))
    rank = tl.sum((before & (other < LISTS.leaders)).to(tl.int32), 1)
    return tl.where(slots < LISTS.leaders, rank, LISTS.slots)


@triton.jit
def at_rank(row, PLACE: tl.constexpr):
    """The leader of a rank."""
    return tl.sum(tl.where(row.rank == PLACE, row.h, 0.0), 0)


@triton.jit
def factor(h, threshold, inverse_t):
    """The numbers of ``a + b X``; a NaN stays one."""
    d = (h - threshold) * inverse_t
    e = tl.exp(-tl.abs(d))
    one = 1 + 0 * d
    return tl.where(d > 0, e, one), tl.where(d < 0, e, one)


@triton.jit
def times(product, a, b, K: tl.constexpr):
    """Coefficients 0..K of a polynomial times ``a + b X``."""
    result = (a * product[0],)
    for j in tl.static_range(1, K + 1):
        result = result + (a * product[j] + b * product[j - 1],)
    return result


@triton.jit
def sums_of(state, K: tl.constexpr, LEADERS: tl.constexpr):
    """The first K power sums of a state."""
    result = ()
    for j in tl.static_range(K):
        result = result + (tl.load(state + 2 * LEADERS + j),)
    return result


@triton.jit
def seen_from(q, fall, K: tl.constexpr):
    """The tail's polynomial ``q_j fall^j``, of the shape of ``fall``."""
    result = (q[0] + 0 * fall,)
    power = fall
    for j in tl.static_range(1, K + 1):
        result = result + (q[j] * power,)
        power = power * fall
    return result


@triton.jit
def without(row, product, threshold, one, other, K: tl.constexpr, LISTS: tl.constexpr):
    """Multiply by the factors of all leaders but two; they may be the same, or none."""
    for i in range(LISTS.leaders):
        h = tl.load(row.state + i)
        a, b = factor(tl.where(h < LOWEST, LOWEST, h), threshold, row.inverse_t)
        skipped = (one == i) | (other == i)
        product = times(product, tl.where(skipped, 1.0, a), tl.where(skipped, 0.0, b), K)
    return product


@triton.jit
def row_of(state, inverse_t, LISTS: tl.constexpr):
    """The numbers of a row from its state."""
    K: tl.constexpr = LISTS.k
    M: tl.constexpr = LISTS.leaders
    q = newton(sums_of(state, K, M), K)
    h, rank = leader(state, tl.arange(0, LISTS.slots), M), ranks(state, LISTS)
    return Row(state, q, h, rank, tl.load(state + 3 * M), inverse_t)
