"""Floating-point instructions of PTX on arrays, one number for each thread.

Approximations are computed exactly and rounded; a perturbation moves them by some units in the
last place, for results must not depend on them. A fused multiply-add of float32 is computed in
float64 and rounded twice, one of float64 in the long double of the CPU.
"""

from collections.abc import Callable
from functools import cache

import numpy as np

Array = np.ndarray
DTYPES = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
NAN = np.uint32(0x7FFFFFFF).view(np.float32)
"""Every NaN that arithmetic in float32 makes."""
perturbation = 0
"""The most units in the last place that approximations are off, up or down."""


def flushed(x: Array) -> Array:
    """Subnormal numbers as zeros of the same sign."""
    small = np.abs(x) < np.finfo(x.dtype).tiny
    return np.where(small, np.copysign(x.dtype.type(0), x), x)


def canonical(x: Array) -> Array:
    """Replace NaNs of float32 by the one that GPUs make."""
    if x.dtype == np.float32:
        nans = x != x
        if nans.any():
            x = np.where(nans, NAN, x)
    return x


def approximate(x: Array) -> Array:
    """Numbers of float64 as float32, off by some units in the last place if demanded."""
    y = x.astype(np.float32)
    if perturbation:
        # Always the same for a number, as on a GPU.
        some = (y.view(np.uint32) * np.uint32(2654435761)) >> np.uint32(16)
        steps = (some % np.uint32(2 * perturbation + 1)).astype(np.int32) - perturbation
        normal = np.isfinite(y) & (np.abs(y) > 2e-38)
        y = np.where(normal, (y.view(np.int32) + steps).view(np.float32), y)
    return y


def fma(a: Array, b: Array, c: Array) -> Array:
    """a·b + c, rounded once, or twice with hidden digits."""
    wide = np.float64 if a.dtype != np.float64 else np.longdouble
    return (a.astype(wide) * b + c).astype(a.dtype)


def smaller(a: Array, b: Array) -> Array:
    """The minimum, which is −0 of two zeros, and the number of a number and NaN."""
    result = np.fmin(a, b)
    zeros = (a == 0) & (b == 0)
    return np.where(zeros & np.signbit(a), a, result) if zeros.any() else result


def larger(a: Array, b: Array) -> Array:
    """The maximum, which is +0 of two zeros, and the number of a number and NaN."""
    result = np.fmax(a, b)
    zeros = (a == 0) & (b == 0)
    return np.where(zeros & ~np.signbit(a), a, result) if zeros.any() else result


def _with_nan(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda a, b: np.where((a != a) | (b != b), NAN.astype(a.dtype), function(a, b))


def _reciprocal_of_double(x: Array) -> Array:
    """1/x to the upper half of its bits."""
    upper = (1 / x).view(np.uint64) & np.uint64(0xFFFFFFFF00000000)
    return upper.view(np.float64)


EXACT: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": fma,
    "mad": fma,
    "div": np.divide,
    "rcp": lambda x: 1 / x,
    "sqrt": np.sqrt,
    "neg": np.negative,
    "abs": np.abs,
    "min": smaller,
    "max": larger,
    "copysign": lambda a, b: np.copysign(b, a),
}
APPROXIMATE: dict[str, Callable[..., Array]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: 1 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "div": np.divide,
}
COPIES = {"neg", "abs", "copysign"}
"""Instructions on the sign alone, which keep NaNs."""


@cache
def floating(opcode: tuple[str, ...]) -> Callable[..., Array]:
    """The function of an instruction such as ``fma.rn.ftz.f32`` on arrays of its type."""
    name, *modifiers, kind = opcode
    if unknown := set(modifiers) - {"rn", "ftz", "sat", "approx", "full", "NaN"}:
        raise NotImplementedError(f"{'.'.join(opcode)}: {unknown}")
    ftz = "ftz" in modifiers
    if "approx" in modifiers or "full" in modifiers:
        if kind == "f64":
            if opcode != ("rcp", "approx", "ftz", "f64"):
                raise NotImplementedError(".".join(opcode))
            return lambda x: _reciprocal_of_double(flushed(x))
        exact = APPROXIMATE[name]

        def function(*values: Array) -> Array:
            return approximate(exact(*(v.astype(np.float64) for v in values)))
    else:
        function = EXACT[name]
    if "NaN" in modifiers:
        function = _with_nan(function)
    if name in COPIES and not ftz:
        return function

    def rounded(*values: Array) -> Array:
        if ftz:
            values = tuple(map(flushed, values))
        result = canonical(function(*values))
        if ftz:
            result = flushed(result)
        if "sat" in modifiers:
            result = np.nan_to_num(np.clip(result, 0, 1), nan=0)
        return result

    return rounded


COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def comparison(name: str, real: bool) -> Callable[[Array, Array], Array]:
    """A condition; of numbers with NaN it is false, unless its name ends with u."""
    if name == "nan":
        return lambda a, b: (a != a) | (b != b)
    if name == "num":
        return lambda a, b: (a == a) & (b == b)
    if real and name == "ne":
        return lambda a, b: (a < b) | (a > b)
    if name in COMPARISONS:
        return COMPARISONS[name]
    ordered = COMPARISONS[name[:-1]]
    return lambda a, b: ordered(a, b) | (a != a) | (b != b)
