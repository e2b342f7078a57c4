"""What came out of a comparison, in plain words."""

from __future__ import annotations

from topklass.train.comparison import BASE, Comparison, Group, training_data
from topklass.train.results_table import format_estimate
from topklass.train.statistics import Difference

MOST = 4
"""Training sets with a sentence of their own."""


def headline(comparison: Comparison) -> list[str]:
    """One sentence or two for each training set: what is best, and whether that may be chance."""
    problems: dict[str, list[Group]] = {}
    for group in comparison.groups:
        problems.setdefault(repr(training_data(group)), []).append(group)
    if len(problems) > MOST:
        return [f"There are {len(problems)} training sets: the table shows what is best on each."]
    return [_sentences(comparison, groups) for groups in problems.values()]


def _sentences(comparison: Comparison, groups: list[Group]) -> str:
    k, average = comparison.lengths[-1], comparison.average
    best = max(groups, key=lambda group: group.accuracy(k, average).mean)
    right = "guesses the label" if k == 1 else f"has the label among its {k} guesses"
    of = "test images" if average == "micro" else "the test images of a class, on average"
    share = format_estimate(best.accuracy(k, average))
    sentence = f"{comparison.title(best)} {right} for {share} % of {of}."
    if len(groups) == 1:
        return sentence
    same = " on the same training data" if len(groups) < len(comparison.groups) else ""
    gain = comparison.gain(best, k)
    above = "" if gain is None else f" {_above(comparison, gain)}"
    return f"Best of {len(groups)} recipes{same}: {sentence}{above}"


def _above(comparison: Comparison, gain: Difference) -> str:
    size = f"{100 * gain.mean:.1f}"
    if gain.error is None:
        return f"That is {size} points above {BASE}; more seeds would tell whether it is chance."
    sentence = f"That is {size} ± {100 * gain.error:.1f} points above {BASE}"
    if comparison.clear(gain):
        return f"{sentence}, which seeds do not explain."
    return f"{sentence}, which the choice of seeds may explain."
