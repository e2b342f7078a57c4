"""What seeds say: a mean with its deviation, and a difference with its standard error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import atan, cos, pi, sin, sqrt
from statistics import fmean, stdev, variance
from typing import NamedTuple


class Estimate(NamedTuple):
    """A mean over seeds."""

    mean: float
    std: float | None
    """Standard deviation over seeds; None for one seed."""
    n: int


class Spread(NamedTuple):
    """How much seeds change a result."""

    std: float
    freedom: int
    """Degrees of freedom of that deviation."""


class Difference(NamedTuple):
    """How much one mean over seeds is above another."""

    mean: float
    error: float | None
    """Standard error; None where too few seeds tell it."""
    p: float | None
    """Probability of a difference at least as large if only seeds differed; None without error."""


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and standard deviation of the values, at least one.

    Example:
        >>> estimate([1.0, 2.0, 3.0])
        Estimate(mean=2.0, std=1.0, n=3)
    """
    return Estimate(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


def pooled(groups: Iterable[Sequence[float]]) -> Spread | None:
    """The deviation within groups, taken to be the same in all; None if no group has two values.

    Two seeds alone say next to nothing about their spread, several pairs of them do.

    Example:
        >>> pooled([[1.0, 3.0], [5.0, 5.0], [7.0]])
        Spread(std=1.0, freedom=2)
    """
    several = [values for values in groups if len(values) > 1]
    freedom = sum(len(values) - 1 for values in several)
    if not freedom:
        return None
    squares = sum(variance(values) * (len(values) - 1) for values in several)
    return Spread(sqrt(squares / freedom), freedom)


def difference(values: Sequence[float], base: Sequence[float], spread: Spread | None) -> Difference:
    """How much the mean of the values is above that of the base, with a t-test.

    Example:
        >>> gain = difference([0.5, 0.7], [0.25, 0.25], Spread(0.1, freedom=3))
        >>> round(gain.mean, 4), round(gain.error, 4), round(gain.p, 4)
        (0.35, 0.1, 0.0395)
    """
    gap = fmean(values) - fmean(base)
    if spread is None:
        return Difference(gap, None, None)
    error = spread.std * sqrt(1 / len(values) + 1 / len(base))
    # Equal results of few seeds are no proof that seeds change nothing.
    p = two_sided(gap / error, spread.freedom) if error > 1e-12 else None
    return Difference(gap, error, p)


def two_sided(t: float, freedom: int) -> float:
    """Probability that Student's t is at least so far from 0.

    The finite sums for whole degrees of freedom, Abramowitz and Stegun 1964, 26.7.3 and 26.7.4.

    Example:
        >>> round(two_sided(4.3027, 2), 4)
        0.05
    """
    angle = atan(abs(t) / sqrt(freedom))
    odd = freedom % 2
    term, total = cos(angle) if odd else 1.0, 0.0
    for power in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cos(angle) ** 2 * (power - 1) / power
    inside = sin(angle) * total
    return 1 - (2 / pi * (angle + inside) if odd else inside)
