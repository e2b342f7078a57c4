"""Tables of a record: ours over seeds, and under each number the papers'."""

from __future__ import annotations

from rich.table import Column, Table

from experiments.cells import Cell, Results, named, named_axis
from experiments.experiment import Record
from experiments.gains import ABOVE, BELOW, NOT_RUN, gains_table
from experiments.metrics import is_count, title_of
from experiments.plan import Plan, Settings
from topklass.train.results_table import PLUS_MINUS
from topklass.train.statistics import Estimate

SOURCE_MARKS = "abcdefgh"


def show_tables(plan: Plan, record: Record) -> list[Table]:
    """All tables of an experiment, but those of methods that the preset does not have."""
    results = Results(plan, record)
    tables = [
        gains_table(results, part) if "against" in part else _table(results, part)
        for part in plan.tables
    ]
    return [table for table in tables if table.row_count and len(table.columns) > 1]


def _table(results: Results, part: Settings) -> Table:
    columns = _columns(results, part)
    head = [named_axis(part["rows"]), *(title for title, _, _ in columns)]
    rows = []
    for value in results.values(part["rows"], part):
        where = {**part.get("where", {}), part["rows"]: value}
        cells = [results.cell({**where, **more}, metric) for _, more, metric in columns]
        rows.append((named(value, part["rows"]), cells))
    every = [cell for _, cells in rows for cell in cells]
    sources = dict.fromkeys(number.source for cell in every for number in cell.papers)
    marks = dict(zip(sources, SOURCE_MARKS, strict=False))
    legend = [f"{mark}: {source}." for source, mark in marks.items()]
    caption = " ".join([_caption(results, part, every), *legend, part.get("note", "")]).strip()
    table = Table(
        *(Column(each, overflow="fold", min_width=longest_word(each)) for each in head),
        title=part["title"],
        caption=caption,
        show_lines=True,
        min_width=min(78, len(part["title"])),
    )
    for title, cells in rows:
        table.add_row(title, *("\n".join(lines(cell, marks)) for cell in cells))
    return table


def _columns(results: Results, part: Settings) -> list[tuple[str, Settings, str]]:
    """Title, settings and metric of each column."""
    axis, metrics = part.get("columns"), part["metrics"]
    if axis is None:
        return [(title_of(metric), {}, metric) for metric in metrics]

    def suffix(metric: str) -> str:
        return f", {title_of(metric)}" if len(metrics) > 1 else ""

    return [
        (f"{named(each, axis)}{suffix(metric)}", {axis: each}, metric)
        for each in results.values(axis, part)
        for metric in metrics
    ]


def longest_word(title: str) -> int:
    """What a column needs, such that no word of its title is broken.

    Example:
        >>> longest_word("noised exact")
        6
    """
    return max(map(len, title.split()), default=0)


def lines(cell: Cell, marks: dict[str, str]) -> list[str]:
    """Ours, then each number of a paper with how far ours is above it."""
    if not cell.planned and not cell.papers:
        return [""]
    ours = NOT_RUN if cell.ours is None else f"{spread(cell.ours)}\xa0({cell.ours.n})"
    found = [ours]
    for number in cell.papers:
        text = spread(Estimate(number.value, number.std, 0)) + f"\xa0{marks[number.source]}"
        found.append(text if cell.ours is None else f"{text} {gap(cell.ours.mean, number.value)}")
    return found


def spread(number: Estimate) -> str:
    r"""A number with its deviation.

    Example:
        >>> spread(Estimate(94.336, 0.091, 3)), spread(Estimate(94.34, None, 1))
        ('94.34\xa0±\xa00.09', '94.34')
    """
    return f"{number.mean:.2f}" + ("" if number.std is None else f"{PLUS_MINUS}{number.std:.2f}")


def gap(ours: float, paper: float) -> str:
    r"""How far ours is above a paper's number.

    Example:
        >>> gap(94.5, 94.34), gap(93.9, 94.34)
        ('▲\xa0+0.16', '▼\xa0−0.44')
    """
    difference = round(ours - paper, 2)
    mark = ABOVE if difference > 0 else BELOW if difference < 0 else "="
    return f"{mark}\xa0{difference:+.2f}".replace("-", "−")


def _caption(results: Results, part: Settings, cells: list[Cell]) -> str:
    """What the first line of a cell is."""
    preset = results.record["preset"]
    if not any(cell.ours for cell in cells):
        return f"Not run with the preset {preset}."
    counted = [is_count(metric) for metric in part["metrics"]]
    what = "accuracies in %"
    if any(counted):
        what = "results" if all(counted) else "results, accuracies in %"
    return f"Our {what}: mean ± standard deviation over seeds (number of seeds), preset {preset}."
