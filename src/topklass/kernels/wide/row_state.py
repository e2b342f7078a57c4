r"""First kernel: as that of ``smooth/``, with more scores than k kept out of the power sums.

Newton's identities amplify the rounding of the sums, the less the more of the largest scores are
kept out (see ``reference/power_sums.py``): with 3k/2 of them, sums in float32 serve up to k = 32,
with errors of 6e-7 in the worst rows.
The sums are seen from the smallest score that is kept.

So many scores would enter one by one where a row begins. There they are found together: bisection
finds a bound that as many scores exceed as are kept, by counting, and these go to their places by
a running sum. From then on they enter one by one, as in ``smooth/``.

A row may have several labels, and is read without any of them. A state has room for them: it is
``2e + k + 2`` numbers of float64 for e entries, kept scores and labels: scores, classes, sums,
threshold, and one unused.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from topklass.kernels.smooth.row_state import (
    ABSENT,
    LOWEST,
    NOWHERE,
    Shape,
    Tile,
    add_powers,
    as_key,
    as_score,
    multiple,
    no_heads,
    relative,
    rescaled,
    take_heads,
)

NO_CLASS = tl.constexpr(-1)
"""In place of a label that is padding."""


@dataclass(frozen=True)
class WideTile(Tile):
    """What a kernel of this folder is compiled for; there is room for all entries in the slots."""

    kept: int = 0
    """Scores that are kept out of the sums."""
    labels: int = 1
    """Labels of a row."""

    @property
    def entries(self) -> int:
        """What a row has besides its tail."""
        return self.kept + self.labels

    @property
    def size(self) -> int:
        """Numbers of a state."""
        return 2 * self.entries + self.k + 2


@triton.jit
def bounds(keys, M: tl.constexpr, GROUPS: tl.constexpr):
    """Between which two keys the M-th largest of a tile (R, B) lies, and how many are above.

    More than the first, and up to the second: either M keys exceed the first, or the two are
    neighbours. The columns are a multiple of GROUPS > M.
    """
    groups = tl.max(tl.reshape(keys, (keys.shape[0], GROUPS, keys.shape[1] // GROUPS)), 2)
    some = tl.sum((groups > ABSENT).to(tl.int32), 1) >= M
    # At least one key of each group that is not empty lies above.
    low = tl.min(tl.where(some[:, None] & (groups == ABSENT), NOWHERE, groups), 1) - 1
    high = tl.max(groups, 1)
    above_low, above_high = tl.full(high.shape, GROUPS, tl.int32), tl.zeros_like(high)
    while tl.max(((above_low > M) & (low + 1 < high)).to(tl.int32), 0) > 0:
        middle = (low & high) + ((low ^ high) >> 1)
        # In floats: sums of conditions become bits, whose assembly takes longer.
        count = tl.sum(tl.where(keys > middle[:, None], 1.0, 0.0), 1).to(tl.int32)
        enough = count >= M
        low, above_low = tl.where(enough, middle, low), tl.where(enough, count, above_low)
        high, above_high = tl.where(enough, high, middle), tl.where(enough, above_high, count)
    return low[:, None], high[:, None], above_high[:, None]


@triton.jit
def quarters(x):
    """Every fourth column of (R, B): a thread has read four together."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def keep_largest(x, classes, inside, state, TILE: tl.constexpr):
    """Move the largest scores of a tile (R, B) to the state (R), which has none; the others.

    Of equal scores some, by their columns.
    """
    M: tl.constexpr = TILE.kept
    ENTRIES: tl.constexpr = TILE.entries
    slots = tl.arange(0, TILE.slots)[None, :]
    room = inside[:, None] & (slots < M)
    tl.store(state[:, None] + slots, float("-inf"), room)
    tl.store(state[:, None] + ENTRIES + slots, -1.0, room)
    keys = tl.maximum(as_key(x), ABSENT)
    low, high, above = bounds(keys, M, TILE.slots)
    # What is above, in the lower half of a number, and what is between, in the upper.
    kind = tl.where(keys > high, 1, tl.where(keys > low, 1 << 16, 0))
    kinds, scores, places = quarters(kind), quarters(x), quarters(classes)
    total = kinds[0] + kinds[1] + kinds[2] + kinds[3]
    so_far = tl.cumsum(total, 1) - total
    tl.debug_barrier()
    rest = ()
    for i in tl.static_range(4):
        is_above = kinds[i] == 1
        at = tl.where(is_above, so_far & 0xFFFF, above + (so_far >> 16))
        leaves = (kinds[i] > 0) & (at < M) & (scores[i] > float("-inf"))
        tl.store(state[:, None] + at, scores[i], inside[:, None] & leaves)
        tl.store(state[:, None] + ENTRIES + at, places[i], inside[:, None] & leaves)
        so_far += kinds[i]
        rest = rest + (tl.where(leaves, float("-inf"), scores[i]),)
    tl.debug_barrier()
    even, odd = tl.join(rest[0], rest[2]), tl.join(rest[1], rest[3])
    return tl.reshape(tl.join(even, odd), x.shape)


