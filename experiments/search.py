"""A search for learning rates: each method gets the one with the best validation accuracy."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from rich.table import Table

from experiments.experiment import Record
from experiments.metrics import value
from experiments.plan import RATE, Plan, Settings

METRIC = "validation top-k"
CHOSEN = "◀"
"""The mark of a chosen rate."""


def searches(plan: Plan, preset: str) -> dict[str, Settings]:
    """What is tried for each method: ``learning_rate``, ``cases`` and ``seeds``."""
    given = dict(plan.presets[preset].search)
    own = given.pop("methods", {})
    found = {method: {"seeds": [0], **given, **own.get(method, {})} for method in plan.methods}
    return {method: each for method, each in found.items() if each.get(RATE)}


def search_grids(plan: Plan, preset: str) -> list[Settings]:
    """The search as grids, one for each method."""
    return [
        {"case": each["cases"], RATE: each[RATE], "methods": [method], "seeds": each["seeds"]}
        for method, each in searches(plan, preset).items()
    ]


def accuracies(
    plan: Plan, preset: str, protocol: Settings, rows: Iterable[Settings]
) -> dict[str, dict[float, float | None]]:
    """Mean validation accuracy over cases and seeds of the search, by method and learning rate.

    It is None until all its runs are there.
    """
    found: dict[tuple[object, ...], float | None] = {}
    for row in rows:
        settings = {**protocol, **row["settings"]}
        at = (row["method"], settings[RATE], row.get("case"), row["seed"])
        found[at] = value(row, settings["k"], METRIC)
    means: dict[str, dict[float, float | None]] = {}
    for method, each in searches(plan, preset).items():
        for rate in each[RATE]:
            runs = [(method, rate, case, seed) for case in each["cases"] for seed in each["seeds"]]
            known = [number for run in runs if (number := found.get(run)) is not None]
            mean = fmean(known) if len(known) == len(runs) else None
            means.setdefault(method, {})[rate] = mean
    return means


def choose(
    plan: Plan, preset: str, protocol: Settings, rows: Iterable[Settings]
) -> dict[str, float]:
    """The learning rate of each method whose search is complete; of equal ones the first."""
    chosen = {}
    for method, means in accuracies(plan, preset, protocol, rows).items():
        known = {rate: mean for rate, mean in means.items() if mean is not None}
        if len(known) == len(means):
            chosen[method] = max(known, key=lambda rate: known[rate])
    return chosen


def search_table(plan: Plan, record: Record) -> Table:
    """Validation accuracy by method and learning rate, the chosen one marked."""
    means = accuracies(plan, record["preset"], record["protocol"], record["rows"])
    rates = sorted({rate for each in means.values() for rate in each})
    table = Table("", *(f"{rate:g}" for rate in rates), title="Learning rates by validation")
    table.caption = (
        f"Best validation top-k accuracy in %, mean over the search's cases and seeds; {CHOSEN}: "
        "chosen for all runs of the other tables."
    )
    for method, each in means.items():
        cells = []
        for rate in rates:
            mean = each.get(rate)
            mark = f"\xa0{CHOSEN}" if record["chosen"].get(method) == rate else ""
            missing = "not run" if rate in each else ""
            cells.append(missing if mean is None else f"{mean:.2f}{mark}")
        table.add_row(method, *cells)
    return table
