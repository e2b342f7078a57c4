"""Loads, stores and atomic operations as steps of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .floats import DTYPES, larger, smaller
from .integers import UNSIGNED, dtype_of
from .memory import InvalidAccess, Memory
from .parse import Address, Instruction, Register
from .threads import Step, Threads

if TYPE_CHECKING:
    from .decode import Decoder

Array = np.ndarray
LOCAL = 1 << 61
"""Where the local memory of a thread lies, for instructions that name no space."""


def _shape(instruction: Instruction) -> tuple[str, int, str]:
    """Where, how many numbers at once and of which type."""
    _, *modifiers, kind = instruction.opcode
    spaces = [m.split("::")[0] for m in modifiers]
    space = next((s for s in spaces if s in ("global", "shared", "local", "param")), "")
    count = next((int(m[1:]) for m in modifiers if m in ("v2", "v4", "v8")), 1)
    return space, count, kind


def _widened(values: Array, kind: str, register: Register) -> Array:
    """Loaded numbers as wide as the register, with their sign if they have one."""
    if values.dtype.itemsize == register.width:
        return values
    signed = values.view(dtype_of(kind)) if kind[0] in "su" else values
    return signed.astype(UNSIGNED[register.width])


def _check_alignment(addresses: Array, size: int, instruction: Instruction) -> None:
    if (addresses & (size - 1)).any():
        raise InvalidAccess(f"{instruction}: not aligned to {size} bytes")


def load(decoder: Decoder, instruction: Instruction) -> Step:
    """``ld.global.v2.b32 {a, b}, [address]``."""
    space, _, kind = _shape(instruction)
    to, source = instruction.operands
    targets = to if isinstance(to, tuple) else (to,)
    width = int(kind[1:]) // 8
    if space == "param":
        return _load_parameter(targets[0], source, kind)
    address = decoder.address(source)

    def read(t: Threads, memory: Memory, active: Array, addresses: Array) -> None:
        for i, register in enumerate(targets):
            some = memory.load(addresses + i * width, width, t.numbers[active], t.clock)
            values = np.zeros(t.count, some.dtype)
            values[active] = some
            t.write(register.index, _widened(values, kind, register))

    local = _load_local(targets, address, width)
    return _access(instruction, address, local, read, "loaded")


def store(decoder: Decoder, instruction: Instruction) -> Step:
    """``st.global.v2.b32 [address], {a, b}``."""
    space, _, kind = _shape(instruction)
    target, source = instruction.operands
    sources = source if isinstance(source, tuple) else (source,)
    width = int(kind[1:]) // 8
    values = [decoder.getter(one, UNSIGNED[width]) for one in sources]
    if space == "param":
        return _store_parameter(target, values[0], width)
    address = decoder.address(target)

    def write(t: Threads, memory: Memory, active: Array, addresses: Array) -> None:
        for i, value in enumerate(values):
            memory.store(addresses + i * width, value(t)[active], t.numbers[active], t.clock)

    local = _store_local(address, values, width)
    return _access(instruction, address, local, write, "stored")


def _access(
    instruction: Instruction,
    address: Callable[[Threads], Array],
    local: Step,
    access: Callable[[Threads, Memory, Array, Array], None],
    counted: str,
) -> Step:
    """A load or store where its addresses lie; those without a space may be local."""
    space, count, kind = _shape(instruction)
    size = count * int(kind[1:]) // 8
    if space == "local":
        return local

    def step(t: Threads) -> None:
        active = t.active()
        addresses = address(t)[active]
        if not space and addresses[0] >= LOCAL:
            local(t)
            return
        _check_alignment(addresses, size, instruction)
        if space != "shared":
            t.bytes[counted] += addresses.size * size
        access(t, t.shared if space == "shared" else t.global_memory, active, addresses)

    return step


def _load_parameter(to: Register, source: Address, kind: str) -> Step:
    width, offset = int(kind[1:]) // 8, source.offset

    def step(t: Threads) -> None:
        data = t.frame.parameters[source.base][:, offset : offset + width]
        values = np.ascontiguousarray(data).view(UNSIGNED[width])[:, 0]
        t.write(to.index, _widened(values, kind, to))

    return step


def _store_parameter(target: Address, value: object, width: int) -> Step:
    def step(t: Threads) -> None:
        data = value(t).view(np.uint8).reshape(t.count, width)
        known = t.frame.parameters.get(target.base)
        size = target.offset + width
        if known is None or known.shape[1] < size:
            grown = np.zeros((t.count, size), np.uint8)
            if known is not None:
                grown[:, : known.shape[1]] = known
            known = t.frame.parameters[target.base] = grown
        active = t.active()
        known[active, target.offset : size] = data[active]

    return step


def _load_local(targets: Sequence[Register], address: object, width: int) -> Step:
    def step(t: Threads) -> None:
        first = address(t) % LOCAL
        for i, to in enumerate(targets):
            at = np.clip(first + i * width, 0, t.local.shape[1] - width)
            data = np.take_along_axis(t.local, at[:, None] + np.arange(width), 1)
            t.write(to.index, data.view(UNSIGNED[width])[:, 0].astype(UNSIGNED[to.width]))

    return step


def _store_local(address: object, values: Sequence[object], width: int) -> Step:
    def step(t: Threads) -> None:
        active = t.active()
        at = address(t)[active] % LOCAL
        if at.min() < 0 or at.max() + len(values) * width > t.local.shape[1]:
            raise InvalidAccess("a store outside of a thread's local memory")
        for i, value in enumerate(values):
            data = value(t).view(np.uint8).reshape(t.count, width)
            t.local[active[:, None], at[:, None] + i * width + np.arange(width)] = data[active]

    return step


OPERATIONS = {
    "add": lambda old, x: old + x,
    "exch": lambda old, x: x,
    "min": lambda old, x: smaller(old, x) if old.dtype.kind == "f" else np.minimum(old, x),
    "max": lambda old, x: larger(old, x) if old.dtype.kind == "f" else np.maximum(old, x),
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "cas": lambda old, expected, x: np.where(old == expected, x, old),
}


def atomic(decoder: Decoder, instruction: Instruction) -> Step:
    """``atom.global.gpu.acq_rel.add.f64 old, [address], x``, thread by thread."""
    name, *modifiers, kind = instruction.opcode
    operands = instruction.operands if name == "atom" else (None, *instruction.operands)
    to, target, *sources = operands
    dtype = DTYPES[kind] if kind in DTYPES else dtype_of(kind)
    width = np.dtype(dtype).itemsize
    function = OPERATIONS[next(m for m in modifiers if m in OPERATIONS)]
    if "global" not in modifiers:
        raise NotImplementedError(str(instruction))
    address, values = decoder.address(target), [decoder.getter(s, dtype) for s in sources]
    orders = "acq_rel" in modifiers

    def step(t: Threads) -> None:
        addresses, given = address(t), [value(t) for value in values]
        result = np.zeros(t.count, dtype)
        for i in t.active():
            at, one = addresses[i : i + 1], t.numbers[i : i + 1]
            _check_alignment(at, width, instruction)
            if orders:
                known = t.published.setdefault(int(at[0]), np.zeros_like(t.clock.known))
                t.clock.atomic(int(one[0]), known)
            old = t.global_memory.load(at, width, one, None).view(dtype)
            new = function(old, *(value[i : i + 1] for value in given))
            t.global_memory.store(at, new.view(UNSIGNED[width]), one, None)
            result[i] = old[0]
        if to is not None and to != "_":
            t.write(to.index, result)

    return step
