"""Integer and bit instructions of PTX on arrays, one number for each thread."""

from collections.abc import Callable
from functools import cache

import numpy as np

Array = np.ndarray
UNSIGNED = {0: np.bool_, 1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def dtype_of(kind: str) -> type:
    """The type of numbers named as in PTX: u32, s64, b16, pred; bits are unsigned."""
    if kind == "pred":
        return np.bool_
    return (SIGNED if kind[0] == "s" else UNSIGNED)[int(kind[1:]) // 8]


def wide_of(x: Array) -> Array:
    """The same numbers with twice the bits."""
    return x.astype((SIGNED if x.dtype.kind == "i" else UNSIGNED)[2 * x.dtype.itemsize])


def high(a: Array, b: Array) -> Array:
    """The upper half of a product."""
    if a.dtype.itemsize == 8:
        product = a.astype(object) * b.astype(object)
        return (product >> 64).astype(a.dtype)
    return (wide_of(a) * wide_of(b) >> a.dtype.type(8 * a.dtype.itemsize)).astype(a.dtype)


def _shift(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """Shift by a number of bits, clamped to the width."""

    def shifted(a: Array, count: Array) -> Array:
        bits = 8 * a.dtype.itemsize
        inside = np.minimum(count, bits - 1).astype(a.dtype)
        result = function(a, inside)
        if function is np.right_shift and a.dtype.kind == "i":
            return result
        return np.where(count < bits, result, a.dtype.type(0))

    return shifted


def bit_field(a: Array, start: Array, length: Array) -> Array:
    """So many bits from one on; of signed numbers the highest is repeated."""
    bits = 8 * a.dtype.itemsize
    start, length = start & np.uint32(255), length & np.uint32(255)
    above = bits - np.minimum(start + length, bits)
    upward = _shift(np.left_shift)(a.view(UNSIGNED[a.dtype.itemsize]), above).view(a.dtype)
    return np.where(length == 0, a.dtype.type(0), _shift(np.right_shift)(upward, above + start))


def permuted_bytes(a: Array, b: Array, selector: Array) -> Array:
    """Four bytes of b:a, each by four bits of the selector: a number, and whether only its sign."""
    both = (b.astype(np.uint64) << np.uint64(32)) | a
    result = np.zeros_like(a)
    for i in range(4):
        choice = selector >> np.uint32(4 * i)
        byte = (both >> (choice & np.uint32(7)).astype(np.uint64) * np.uint64(8)) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        byte = np.where(choice & np.uint32(8), sign, byte)
        result |= byte.astype(np.uint32) << np.uint32(8 * i)
    return result


def lookup(a: Array, b: Array, c: Array, table: Array) -> Array:
    """The logical function of three numbers, bit by bit, whose eight values are a table."""
    result = np.zeros_like(a)
    for i in range(8):
        chosen = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        result |= np.where(table >> np.uint32(i) & np.uint32(1), chosen, np.uint32(0))
    return result


def funnel(left: bool, wrap: bool) -> Callable[[Array, Array, Array], Array]:
    """The 32 bits of b:a, shifted: the upper ones to the left, the lower ones to the right."""

    def shifted(a: Array, b: Array, count: Array) -> Array:
        both = (b.astype(np.uint64) << np.uint64(32)) | a
        count = (count & np.uint32(31) if wrap else np.minimum(count, 32)).astype(np.uint64)
        if left:
            return ((both << count) >> np.uint64(32)).astype(np.uint32)
        return (both >> count).astype(np.uint32)

    return shifted


def leading_zeros(a: Array) -> Array:
    """How many bits before the first one."""
    bits = 8 * a.dtype.itemsize
    lengths = [int(x).bit_length() for x in a]
    return np.array([bits - n for n in lengths], np.uint32)


def population(a: Array) -> Array:
    """How many bits are one."""
    return np.bitwise_count(a).astype(np.uint32)


def reversed_bits(a: Array) -> Array:
    """All bits in the opposite order."""
    bits = 8 * a.dtype.itemsize
    return np.array([int(f"{int(x):0{bits}b}"[::-1], 2) for x in a], a.dtype)


FUNCTIONS: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "neg": np.negative,
    "abs": np.abs,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "shl": _shift(np.left_shift),
    "shr": _shift(np.right_shift),
    "bfe": bit_field,
    "prmt": permuted_bytes,
    "lop3": lookup,
    "clz": leading_zeros,
    "popc": population,
    "brev": reversed_bits,
    "div": lambda a, b: (a.astype(object) // b.astype(object)).astype(a.dtype),
    "rem": np.fmod,
}
COUNTS = {"shl": (1,), "shr": (1,), "bfe": (1, 2)}
"""Operands that are unsigned numbers of 32 bits, whatever the type."""


@cache
def integer(opcode: tuple[str, ...]) -> Callable[..., Array]:
    """The function of an instruction such as ``mul.wide.s32`` on arrays of its type."""
    name, *modifiers, kind = opcode
    if name in ("mul", "mad"):
        product = {"lo": np.multiply, "hi": high, "wide": lambda a, b: wide_of(a) * wide_of(b)}
        function = product[modifiers[0]]
        return function if name == "mul" else lambda a, b, c: function(a, b) + c
    if name == "shf":
        return funnel("l" in modifiers, "wrap" in modifiers)
    if modifiers or (name == "div" and kind[0] == "s"):
        raise NotImplementedError(".".join(opcode))
    return FUNCTIONS[name]


def with_carry(opcode: tuple[str, ...]) -> Callable[..., tuple[Array, Array]]:
    """Sums and products of 32 bits that take or leave a carry: the result and the carry."""
    name, *modifiers, kind = opcode
    if kind not in ("u32", "s32", "b32"):
        raise NotImplementedError(".".join(opcode))
    takes = name.endswith("c")

    def function(*values: Array) -> tuple[Array, Array]:
        *values, carry = (v.astype(np.int64) for v in values)
        carry = carry if takes else np.zeros_like(carry)
        if name.startswith("mad"):
            product = values[0].view(np.uint64) * values[1].view(np.uint64)
            shift = np.uint64(32 if "hi" in modifiers else 0)
            part = (product >> shift & np.uint64(0xFFFFFFFF)).astype(np.int64)
            total = part + values[2] + carry
        elif name.startswith("add"):
            total = values[0] + values[1] + carry
        else:
            total = values[0] - values[1] - carry
        return total.astype(np.uint32), (total >> 32) != 0

    return function
