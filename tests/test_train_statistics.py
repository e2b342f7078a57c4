"""Means and differences over seeds, by hand and by simulation; Student's t by the beta function."""

from math import sqrt
from random import Random

import mpmath
import pytest

from topklass.train.statistics import Spread, difference, estimate, pooled, two_sided


@pytest.mark.parametrize(
    ("t", "freedom"), [(0.0, 1), (-2.5, 1), (0.1, 2), (12.0, 3), (1.0, 4), (-2.5, 11), (1.0, 40)]
)
def test_students_t(t, freedom):
    expected = mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True)
    assert two_sided(t, freedom) == pytest.approx(float(expected), abs=1e-12)


def test_estimate():
    assert estimate([3.0]) == (3.0, None, 1)
    assert estimate([1.0, 3.0]) == (2.0, pytest.approx(sqrt(2)), 2)


def test_pooled():
    """Two groups of 3 and 2, deviations by hand; one value says nothing about spread."""
    spread = pooled([[1.0, 2.0, 3.0], [4.0, 8.0], [100.0]])
    assert spread == (pytest.approx(sqrt((2 + 8) / 3)), 3)
    assert pooled([[1.0], [2.0]]) is None
    assert pooled([]) is None


def test_difference():
    gain = difference([1.0, 2.0, 3.0, 4.0], [1.0, 2.0], Spread(2.0, 7))
    assert gain.mean == pytest.approx(1.0)
    assert gain.error == pytest.approx(2 * sqrt(1 / 4 + 1 / 2))
    assert gain.p == pytest.approx(two_sided(1 / gain.error, 7))


def test_a_false_alarm_is_as_rare_as_it_says():
    """Of three groups of two seeds that differ by chance alone, pairs are clear 5 % of the time."""
    stream = Random(0)
    trials, alarms = 4000, 0
    for _ in range(trials):
        groups = [[stream.gauss(0, 1) for _ in range(2)] for _ in range(3)]
        p = difference(groups[0], groups[1], pooled(groups)).p
        alarms += p is not None and p < 0.05
    assert abs(alarms / trials - 0.05) < 4 * sqrt(0.05 * 0.95 / trials)


def test_too_few_seeds():
    assert difference([0.5], [0.25], None) == (0.25, None, None)


def test_equal_results_prove_nothing():
    gain = difference([0.5, 0.5], [0.4, 0.4], pooled([[0.5, 0.5], [0.4, 0.4]]))
    assert gain.error == pytest.approx(0, abs=1e-12)
    assert gain.p is None