@triton.jit
def load_heads(state, inside, TILE: tl.constexpr):
    """Keys and classes of what states (R) keep, (R, slots), and the smallest score, (R)."""
    M: tl.constexpr = TILE.kept
    slots = tl.arange(0, TILE.slots)[None, :]
    kept = inside[:, None] & (slots < M)
    heads = as_key(tl.load(state[:, None] + slots, kept, float("-inf")).to(tl.float32))
    heads = tl.where(slots < M, heads, NOWHERE)
    places = tl.load(state[:, None] + TILE.entries + slots, kept, -1.0).to(tl.int32)
    return heads, places, tl.maximum(as_score(tl.min(heads, 1)), LOWEST)


@triton.jit
def load_labels(problem, row, inside, ignore_index, TILE: tl.constexpr):
    """The labels of rows, (R, slots), −1 for padding and behind them."""
    LABELS: tl.constexpr = TILE.labels
    slots = tl.arange(0, TILE.slots)[None, :]
    there = inside[:, None] & (slots < LABELS)
    label = tl.load(problem.labels + row[:, None] * LABELS + slots, there, NO_CLASS)
    return tl.where(label == ignore_index, NO_CLASS, label)


@triton.jit
def load_tile(line, labels, inside, columns, TILE: tl.constexpr):
    """Scores from the first of two columns on and before the second, without labels."""
    begin, end = columns
    column = begin + tl.arange(0, TILE.block)[None, :]
    x = tl.load(line + column, inside[:, None] & (column < end), float("-inf")).to(tl.float32)
    near = (labels >= begin) & (labels < begin + TILE.block)
    if tl.max(tl.max(near.to(tl.int32), 1), 0) > 0:
        slots = tl.arange(0, TILE.slots)[None, :]
        for i in range(TILE.labels):
            label = tl.max(tl.where((slots == i) & near, labels, NO_CLASS), 1).to(tl.int32)
            x = tl.where(column == label[:, None], float("-inf"), x)
    return x, tl.broadcast_to(column, x.shape)


@triton.jit
def read_rows(problem, shape, state, row, inside, columns, rate, ignore_index, TILE: tl.constexpr):
    """Leave at ``state`` (R) the states of rows (R), from the first of two columns to the second.

    The first column is a multiple of the block; the second, and the stride, of what is aligned.
    """
    K: tl.constexpr = TILE.k
    M: tl.constexpr = TILE.kept
    ENTRIES: tl.constexpr = TILE.entries
    SLOTS: tl.constexpr = TILE.slots
    BLOCK: tl.constexpr = TILE.block
    ROWS: tl.constexpr = TILE.rows
    rate = tl.cast(rate, tl.float32)
    stride = multiple(shape.stride, TILE.aligned)
    line = problem.scores + row[:, None] * tl.cast(stride, tl.int64)
    start, end = multiple(columns[0], BLOCK), multiple(columns[1], TILE.aligned)
    labels = load_labels(problem, row, inside, ignore_index, TILE)
    slots = tl.arange(0, SLOTS)[None, :]
    kept = inside[:, None] & (slots < M)
    heads, places = no_heads(ROWS, M, SLOTS)
    base = tl.full((ROWS,), LOWEST, tl.float32)
    sums = ()
    for _ in tl.static_range(K):
        sums = sums + (tl.zeros((ROWS,), tl.float64),)
    for begin in range(start, end, BLOCK):
        x, classes = load_tile(line, labels, inside, (begin, end), TILE)
        if begin == start:
            x = keep_largest(x, classes, inside, state, TILE)
            heads, places, threshold = load_heads(state, inside, TILE)
        else:
            x, heads, places, threshold = take_heads(x, classes, heads, places)
        sums = rescaled(sums, relative(base, threshold, rate, 0).to(tl.float64), K)
        base = threshold
        sums = add_powers(sums, relative(x, base[:, None], rate, 0), K)

    tl.store(state[:, None] + slots, as_score(heads), kept)
    tl.store(state[:, None] + ENTRIES + slots, places, kept)
    store_sums(state, inside, sums, base, TILE)


@triton.jit
def store_sums(state, inside, sums, threshold, TILE: tl.constexpr):
    """Write power sums and threshold."""
    K: tl.constexpr = TILE.k
    ENTRIES: tl.constexpr = TILE.entries
    ROWS: tl.constexpr = TILE.rows
    SLOTS: tl.constexpr = TILE.slots
    slots = tl.arange(0, SLOTS)[None, :]
    all_sums = tl.zeros((ROWS, SLOTS), tl.float64)
    for j in tl.static_range(K):
        all_sums = tl.where(slots == j, sums[j][:, None], all_sums)
    tl.store(state[:, None] + 2 * ENTRIES + slots, all_sums, inside[:, None] & (slots < K))
    tl.store(state + 2 * ENTRIES + K, threshold, inside)


@triton.jit(do_not_specialize=("rows", "columns", "stride", "piece", "ignore_index"))
def wide_state_kernel(
    problem, buffer, rows, columns, stride, piece, ignore_index, rate, TILE: tl.constexpr
):
    """States of columns ``piece·i`` to ``piece·(i + 1)`` of a tile of rows, from buffer[1] on.

    ``rate`` is log2(e) / temperature.
    """
    row = tl.program_id(0).to(tl.int64) * TILE.rows + tl.arange(0, TILE.rows)
    part, parts = tl.program_id(1), tl.num_programs(1)
    start = part * piece
    end = tl.minimum(start + piece, columns)
    state = buffer + 1 + (row * parts + part) * TILE.size
    shape = Shape(columns, stride, parts)
    read_rows(problem, shape, state, row, row < rows, (start, end), rate, ignore_index, TILE)
