"""Normal noise from a counter: the same numbers for the same seed, row, class and sample."""

import triton
import triton.language as tl

FARTHEST = tl.constexpr(5.43)
"""The quantile of 1 − 2^−25, rounded up."""


@triton.jit
def size_of_tail(half):
    """What normal noise exceeds with probability ``half``, up to 1/2, by way of erfinv.

    The polynomials are those of M. Giles, Approximating the erfinv function (2010), for single
    precision; relative error below 4e-7 for probabilities from 1e-7 on.
    """
    w = -tl.log(4.0 * half * (1.0 - half))
    c = w - 2.5
    p = 3.43273939e-07 + 2.81022636e-08 * c
    p = -3.5233877e-06 + p * c
    p = -4.39150654e-06 + p * c
    p = 0.00021858087 + p * c
    p = -0.00125372503 + p * c
    p = -0.00417768164 + p * c
    p = 0.246640727 + p * c
    p = 1.50140941 + p * c
    t = tl.sqrt(w) - 3.0
    q = 0.000100950558 - 0.000200214257 * t
    q = 0.00134934322 + q * t
    q = -0.00367342844 + q * t
    q = 0.00573950773 + q * t
    q = -0.0076224613 + q * t
    q = 0.00943887047 + q * t
    q = 1.00167406 + q * t
    q = 2.83297682 + q * t
    return 1.4142135 * (1.0 - 2.0 * half) * tl.where(w < 5.0, p, q)


@triton.jit
def normal(bits):
    """A normal number from 24 bits of a random integer: a quantile and a sign."""
    size = size_of_tail(((bits >> 9).to(tl.float32) + 0.5) * (2.0**-24))  # up to 1/2
    return tl.where((bits & 1) == 1, size, -size)


@triton.jit
def normals(seed, row, classes, SAMPLES: tl.constexpr, TILE: tl.constexpr):
    """Noise of SAMPLES samples (a multiple of 4) for TILE classes of a row, (SAMPLES, TILE)."""
    GROUPS: tl.constexpr = SAMPLES // 4
    group = tl.arange(0, GROUPS)[:, None]
    zero = group * 0 + classes[None, :] * 0
    a, b, c, d = tl.philox(seed, zero + classes[None, :], zero + row, zero + group, zero)
    four = tl.join(tl.join(normal(a), normal(b)), tl.join(normal(c), normal(d)))
    return tl.reshape(tl.permute(four, (0, 2, 3, 1)), (SAMPLES, TILE))
