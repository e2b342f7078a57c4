"""Instructions in which the threads of a warp take part together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .integers import dtype_of
from .parse import Instruction
from .threads import Step, Threads

if TYPE_CHECKING:
    from .decode import Decoder

Array = np.ndarray
LANES = np.arange(32)
REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


class Diverged(RuntimeError):
    """Threads of a warp that should take part are elsewhere."""


def step(decoder: Decoder, instruction: Instruction) -> Step:
    """What an instruction of warps does."""
    name = instruction.opcode[0]
    if name == "bar":
        return _synchronise(decoder, instruction)
    if name == "shfl":
        return _shuffle(decoder, instruction)
    if name == "redux":
        return _reduce(decoder, instruction)
    if name == "vote":
        return _vote(decoder, instruction)
    if name in ("ldmatrix", "stmatrix"):
        return _matrix(decoder, instruction)
    raise NotImplementedError(str(instruction))


def _check_members(t: Threads, members: Array, instruction: Instruction) -> None:
    """All threads that take part are here, and all that are here take part."""
    mine = (members >> (t.numbers % 32).astype(np.uint32) & np.uint32(1)).astype(np.bool_)
    if t.mask is not None:
        if (t.mask & ~mine).any():
            raise Diverged(f"{instruction}: a thread that is not in the mask of members")
        warps = t.mask.reshape(-1, 32)
        mine = mine.reshape(-1, 32) & warps.any(1, keepdims=True)
        if (mine & ~warps).any():
            raise Diverged(f"{instruction}: a thread of the mask of members is elsewhere")
    elif not mine.all():
        raise Diverged(f"{instruction}: a thread that is not in the mask of members")


def _synchronise(decoder: Decoder, instruction: Instruction) -> Step:
    """A barrier of a program that is one warp."""
    members = decoder.getter(instruction.operands[0], np.uint32)

    def step(t: Threads) -> None:
        if t.clock.warps > 1:
            raise NotImplementedError(f"{instruction} where there are several warps")
        _check_members(t, members(t), instruction)
        t.clock.barrier()

    return step


def _shuffle(decoder: Decoder, instruction: Instruction) -> Step:
    _, _, mode, _ = instruction.opcode
    to, *rest = instruction.operands
    value, by, clamp, members = (decoder.getter(one, np.uint32) for one in rest)

    def step(t: Threads) -> None:
        _check_members(t, members(t), instruction)
        lane = (t.numbers % 32).astype(np.int64)
        limits, b = clamp(t).astype(np.int64), by(t).astype(np.int64) & 31
        segment = limits >> 8 & 31
        top = (lane & segment) | (limits & 31 & ~segment)
        if mode == "up":
            source, inside = lane - b, lane - b >= top
        elif mode == "idx":
            source = (lane & segment) | (b & ~segment)
            inside = source <= top
        else:
            source = lane + b if mode == "down" else lane ^ b
            inside = source <= top
        at = np.arange(t.count) - lane + np.where(inside, source, lane)
        if t.mask is not None and not t.mask[at][t.mask].all():
            raise Diverged(f"{instruction}: reads from a thread that is elsewhere")
        t.write(to.index, value(t)[at])

    return step


def _reduce(decoder: Decoder, instruction: Instruction) -> Step:
    _, _, name, kind = instruction.opcode
    to, value, members = instruction.operands
    value, members = decoder.getter(value, dtype_of(kind)), decoder.getter(members, np.uint32)
    function = REDUCTIONS[name]

    def step(t: Threads) -> None:
        _check_members(t, members(t), instruction)
        warps = np.ones((1, 32)) if t.mask is None else t.mask.reshape(-1, 32)
        if (warps.any(1) != warps.all(1)).any():
            raise NotImplementedError(f"{instruction} of a part of a warp")
        totals = function.reduce(value(t).reshape(-1, 32), 1, dtype=dtype_of(kind))
        t.write(to.index, np.repeat(totals, 32))

    return step


def _vote(decoder: Decoder, instruction: Instruction) -> Step:
    _, _, mode, _ = instruction.opcode
    to, value, members = instruction.operands
    value, members = decoder.getter(value, np.bool_), decoder.getter(members, np.uint32)
    weights = np.uint32(1) << LANES.astype(np.uint32)
    functions: dict[str, Callable[[Array, Array], Array]] = {
        "any": lambda x, here: (x & here).any(1),
        "all": lambda x, here: (x | ~here).all(1),
        "ballot": lambda x, here: ((x & here) * weights).sum(1, dtype=np.uint32),
    }

    def step(t: Threads) -> None:
        _check_members(t, members(t), instruction)
        here = np.ones((t.count // 32, 32), np.bool_) if t.mask is None else t.mask.reshape(-1, 32)
        t.write(to.index, np.repeat(functions[mode](value(t).reshape(-1, 32), here), 32))

    return step


def _matrix(decoder: Decoder, instruction: Instruction) -> Step:
    """Load or store eight rows of eight numbers of 16 bits; a thread has two of one row.

    Of a transposed matrix, it has two of one column.
    """
    loads = instruction.opcode[0] == "ldmatrix"
    registers, place = instruction.operands[:: 1 if loads else -1]
    if "m8n8" not in instruction.opcode:
        raise NotImplementedError(str(instruction))
    outer, inner, part = LANES // 4, LANES % 4, np.dtype(np.uint32)
    places = [(outer, 4 * inner)]
    if "trans" in instruction.opcode:
        places, part = [(2 * inner, 2 * outer), (2 * inner + 1, 2 * outer)], np.dtype(np.uint16)
    address = decoder.address(place)
    values = [decoder.getter(register, np.uint32) for register in registers]

    def step(t: Threads) -> None:
        if t.mask is not None:
            raise NotImplementedError(f"{instruction} of a part of the program")
        rows = address(t).reshape(-1, 32)
        for i, register in enumerate(registers):
            at = [(rows[:, 8 * i + row] + column).ravel() for row, column in places]
            if loads:
                parts = [t.shared.load(one, part.itemsize, t.numbers, t.clock) for one in at]
                t.write(register.index, np.stack(parts, 1).view(np.uint32)[:, 0])
            else:
                parts = values[i](t).view(part).reshape(t.count, -1).T
                for one, value in zip(at, parts, strict=True):
                    t.shared.store(one, value, t.numbers, t.clock)

    return step
