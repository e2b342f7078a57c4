"""The numbers of one cell of a table, or of one point of a figure: ours and the papers'."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from experiments.experiment import Record
from experiments.grid import matches
from experiments.metrics import value
from experiments.plan import CASE, RATE, Plan, Settings, listed, method_recipe
from experiments.published import Published, published_numbers, quoted
from experiments.search import searches
from topklass.train.criterion import loss_info
from topklass.train.statistics import Estimate, estimate

METHOD = "method"
EXACT_EXPECTATION = ("samples", 0)
"""The exact expectation, that is infinitely many noise vectors."""
AXES = {"noise": "noise p", "epsilon": "ε", "samples": "noise vectors B", "k": "K", METHOD: ""}
AXES |= {"subset": "training images", "tau": "τ", CASE: "data"}


@dataclass(frozen=True)
class Cell:
    """What is known about some runs that differ in nothing but the seed."""

    ours: Estimate | None
    papers: list[Published]
    planned: bool
    """Whether the experiment has such runs, finished or not."""


class Results:
    """A record beside the papers' numbers, unless it is about other data.

    Args:
        plan: of the experiment.
        record: of some of its runs.
    """

    def __init__(self, plan: Plan, record: Record) -> None:
        self.plan, self.record = plan, record
        own_data = "data" in plan.presets[record["preset"]].settings
        self.numbers = [] if own_data else published_numbers(plan)
        preset = record["preset"]
        self.searched = searches(plan, preset)
        grids = plan.presets[preset].grids
        self.cases = [None, *(case for grid in grids for case in listed(grid.get(CASE, [])))]

    def settings(self, row: Settings) -> Settings:
        """All settings of a row, with its method and case."""
        protocol = self.record["protocol"]
        case = {CASE: row[CASE]} if CASE in row else {}
        return {**protocol, **row["settings"], METHOD: row[METHOD], **case}

    def rows(self, where: Settings, kind: str = "rows") -> list[Settings]:
        """The rows with these settings; ``kind="not_run"`` for those that are missing.

        Those that were only for the search of a learning rate are left out.
        """
        rows = [row for row in self.record[kind] if row.get(CASE) in self.cases]
        if kind == "rows":
            rows = [row for row in rows if self._has_chosen_rate(row)]
        return [row for row in rows if matches(self.settings(row), where)]

    def _has_chosen_rate(self, row: Settings) -> bool:
        method, case = row[METHOD], row.get(CASE)
        chosen = self.record.get("chosen", {}).get(method, {}).get(case)
        return (method, case) not in self.searched or self.settings(row)[RATE] == chosen

    def cell(self, where: Settings, metric: str) -> Cell:
        """All seeds of the runs with these settings.

        A loss without K that was trained once stands for every K.
        """
        rows, left = self.rows(where), self.rows(where, "not_run")
        if not rows and not left and self._serves_any_k(where):
            any_k = {name: each for name, each in where.items() if name != "k"}
            rows, left = self.rows(any_k), self.rows(any_k, "not_run")
        found = [value(row, where.get("k") or self.settings(row)["k"], metric) for row in rows]
        values = [each for each in found if each is not None]
        others = {name: each for name, each in where.items() if name != METHOD}
        papers = quoted(self.numbers, where.get(METHOD), others, metric)
        return Cell(estimate(values) if values else None, papers, bool(rows or left))

    def _serves_any_k(self, where: Settings) -> bool:
        """Whether these settings ask for a list length of a loss that does not depend on it."""
        if "k" not in where or METHOD not in where:
            return False
        recipe = method_recipe(self.plan, self.record["preset"], where[METHOD], {})
        return not loss_info(recipe.loss).takes_k

    def values(self, axis: str, part: Settings) -> list[object]:
        """What an axis of a table or figure runs over, in order.

        Args:
            axis: a setting, "method" or "case".
            part: the table or figure, whose ``where`` and ``methods`` restrict it.
        """
        where = part.get("where", {})
        methods = part.get("methods", list(self.plan.methods))
        rows = [*self.rows(where), *self.rows(where, "not_run")]
        found = [self.settings(row) for row in rows]
        found += [
            {**each.settings, METHOD: each.method}
            for each in self.numbers
            if matches(each.settings, {n: v for n, v in where.items() if n in each.settings})
        ]
        chosen = [each for each in found if each[METHOD] in methods and axis in each]
        if axis == METHOD:
            return [name for name in methods if any(each[METHOD] == name for each in chosen)]
        values = dict.fromkeys(each[axis] for each in chosen)
        if axis == CASE:
            return [case for case in self.plan.cases if case in values]
        return sorted(
            values,
            key=lambda each: inf if each is None or (axis, each) == EXACT_EXPECTATION else each,
        )


def named(value: object, axis: str) -> str:
    """A value of an axis as people read it.

    Example:
        >>> named(0.0001, "epsilon"), named(64000, "subset"), named("smooth", "method")
        ('0.0001', '64,000', 'smooth')
        >>> named(None, "subset"), named(None, "tau"), named(0, "samples")
        ('all', '–', 'exact')
    """
    if value is None:
        return "all" if axis == "subset" else "–"
    if (axis, value) == EXACT_EXPECTATION:
        return "exact"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def named_axis(axis: str) -> str:
    """The title of an axis."""
    return AXES.get(axis, axis.replace("_", " "))
