r"""First kernel: one read of the scores, O(k) numbers kept for each row.

The state of a row, or of one of several pieces of it, is what ``reference/power_sums.py`` calls
heads and power sums: the k largest scores with their classes, the threshold t (the smallest of
them), and ``p_j = Σ_tail exp(j (s − t) / temperature)``. A row is read tile by tile. Scores above
the current threshold change places with the smallest head, which thereby joins the tail; when the
threshold rises, the sums are rescaled. States of several pieces are merged in the same way.

A state is ``3k + 2`` numbers of float64: heads, their classes, sums, threshold, and one unused.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

NOWHERE = tl.constexpr(2**31 - 1)
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""A finite stand-in for −inf as the threshold, as in the reference."""
ABSENT = tl.constexpr(-2139095041)
"""−inf as an ordered integer."""


class Problem(NamedTuple):
    """What kernels read: tensors on the host, pointers in a kernel; None for what is absent."""

    scores: Any
    """(R, n), contiguous rows."""
    labels: Any = None
    """(R), or (R, m) where rows have several, int64."""
    margins: Any = None
    """(n), float32."""
    weights: Any = None
    """(n), float32."""
    chances: Any = None
    """(R, m) where rows have several labels: how much each of them counts, float32."""


class Shape(NamedTuple):
    """The layout of the rows that a kernel reads."""

    columns: Any
    stride: Any
    """Between the beginnings of two rows."""
    parts: Any = 1
    """Pieces of a row, each of which has a state."""


@dataclass(frozen=True)
class Tile:
    """What a kernel is compiled for; fields without meaning for it keep their defaults."""

    k: int
    slots: int
    """Room for the heads, a power of two."""
    rows: int
    block: int = 1
    """Columns."""
    precision: int = 0
    """Of the tail and its powers, see :func:`relative`."""
    aligned: int = 1
    """What divides the stride and the length of rows."""
    parts: int = 1
    """Room for the pieces of a row, a power of two."""
    reads: bool = False
    """Whether the second kernel also does the work of the first."""
    reduction: str = "none"

    @property
    def entries(self) -> int:
        """Scores of a row whose slopes are known one by one; of labels see the kernels."""
        return self.k


