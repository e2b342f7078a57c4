"""What the kernels on rows of scores share: how work is divided, and the first and last launch."""

from functools import lru_cache
from math import e, gcd, log2
from typing import NamedTuple

import torch
from torch import Tensor

from topkit.kernels.gradient import gradient_kernel
from topkit.kernels.launch import launch
from topkit.kernels.row_state import row_state_kernel
from topkit.reference.limits import LARGEST_K_IN_FLOAT32

LOG2_E = log2(e)


class Tiles(NamedTuple):
    """How the work on rows is divided."""

    slots: int
    """Room for the heads, a power of two."""
    precision: int
    """Of the tail and its powers, see ``row_state.relative``."""
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
    gradient_rows: int
    """Rows of a tile of the third kernel."""
    gradient_block: int
    gradient_warps: int


def plan(rows: int, columns: int, k: int, exact: bool = False) -> Tiles:
    """Tiles that keep a GPU busy: one warp for a tile, several tiles for a row, or the reverse."""
    compiling = torch.compiler.is_compiling()
    return (_plan if compiling else _remembered_plan)(rows, columns, k, exact)


def _plan(rows: int, columns: int, k: int, exact: bool) -> Tiles:
    slots = max(2, power_of_two(k))
    block = min(1024, max(32, power_of_two(columns)))
    tiles = -(-columns // block)
    parts = int(max(1, min(tiles // 2, 4096 // max(rows, 1), 32)))
    piece = -(-tiles // parts) * block
    parts = -(-columns // piece)
    return Tiles(
        slots=slots,
        precision=2 if exact else int(k > LARGEST_K_IN_FLOAT32),
        rows=max(1, 256 // block),
        block=block,
        warps=1,
        parts=parts,
        piece=piece,
        merged=power_of_two(parts),
        constant_rows=max(1, 32 // slots) if parts == 1 else 1,
        gradient_rows=max(1, 512 // block),
        gradient_block=block,
        gradient_warps=1 if block < 1024 else 2,
    )


_remembered_plan = lru_cache(maxsize=1024)(_plan)


def row_states(
    scores: Tensor,
    labels: Tensor | None,
    k: int,
    temperature: float,
    tiles: Tiles,
    summary: Tensor,
) -> Tensor:
    """The states of rows, (R, parts, 3k + 2), and a summary that begins with 0."""
    rows, columns = scores.shape
    states = scores.new_empty((rows, tiles.parts, 3 * k + 2), dtype=torch.float64)
    launch(
        row_state_kernel,
        (-(-rows // tiles.rows), tiles.parts, 1),
        (
            scores,
            scores if labels is None else labels,
            states,
            summary,
            rows,
            columns,
            scores.stride(0),
            tiles.piece,
            LOG2_E / temperature,
        ),
        (
            k,
            tiles.slots,
            labels is not None,
            tiles.precision,
            gcd(scores.stride(0), 16),
            tiles.rows,
            tiles.block,
        ),
        tiles.warps,
        scores,
    )
    return states


def gradient(
    scores: Tensor,
    labels: Tensor | None,
    states: Tensor,
    outgoing: Tensor,
    divide_by: Tensor | None,
    k: int,
    temperature: float,
    tiles: Tiles,
) -> Tensor:
    """The gradient (R, n) from the constants of rows, scaled by the outgoing one, () or (R)."""
    rows, columns = scores.shape
    result = torch.empty_like(scores, memory_format=torch.contiguous_format)
    launch(
        gradient_kernel,
        (-(-rows // tiles.gradient_rows), -(-columns // tiles.gradient_block), 1),
        (
            scores,
            scores if labels is None else labels,
            states,
            outgoing,
            states if divide_by is None else divide_by,
            result,
            rows,
            columns,
            scores.stride(0),
            tiles.parts,
            outgoing.stride(0) if outgoing.dim() else 0,
            LOG2_E / temperature,
        ),
        (
            k,
            tiles.slots,
            labels is not None,
            divide_by is not None,
            tiles.precision,
            gcd(scores.stride(0), columns, 16),
            tiles.gradient_rows,
            tiles.gradient_block,
        ),
        tiles.gradient_warps,
        scores,
    )
    return result


def power_of_two(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()
