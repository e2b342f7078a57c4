"""What the kernels on rows of scores share: how work is divided, and the first and last launch."""

from functools import lru_cache
from math import e, gcd, log2
from typing import NamedTuple

import torch
from torch import Tensor

from topklass.kernels.gradient import gradient_kernel
from topklass.kernels.launch import launch
from topklass.kernels.row_state import row_state_kernel
from topklass.reference.limits import LARGEST_K_IN_FLOAT32

LOG2_E = log2(e)
MOST_PROGRAMS = 4096
"""Enough to fill a GPU; each takes several tiles."""
SMALL = 2**22
"""Up to this many scores a launch costs more than what it does."""
LARGEST_K_JOINED = 16
"""Beyond it two kernels use fewer registers, and compile faster, than one."""


class Tiles(NamedTuple):
    """How the work on rows is divided."""

    slots: int
    """Room for the heads, a power of two."""
    precision: int
    """Of the tail and its powers, see ``row_state.relative``."""
    joined: bool
    """First and second kernel in one launch."""
    rows: int
    """Rows of a tile of the first kernel."""
    block: int
    """Its columns."""
    warps: int
    parts: int
    """Pieces of a row, each for one program."""
    piece: int
    """Columns of a piece."""
    merged: int
    """Room for the pieces, a power of two."""
    constant_rows: int
    """Rows of a tile of the second kernel."""
    programs: int
    """Programs of the second kernel."""
    gradient_rows: int
    """Rows of a tile of the third kernel."""
    gradient_block: int


def plan(rows: int, columns: int, k: int, exact: bool = False) -> Tiles:
    """Tiles that keep a GPU busy: one warp for a tile, several tiles for a row, or the reverse."""
    compiling = torch.compiler.is_compiling()
    return (_plan if compiling else _remembered_plan)(rows, columns, k, exact)


def _plan(rows: int, columns: int, k: int, exact: bool) -> Tiles:
    slots = room_for_heads(k)
    small = rows * columns <= SMALL and columns <= 2**14
    joined = small and k <= LARGEST_K_JOINED and not exact
    if joined and columns > 1024:
        block, warps = 4096, 8
    else:
        widest = 512 if k <= LARGEST_K_IN_FLOAT32 else 256
        block, warps = min(widest, max(32, power_of_two(columns))), 1
    parts, piece = 1, columns
    if not joined:
        tiles = -(-columns // block)
        piece = -(-tiles // max(1, min(tiles // 4, 2048 // rows, 32))) * block
        parts = int(-(-columns // piece))
    tall = max(1, 256 // block)
    constant_rows = tall if joined else 1 if parts > 1 else max(1, 32 // slots)
    gradient_block = min(1024, max(32, power_of_two(columns)))
    return Tiles(
        slots=slots,
        precision=2 if exact else int(k > LARGEST_K_IN_FLOAT32),
        joined=joined,
        rows=tall,
        block=block,
        warps=warps,
        parts=parts,
        piece=piece,
        merged=power_of_two(parts),
        constant_rows=constant_rows,
        programs=min(-(-rows // constant_rows), MOST_PROGRAMS),
        gradient_rows=max(1, 256 // gradient_block),
        gradient_block=gradient_block,
    )


_remembered_plan = lru_cache(maxsize=1024)(_plan)


def row_buffer(scores: Tensor, k: int, tiles: Tiles) -> Tensor:
    """Room for a number, the states of rows, and two sums for each program."""
    size = 1 + scores.shape[0] * tiles.parts * (3 * k + 2) + 2 * tiles.programs
    return scores.new_empty(size, dtype=torch.float64)


def read_states(
    scores: Tensor,
    labels: Tensor | None,
    k: int,
    temperature: float,
    tiles: Tiles,
    buffer: Tensor,
) -> None:
    """Write the states of rows into the buffer."""
    rows, columns = scores.shape
    stride = scores.stride(0)
    launch(
        row_state_kernel,
        (-(-rows // tiles.rows), tiles.parts, 1),
        (
            scores,
            scores if labels is None else labels,
            buffer,
            rows,
            columns,
            stride,
            tiles.piece,
            LOG2_E / temperature,
        ),
        (
            k,
            tiles.slots,
            labels is not None,
            tiles.precision,
            alignment(scores),
            tiles.rows,
            tiles.block,
        ),
        tiles.warps,
        scores,
    )


def gradient(
    scores: Tensor,
    labels: Tensor | None,
    buffer: Tensor,
    outgoing: Tensor,
    mean: bool,
    k: int,
    temperature: float,
    tiles: Tiles,
) -> Tensor:
    """The gradient (R, n) from the constants in the buffer, scaled by the outgoing one, () or (R).

    ``mean``: and divided by the buffer's first number.
    """
    rows, columns = scores.shape
    stride = scores.stride(0)
    result = torch.empty_like(scores, memory_format=torch.contiguous_format)
    launch(
        gradient_kernel,
        (-(-rows // tiles.gradient_rows), -(-columns // tiles.gradient_block), 1),
        (
            scores,
            scores if labels is None else labels,
            buffer,
            outgoing,
            result,
            rows,
            columns,
            stride,
            tiles.parts,
            outgoing.stride(0) if outgoing.dim() else 0,
            LOG2_E / temperature,
        ),
        (
            k,
            tiles.slots,
            labels is not None,
            mean,
            tiles.precision,
            alignment(scores),
            tiles.gradient_rows,
            tiles.gradient_block,
        ),
        1,
        scores,
    )
    return result


def alignment(scores: Tensor) -> int:
    """What divides the beginnings and the lengths of rows, as far as it matters for reading."""
    return gcd(scores.stride(0), scores.shape[1], 16)


def with_whole_rows(scores: Tensor) -> Tensor:
    """Scores whose rows lie in one piece in memory."""
    return scores if scores.stride(1) == 1 else scores.contiguous()


def room_for_heads(k: int) -> int:
    """Slots for k heads."""
    return max(2, power_of_two(k))


def power_of_two(number: int) -> int:
    """The next power of two."""
    return 1 << (int(number) - 1).bit_length()


def halves(value: float) -> tuple[float, float]:
    """A number as the sum of two of single precision, in which kernels take their arguments."""
    high = value * (2.0**29 + 1)
    high -= high - value  # the 24 leading bits
    return high, value - high
