"""Second kernels of the operators: from the states of rows to log σ, or to marginal constants."""

import triton
import triton.language as tl

from topklass.kernels.smooth.row_constants import load_sums, merge_parts, newton, polynomials
from topklass.kernels.smooth.row_state import LOWEST


@triton.jit
def whole_rows(buffer, rows, parts, TILE: tl.constexpr):
    """This program's rows (R), whether they exist, and where their states are, pieces merged."""
    states = buffer + 1
    row = tl.program_id(0).to(tl.int64) * TILE.rows + tl.arange(0, TILE.rows)
    inside = row < rows
    if TILE.parts > 1:
        merge_parts(states, row, inside, parts, 1.0, TILE)
    return row, inside, states + row * parts * (3 * TILE.k + 2)


@triton.jit
def log_add(a, b):
    """Log of the sum of exponentials, −inf for two of −inf."""
    high = tl.maximum(a, b)
    rest = tl.exp(tl.minimum(a, b) - tl.where(high == float("-inf"), 0.0, high))
    spoilt = (a != a) | (b != b)
    return tl.where(spoilt, float("nan"), high + tl.log(1 + rest))


@triton.jit(do_not_specialize=("rows", "parts"))
def log_esp_kernel(buffer, result, rows, parts, TILE: tl.constexpr):
    """Log σ_0 … log σ_k of rows: the heads join in log space, where nothing underflows."""
    K: tl.constexpr = TILE.k
    ROWS: tl.constexpr = TILE.rows
    SLOTS: tl.constexpr = TILE.slots
    row, inside, state = whole_rows(buffer, rows, parts, TILE)
    q = newton(load_sums(state, inside, K), K)
    log_s = ()
    for j in tl.static_range(K + 1):
        log_s = log_s + (tl.log(tl.where(q[j] < 0, 0.0, q[j])),)

    lowest = tl.full((ROWS,), float("inf"), tl.float64)
    for i in range(K):
        head = tl.load(state + i, inside, 0.0)
        lowest = tl.where(head < LOWEST, lowest, tl.where(head > lowest, lowest, head))
    lowest = tl.where(lowest == float("inf"), 0.0, lowest)
    height = tl.zeros((ROWS,), tl.float64)
    for i in range(K):
        head = tl.load(state + i, inside, 0.0)
        absent = head < LOWEST
        rise = tl.where(absent, 0.0, head - lowest)
        height += rise
        joined = (tl.where(absent, log_s[0], log_s[0] - rise),)
        for j in tl.static_range(1, K + 1):
            with_head = log_add(log_s[j] - rise, log_s[j - 1])
            joined = joined + (tl.where(absent, log_s[j], with_head),)
        log_s = joined
    degree = tl.arange(0, 2 * SLOTS)[None, :]
    values = tl.zeros((ROWS, 2 * SLOTS), tl.float64)
    for j in tl.static_range(K + 1):
        value = tl.where(log_s[j] == float("-inf"), log_s[j], log_s[j] + height + j * lowest)
        values = tl.where(degree == j, value[:, None], values)
    kept = inside[:, None] & (degree <= K)
    tl.store(result + row[:, None] * (K + 1) + degree, values, kept)


@triton.jit(do_not_specialize=("rows", "parts"))
def marginal_constants_kernel(buffer, rows, parts, TILE: tl.constexpr):
    """Replace states by the constants of ``π_i = u_i Σ_m (−u_i)^m S_{k−1−m} / S_k``."""
    K: tl.constexpr = TILE.k
    ROWS: tl.constexpr = TILE.rows
    _, inside, constants = whole_rows(buffer, rows, parts, TILE)
    slots = tl.arange(0, TILE.slots)[None, :]
    kept = inside[:, None] & (slots < K)
    _, _, product, whole = polynomials(constants, inside, 1.0, TILE)
    over = 1 / whole[K]
    of_tail = over
    for j in tl.static_range(1, K + 1):
        c = whole[K - j] * over
        of_tail = tl.where(slots == j - 1, c if j % 2 == 1 else -c, of_tail)
    tl.debug_barrier()
    tl.store(constants[:, None] + slots, product[K - 1] * over, kept)
    tl.store(constants[:, None] + 2 * K + slots, of_tail, kept)
    tl.store(constants + 3 * K + 1, tl.full((ROWS,), 1.0, tl.float64), inside)
