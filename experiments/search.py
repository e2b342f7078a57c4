"""A search for learning rates: by validation accuracy, for each method on each kind of data."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from rich.table import Table

from experiments.experiment import Record
from experiments.metrics import title_of, value
from experiments.plan import CASE, RATE, Plan, Settings, listed

CHOSEN = "◀"
"""The mark of a chosen rate."""

Means = dict[float, float | None]
"""Accuracy by learning rate."""


def searches(plan: Plan, preset: str) -> dict[tuple[str, str], tuple[str, ...]]:
    """The cases in which rates are tried, by the method and the case that they are for.

    Methods that set their learning rate are not searched.
    """
    used, tried = plan.presets[preset], plan.presets[preset].search.get("cases", {})
    planned = dict.fromkeys(
        (method, case)
        for grid in used.grids
        for case in listed(grid.get(CASE, []))
        for method in grid.get("methods", plan.methods)
        if RATE not in plan.methods[method]
    )
    return {(method, case): tuple(tried[case]) for method, case in planned if case in tried}


def search_grids(plan: Plan, preset: str) -> list[Settings]:
    """The search as grids, one for each case in which rates are tried."""
    methods: dict[str, list[str]] = {}
    for (method, _), cases in searches(plan, preset).items():
        for case in cases:
            if method not in methods.setdefault(case, []):
                methods[case].append(method)
    given = plan.presets[preset].search
    order = dict.fromkeys(case for cases in given.get("cases", {}).values() for case in cases)
    return [
        {CASE: case, RATE: given[RATE], "methods": methods[case], "seeds": seeds(given)}
        for case in order
        if case in methods
    ]


def seeds(search: Settings) -> list[int]:
    """The seeds of a search."""
    found: list[int] = search.get("seeds", [0])
    return found


def metric(search: Settings) -> str:
    """What a search maximises."""
    found: str = search.get("by", "validation top-k")
    return found


def accuracies(
    plan: Plan, preset: str, protocol: Settings, rows: Iterable[Settings]
) -> dict[tuple[str, tuple[str, ...]], Means]:
    """Mean validation accuracy by method and the cases that it is the mean of.

    It is None until all its runs are there.
    """
    given = plan.presets[preset].search
    found: dict[tuple[object, ...], float | None] = {}
    for row in rows:
        settings = {**protocol, **row["settings"]}
        at = (row["method"], settings[RATE], row.get(CASE), row["seed"])
        found[at] = value(row, settings["k"], metric(given))
    means: dict[tuple[str, tuple[str, ...]], Means] = {}
    for (method, _), cases in searches(plan, preset).items():
        for rate in given[RATE]:
            runs = [(method, rate, case, seed) for case in cases for seed in seeds(given)]
            known = [number for run in runs if (number := found.get(run)) is not None]
            mean = fmean(known) if len(known) == len(runs) else None
            means.setdefault((method, cases), {})[rate] = mean
    return means


def choose(
    plan: Plan, preset: str, protocol: Settings, rows: Iterable[Settings]
) -> dict[str, dict[str, float]]:
    """The learning rates of methods in cases whose search is complete; of equal ones the first."""
    means = accuracies(plan, preset, protocol, rows)
    chosen: dict[str, dict[str, float]] = {}
    for (method, case), cases in searches(plan, preset).items():
        each = means[method, cases]
        known = {rate: mean for rate, mean in each.items() if mean is not None}
        if len(known) == len(each):
            chosen.setdefault(method, {})[case] = max(known, key=lambda rate: known[rate])
    return chosen


def search_table(plan: Plan, record: Record) -> Table:
    """Validation accuracy by method, cases and learning rate, the chosen one marked."""
    preset, search = record["preset"], plan.presets[record["preset"]].search
    rates = search[RATE]
    columns = ("", "cases", *(f"{rate:g}" for rate in rates))
    table = Table(*columns, title="Learning rates by validation")
    served: dict[tuple[str, tuple[str, ...]], str] = {}
    for (method, case), cases in searches(plan, preset).items():
        served.setdefault((method, cases), case)
    table.caption = (
        f"{title_of(metric(search)).capitalize()} accuracy in %, mean over the cases and seeds; "
        f"{CHOSEN}: chosen for the other tables."
    )
    means = accuracies(plan, preset, record["protocol"], record["rows"])
    for (method, cases), each in sorted(means.items(), key=lambda item: item[0][1]):
        chosen = record["chosen"].get(method, {}).get(served[method, cases])
        marked = {rate: f"\xa0{CHOSEN}" if rate == chosen else "" for rate in rates}
        shown = ["not run" if (m := each[r]) is None else f"{m:.2f}{marked[r]}" for r in rates]
        table.add_row(method, "; ".join(cases), *shown)
    return table
