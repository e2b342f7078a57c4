"""The results of a comparison as text: columns and rows for a terminal or a page."""

from __future__ import annotations

from typing import NamedTuple

from topklass.train.comparison import BASE, Comparison, Group, besides_the_loss
from topklass.train.finished import format_value
from topklass.train.statistics import Difference, Estimate

CLEAR = "*"
"""Marks a difference that seeds do not explain."""
PLUS_MINUS = "\xa0±\xa0"
"""With spaces where no line breaks."""


class ResultsTable(NamedTuple):
    """Titles of columns, and a row for each group."""

    titles: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: list[str]
    """What the numbers mean, in sentences."""


def results_table(comparison: Comparison) -> ResultsTable:
    """Accuracies over seeds, and how far they are above those of cross-entropy."""
    gains = comparison.compared > 0
    lengths, averages = comparison.lengths, comparison.averages
    several = len(averages) > 1
    titles = ["loss", *comparison.differing, "seeds"]
    titles += [f"top-{k} {a} %" if several else f"top-{k} %" for k in lengths for a in averages]
    if gains:
        titles += [f"top-{k} gain" for k in lengths]
    rows = [_row(comparison, group, gains) for group in comparison.groups]
    return ResultsTable(tuple(titles), rows, notes(comparison))


def _row(comparison: Comparison, group: Group, gains: bool) -> tuple[str, ...]:
    cells = [group.first.title]
    cells += [format_value(group.settings.get(name)) for name in comparison.differing]
    cells.append(str(len(group.runs)))
    cells += [
        format_estimate(group.accuracy(k, average))
        for k in comparison.lengths
        for average in comparison.averages
    ]
    if gains:
        found = [comparison.gain(group, k) for k in comparison.lengths]
        cells += ["" if gain is None else points(comparison, gain) for gain in found]
    return tuple(cells)


def format_estimate(share: Estimate) -> str:
    """A share in percent, with its deviation over seeds."""
    if share.std is None:
        return f"{100 * share.mean:.1f}"
    return f"{100 * share.mean:.1f}{PLUS_MINUS}{100 * share.std:.1f}"


def points(comparison: Comparison, gain: Difference) -> str:
    """A difference in percentage points, with its standard error, marked if it is clear."""
    value = f"{100 * gain.mean:+.1f}".replace("-", "−")
    if gain.error is None:
        return value
    mark = CLEAR if comparison.clear(gain) else ""
    return f"{value}{PLUS_MINUS}{100 * gain.error:.1f}{mark}"


def notes(comparison: Comparison) -> list[str]:
    """What the numbers mean."""
    tested = len(comparison.groups[0].first.labels)
    sentences = [
        f"Accuracies are shares of {tested:,} test images, of the checkpoint that was best on the "
        "validation images."
    ]
    if any(len(group.runs) > 1 for group in comparison.groups):
        sentences.append("± is the standard deviation over seeds.")
    if len(comparison.averages) == 1:
        sentences.append("All classes have as many test images, so micro and macro are the same.")
    else:
        sentences.append("Micro is the mean over images, macro over classes.")
    return sentences + _notes_on_gains(comparison) + _notes_on_bases(comparison)


def _notes_on_gains(comparison: Comparison) -> list[str]:
    found = [comparison.gain(group, k) for group in comparison.groups for k in comparison.lengths]
    gains = [gain for gain in found if gain is not None]
    if not gains:
        return []
    sentences = [f"Gains are differences to the best {BASE} on the same data in percentage points"]
    if len(comparison.averages) > 1:
        sentences[0] += f" ({comparison.average})"
    if all(gain.error is None for gain in gains):
        return [f"{sentences[0]}; one seed does not tell what is chance."]
    sentences[0] += " ± their standard error, by the spread of seeds in all rows on these data."
    correction = f", Bonferroni for {comparison.compared} rows" if comparison.compared > 1 else ""
    sentences.append(
        f"{CLEAR} marks those that seeds do not explain (t-test, p < 0.05{correction})."
    )
    return sentences


def _notes_on_bases(comparison: Comparison) -> list[str]:
    """Where a group differs from its cross-entropy in more than the loss."""
    sentences = []
    for group in comparison.groups:
        base = comparison.base(group)
        others = [] if base is None else besides_the_loss(group, base)
        if others:
            named = comparison.title(group)
            sentences.append(f"{named} differs from {BASE} also in {', '.join(others)}.")
    return sentences
