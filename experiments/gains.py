"""How much methods gain over one of them in each case, seed by seed."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean
from typing import NamedTuple

from rich.table import Table

from experiments.cells import METHOD, Results, named, named_axis
from experiments.metrics import TESTS, value
from experiments.plan import CASE, Settings
from topklass.train.results_table import PLUS_MINUS
from topklass.train.statistics import pooled

NOT_RUN = "not run"
CERTAIN = 2
"""A gain of more standard errors than these is marked."""
ABOVE, BELOW = "▲", "▼"
"""Ours is above another number, or below it."""


class Gain(NamedTuple):
    """A mean difference between runs of the same case and seed, in points."""

    mean: float
    error: float | None
    """Its standard error; None if no cell has two seeds."""
    seeds: int

    @property
    def mark(self) -> str:
        """Whether it is more than seeds explain."""
        if self.error is None or abs(self.mean) <= CERTAIN * self.error:
            return ""
        return ABOVE if self.mean > 0 else BELOW


class Gains:
    """The gains of all methods over one of them, by one metric.

    Two seeds say little about their spread, so all cells together tell it: the error is the
    standard deviation of the differences, pooled over all cases and methods, over √seeds.

    Args:
        results: a record with cases.
        against: the method to compare with.
        metric: for example "test top-5"; cases with a macro average have "test macro top-5".
    """

    def __init__(self, results: Results, against: str, metric: str) -> None:
        found: dict[tuple[str, str], dict[int, float]] = {}
        for row in results.rows({}):
            settings = results.settings(row)
            number = value(row, settings["k"], averaged(metric, settings["average"]))
            if number is not None:
                found.setdefault((row[CASE], row[METHOD]), {})[row["seed"]] = number
        self.differences: dict[tuple[str, str], list[float]] = {}
        for (case, method), numbers in found.items():
            base = found.get((case, against), {})
            common = [numbers[seed] - base[seed] for seed in sorted(numbers) if seed in base]
            if common and method != against:
                self.differences[case, method] = common
        self.spread = pooled(self.differences.values())

    def gain(self, case: str, method: str) -> Gain | None:
        """The gain of a method in a case; None if it was not run there."""
        found = self.differences.get((case, method))
        if found is None:
            return None
        error = None if self.spread is None else self.spread.std / sqrt(len(found))
        return Gain(fmean(found), error, len(found))


def averaged(metric: str, average: str) -> str:
    """A metric with the average of a case.

    Example:
        >>> averaged("test top-5", "macro"), averaged("training top-1", "macro")
        ('test macro top-5', 'training top-1')
    """
    what, _, length = metric.rpartition(" ")
    return f"{what} macro {length}" if average == "macro" and what in TESTS else metric


def gain_text(gain: Gain) -> str:
    r"""A gain with its error, number of seeds and mark.

    Example:
        >>> gain_text(Gain(1.234, 0.3, 2)), gain_text(Gain(-0.5, None, 1))
        ('+1.23\xa0±\xa00.30\xa0(2)\xa0▲', '−0.50\xa0(1)')
    """
    error = "" if gain.error is None else f"{PLUS_MINUS}{gain.error:.2f}"
    mark = f"\xa0{gain.mark}" if gain.mark else ""
    return f"{gain.mean:+.2f}{error}\xa0({gain.seeds}){mark}".replace("-", "−")


def gains_table(results: Results, part: Settings) -> Table:
    """Cases down and methods across, or methods down and metrics across.

    ``beside`` puts a number of one method next to each case.
    """
    against, metrics, where = part["against"], part["metrics"], part.get("where", {})
    gains = {metric: Gains(results, against, metric) for metric in metrics}
    axis, beside = part["rows"], part.get("beside")
    methods = [each for each in results.values(METHOD, part) if each != against]
    across: list[tuple[str, Settings, str]] = [(metric, {}, metric) for metric in metrics]
    if part.get("columns") == METHOD:
        several = len(metrics) > 1
        across = [
            (f"{method}, {metric}" if several else str(method), {METHOD: method}, metric)
            for method in methods
            for metric in metrics
        ]
    head = [f"{beside[METHOD]}, {beside['metric']}"] if beside else []
    table = Table(named_axis(axis), *head, *(title for title, _, _ in across), title=part["title"])
    table.caption = caption(results, part, list(gains.values()))
    for each in methods if axis == METHOD else results.values(axis, part):
        at = {**where, axis: each}
        cells = []
        if beside:
            ours = results.cell({**at, METHOD: beside[METHOD]}, beside["metric"]).ours
            cells.append(NOT_RUN if ours is None else f"{ours.mean:.1f}")
        for _, more, metric in across:
            cell = {**at, **more}
            gain = gains[metric].gain(cell[CASE], cell[METHOD])
            planned = results.rows(cell) or results.rows(cell, "not_run")
            cells.append(gain_text(gain) if gain else NOT_RUN if planned else "")
        table.add_row(named(each, axis), *cells)
    return table


def caption(results: Results, part: Settings, gains: Sequence[Gains]) -> str:
    """What the numbers are, and what the errors rest on."""
    text = (
        f"Percentage points above {part['against']} with the same data and seed, mean over seeds "
        f"(number of seeds), preset {results.record['preset']}"
    )
    spreads = [each.spread for each in gains if each.spread is not None]
    if spreads:
        freedom = min(each.freedom for each in spreads)
        text += (
            " ± standard error. A cell has few seeds, so the error is by the standard deviation of "
            f"these differences pooled over all cells, {freedom} degrees of freedom. "
            f"{ABOVE} {BELOW}: more than {CERTAIN} standard errors."
        )
    else:
        text += ". No cell has two seeds, so there is no standard error."
    return f"{text} {part.get('note', '')}".strip()
