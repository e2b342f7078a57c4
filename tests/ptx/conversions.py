"""Conversions between the number types of PTX."""

from collections.abc import Callable
from functools import cache

import numpy as np

from .floats import DTYPES, canonical, flushed
from .integers import dtype_of

Array = np.ndarray
ROUNDING = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def carrier(kind: str) -> type:
    """The type of arrays that hold numbers of a type; bfloat16 is held in its bits."""
    if kind in ("bf16", "f16x2", "bf16x2"):
        return np.uint16 if kind == "bf16" else np.uint32
    return DTYPES[kind] if kind in DTYPES else dtype_of(kind)


def from_bfloat16(x: Array) -> Array:
    """Numbers of bfloat16 as float32."""
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(x: Array) -> Array:
    """Numbers of float32, rounded to even; NaN is 0x7FFF."""
    bits = x.view(np.uint32)
    lowest = bits >> np.uint32(16) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + lowest) >> np.uint32(16)
    return np.where(x != x, np.uint32(0x7FFF), rounded).astype(np.uint16)


def rounded_to_odd(x: Array) -> Array:
    """Numbers of float64 as float32, inexact ones with a last bit of 1: they may be rounded again.

    Infinity is exact, and so is NaN.
    """
    y = x.astype(np.float32)
    bits = y.view(np.uint32)
    bits = np.where(np.abs(y) > np.abs(x), bits - np.uint32(1), bits)
    inexact = (y != x) & (x == x)
    return np.where(inexact, bits | np.uint32(1), bits).view(np.float32)


def to_integer(x: Array, kind: type) -> Array:
    """Numbers without a fraction, clamped to the type; NaN is 0."""
    limits = np.iinfo(kind)
    x = np.where(x != x, 0, x).astype(np.float64)
    inside = np.clip(x, float(limits.min), float(limits.max))
    # The largest number of 64 bits is no float64, and what it rounds to is too large by one.
    top = inside >= float(limits.max)
    return np.where(top, kind(limits.max), np.where(top, 0, inside).astype(kind))


@cache
def conversion(modifiers: tuple[str, ...]) -> Callable[..., Array]:
    """The function of ``cvt`` with these modifiers."""
    *how, to, of = modifiers
    if unknown := set(how) - {"rn", "ftz", "sat", *ROUNDING}:
        raise NotImplementedError(f"cvt.{'.'.join(modifiers)}: {unknown}")
    if to in ("bf16x2", "f16x2"):
        one = conversion((*how, to[:-2], of))
        return lambda high, low: (
            (one(high).view(np.uint16).astype(np.uint32) << np.uint32(16))
            | one(low).view(np.uint16)
        )
    if of == "bf16":
        rest = conversion((*how, to, "f32")) if to != "f32" else lambda x: x
        return lambda x: rest(from_bfloat16(x))
    if to == "bf16":
        if of not in ("f32", "f64"):
            raise NotImplementedError(f"cvt.{'.'.join(modifiers)}")
        return to_bfloat16 if of == "f32" else lambda x: to_bfloat16(rounded_to_odd(x))
    rounding = next((ROUNDING[h] for h in how if h in ROUNDING), None)
    real_from, real_to = of in DTYPES, to in DTYPES
    target = carrier(to)
    if not real_from and not real_to:
        if "sat" in how:
            raise NotImplementedError(f"cvt.{'.'.join(modifiers)}")
        return lambda x: x.astype(target)
    if real_from and not real_to:

        def truncated(x: Array) -> Array:
            return to_integer(rounding(flushed(x) if "ftz" in how else x), target)

        return truncated

    def real(x: Array) -> Array:
        x = flushed(x) if "ftz" in how and real_from else x
        x = x if rounding is None else rounding(x)
        y = canonical(x.astype(target))
        y = flushed(y) if "ftz" in how else y
        return np.nan_to_num(np.clip(y, 0, 1), nan=0) if "sat" in how else y

    return real