@triton.jit
def flipped(bits):
    """Float bits to integers of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def as_key(x):
    """Integers in the order of the floats: a warp finds their maximum in one instruction."""
    return flipped(x.to(tl.int32, bitcast=True))


@triton.jit
def as_score(key):
    """The float of an ordered integer."""
    return flipped(key).to(tl.float32, bitcast=True)


@triton.jit
def multiple(number, OF: tl.constexpr):
    """The number, a multiple of OF, such that the compiler knows: it then reads in wide steps."""
    return number // OF * OF


@triton.jit
def no_heads(ROWS: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr):
    """Keys and places of K absent heads, in slots of which the others are never the smallest."""
    empty = tl.where(tl.arange(0, SLOTS)[None, :] < K, ABSENT, NOWHERE)
    return tl.broadcast_to(empty, (ROWS, SLOTS)), tl.full((ROWS, SLOTS), -1, tl.int32)


@triton.jit
def take_heads(x, classes, heads, places):
    """Exchange the scores of a tile (R, B) that exceed the smallest of the heads (R, SLOTS)."""
    least = tl.min(heads, 1)
    if tl.max((tl.max(x, 1) > as_score(least)).to(tl.int32), 0) > 0:
        slots = tl.arange(0, heads.shape[1])[None, :]
        keys = as_key(x)
        best = tl.max(keys, 1)
        while tl.max((best > least).to(tl.int32), 0) > 0:
            enters = (best > least)[:, None]
            place = tl.min(tl.where(keys == best[:, None], classes, NOWHERE), 1)
            slot = tl.min(tl.where(heads == least[:, None], slots, NOWHERE), 1)
            keys = tl.where(enters & (classes == place[:, None]), least[:, None], keys)
            taken = enters & (slots == slot[:, None])
            heads = tl.where(taken, best[:, None], heads)
            places = tl.where(taken, place[:, None], places)
            least = tl.min(heads, 1)
            best = tl.max(keys, 1)
        x = as_score(keys)
    return x, heads, places, tl.maximum(as_score(least), LOWEST)


@triton.jit
def row_heads(line, columns, TILE: tl.constexpr):
    """Keys and places of the k largest scores of a row, and whether some score is not a number."""
    K: tl.constexpr = TILE.k
    SLOTS: tl.constexpr = TILE.slots
    heads, places = no_heads(1, K, SLOTS)
    spoilt = 0
    for begin in range(0, columns, TILE.block):
        column = begin + tl.arange(0, TILE.block)[None, :]
        x = tl.load(line + column, column < columns, float("-inf")).to(tl.float32)
        spoilt = tl.maximum(spoilt, tl.max(tl.max((x != x).to(tl.int32), 1), 0))
        x, heads, places, _ = take_heads(x, column, heads, places)
    return heads, places, spoilt


@triton.jit
def relative(x, threshold, rate, PRECISION: tl.constexpr):
    """``exp((x − threshold) / temperature)`` for ``rate`` = log2(e) / temperature.

    PRECISION 0: float32; 1: rounded to float32, held as float64; 2: float64, temperature 1.
    """
    if PRECISION == 2:
        u = tl.exp(x.to(tl.float64) - threshold)
    else:
        u = tl.exp2((x - threshold) * rate)
        if PRECISION == 1:
            u = u.to(tl.float64)
    return u


@triton.jit
def add_powers(sums, u, K: tl.constexpr):
    """Add ``Σ u^j``, j = 1..K, to the sums."""
    result = (sums[0] + tl.sum(u, 1),)
    power = u
    for j in tl.static_range(1, K):
        power = power * u
        result = result + (sums[j] + tl.sum(power, 1),)
    return result


@triton.jit
def rescaled(sums, factor, K: tl.constexpr):
    """``p_j · factor^j``: the sums seen from another threshold."""
    result = (sums[0] * factor,)
    power = factor
    for j in tl.static_range(1, K):
        power = power * factor
        result = result + (sums[j] * power,)
    return result


@triton.jit
def read_rows(problem, shape, state, row, inside, columns, rate, TILE: tl.constexpr):
    """Leave at ``state`` (R) the states of rows (R), from the first of two columns to the second.

    The first column is a multiple of the block; the second, and the stride, of what is aligned.
    """
    K: tl.constexpr = TILE.k
    SLOTS: tl.constexpr = TILE.slots
    ROWS: tl.constexpr = TILE.rows
    BLOCK: tl.constexpr = TILE.block
    PRECISION: tl.constexpr = TILE.precision
    ALIGNED: tl.constexpr = TILE.aligned
    rate = tl.cast(rate, tl.float32)
    stride = multiple(shape.stride, ALIGNED)
    line = problem.scores + row[:, None] * tl.cast(stride, tl.int64)
    start, end = multiple(columns[0], BLOCK), multiple(columns[1], ALIGNED)
    if problem.labels is not None:
        label = tl.load(problem.labels + row, inside, -1)
    heads, places = no_heads(ROWS, K, SLOTS)
    base = tl.full((ROWS,), LOWEST, tl.float32)
    sums = ()
    for _ in tl.static_range(K):
        sums = sums + (tl.zeros((ROWS,), tl.float64),)
    for begin in range(start, end, BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        present = inside[:, None] & (column < end)
        x = tl.load(line + column, present, float("-inf")).to(tl.float32)
        if problem.labels is not None:
            x = tl.where(column == label[:, None], float("-inf"), x)
        classes = tl.broadcast_to(column, (ROWS, BLOCK))
        x, heads, places, threshold = take_heads(x, classes, heads, places)
        factor = relative(base, threshold, rate, PRECISION)
        sums = rescaled(sums, factor.to(tl.float64), K)
        base = threshold
        sums = add_powers(sums, relative(x, base[:, None], rate, PRECISION), K)
    store_state(state, inside, (as_score(heads), places, sums, base), TILE)


@triton.jit
def store_state(state, inside, values, TILE: tl.constexpr):
    """Write heads, their classes, sums and threshold."""
    K: tl.constexpr = TILE.k
    SLOTS: tl.constexpr = TILE.slots
    ROWS: tl.constexpr = TILE.rows
    heads, places, sums, threshold = values
    slots = tl.arange(0, SLOTS)[None, :]
    kept = inside[:, None] & (slots < K)
    tl.store(state[:, None] + slots, heads, kept)
    tl.store(state[:, None] + K + slots, places, kept)
    all_sums = tl.zeros((ROWS, SLOTS), tl.float64)
    for j in tl.static_range(K):
        all_sums = tl.where(slots == j, sums[j][:, None], all_sums)
    tl.store(state[:, None] + 2 * K + slots, all_sums, kept)
    tl.store(state + 3 * K, threshold, inside)


@triton.jit(do_not_specialize=("rows", "columns", "stride", "piece"))
def row_state_kernel(problem, buffer, rows, columns, stride, piece, rate, TILE: tl.constexpr):
    """States of columns ``piece·i`` to ``piece·(i + 1)`` of a tile of rows, from buffer[1] on.

    ``rate`` is log2(e) / temperature.
    """
    row = tl.program_id(0).to(tl.int64) * TILE.rows + tl.arange(0, TILE.rows)
    part, parts = tl.program_id(1), tl.num_programs(1)
    start = part * piece
    end = tl.minimum(start + piece, columns)
    state = buffer + 1 + (row * parts + part) * (3 * TILE.k + 2)
    shape = Shape(columns, stride, parts)
    read_rows(problem, shape, state, row, row < rows, (start, end), rate, TILE)
