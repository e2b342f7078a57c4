"""Figures of a record: metrics by a setting with the papers' points, curves by epoch, gains."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import nan
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.cells import METHOD, Results, named, named_axis
from experiments.experiment import Record
from experiments.gains_figure import gains_figure
from experiments.metrics import GRADIENT, NON_ZERO
from experiments.plan import Plan, Settings
from experiments.tables import title_of
from topklass.report.colours import COLOURS, MARKERS
from topklass.report.svg import SETTINGS
from topklass.train.statistics import Estimate, estimate

SIZE = (6.4, 3.8)
FORMATS = ("svg", "png")
LOOK = {**SETTINGS, "grid.color": "#d9dce1"}
EVEN = 8
"""Places whose largest gap is this many times the smallest one are drawn at even distances."""
MARKS = (*MARKERS, "P", "X")
MARKED = 8
"""So many points of a curve have a marker."""
STYLES = ("-", "--", ":")
"""Of the methods that have the same loss."""


def draw_figures(plan: Plan, record: Record, folder: Path) -> list[Path]:
    """Draw all figures for which there is a run; returns the files."""
    results = Results(plan, record)
    files = []
    for part in plan.figures:
        with matplotlib.rc_context(LOOK):
            figure = _draw(results, part)
        if figure is not None:
            files += save(figure, folder, f"{plan.name}-{part['file']}")
    return files


def _draw(results: Results, part: Settings) -> Figure | None:
    if "against" in part:
        return gains_figure(results, part)
    return _curves(results, part) if "curve" in part else _metric(results, part)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure in all formats; the same figure makes the same file."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{each}" for each in FORMATS]
    with matplotlib.rc_context({**LOOK, "svg.hashsalt": name}):
        for path in paths:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(path, dpi=150, metadata=metadata)
    return paths


def _metric(results: Results, part: Settings) -> Figure | None:
    """A metric against a setting; hollow points are the papers'."""
    axis, metric = part["x"], part["metric"]
    by_method = axis != METHOD
    lines = results.values(METHOD, part) if by_method else [part["title"]]
    values = results.values(axis, part)
    place = places(values)
    figure, axes = _axes(results, part["title"], named_axis(axis), _unit(metric))
    cells = {
        line: {
            value: results.cell(
                {**part.get("where", {}), axis: value, **({METHOD: line} if by_method else {})},
                metric,
            )
            for value in values
        }
        for line in lines
    }
    run = [value for value in values if any(each[value].ours for each in cells.values())]
    for line, look in zip(lines, _looks(results.plan, lines), strict=True):
        ours = [(place[value], cells[line][value].ours) for value in run]
        _line(axes, ours, str(line) if by_method else "ours", look)
        papers: dict[str, list[tuple[float, float]]] = {}
        for value, cell in cells[line].items():
            for number in cell.papers:
                papers.setdefault(number.paper, []).append((place[value], number.value))
        for paper, points in papers.items():
            first = paper == results.numbers[0].paper
            _published(axes, points, f"{line}, {paper}" if by_method else paper, look, first)
    name, ticks = shared_name([named(value, axis) for value in values])
    axes.set_xticks(list(place.values()), ticks)
    if name:
        axes.set_xlabel(name)
    drawn = [sum(cell.ours is not None for cell in each.values()) for each in cells.values()]
    alone = max(drawn, default=0) == 1 < len(values)  # it says nothing of how it depends on it
    return _finished(figure, axes) if run and not alone else None


def _curves(results: Results, part: Settings) -> Figure | None:
    """What was logged in each epoch, a line for each method."""
    name = part["curve"]
    lines = results.values(METHOD, part)
    unit = "% of scores" if name == GRADIENT else "%"
    figure, axes = _axes(results, part["title"], "epoch", unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    drawn = False
    for line, look in zip(lines, _looks(results.plan, lines), strict=True):
        rows = results.rows({**part.get("where", {}), METHOD: line})
        curves = [
            row[GRADIENT] if name == GRADIENT else row["curves"].get(name, []) for row in rows
        ]
        points = [
            (epoch, estimate([100 * share for share in shares]))
            for epoch, shares in enumerate(zip(*curves, strict=False), start=1)
        ]
        drawn = drawn or bool(points)
        every = max(1, len(points) // MARKED)
        _line(axes, points, str(line), {**look, "markevery": every, "markersize": 4})
    return _finished(figure, axes) if drawn else None


def places(values: Sequence[object]) -> dict[object, float]:
    """Where values are on an axis: at their own place, or evenly where that would crowd them.

    Example:
        >>> places([0.0, 0.2, 0.4]), places([0.0, 0.001, 1.0]), places([64, None])
        ({0.0: 0.0, 0.2: 0.2, 0.4: 0.4}, {0.0: 0.0, 0.001: 1.0, 1.0: 2.0}, {64: 0.0, None: 1.0})
    """
    numbers = [each for each in values if isinstance(each, (int, float))]
    gaps = [later - sooner for sooner, later in pairwise(numbers)]
    if len(numbers) == len(values) and (not gaps or max(gaps) < EVEN * min(gaps)):
        return {value: float(value) for value in numbers}
    return {value: float(number) for number, value in enumerate(values)}


def shared_name(labels: Sequence[str]) -> tuple[str, list[str]]:
    """The name that all labels give their values, and labels without it.

    Example:
        >>> shared_name(["τ = 0", "τ = 1"]), shared_name(["τ = 0", "hinge"])
        (('τ', ['0', '1']), ('', ['τ = 0', 'hinge']))
    """
    names = {label.rpartition(" = ")[0] for label in labels}
    if len(names) != 1:
        return "", list(labels)
    return names.pop(), [label.rpartition(" = ")[2] for label in labels]


def _looks(plan: Plan, lines: Sequence[object]) -> list[dict[str, Any]]:
    """By loss, as in reports, and dashed if it is there before; else all from dark to light."""
    losses = [plan.methods.get(str(line), {}).get("loss") for line in lines]
    markers = [MARKS[number % len(MARKS)] for number in range(len(lines))]
    before = [losses[:number].count(loss) for number, loss in enumerate(losses)]
    if max(before, default=0) >= len(STYLES) or not set(losses) <= set(COLOURS):
        shades = matplotlib.colormaps["viridis"](torch.linspace(0, 0.9, len(lines)).numpy())
        return [{"color": c, "marker": m} for c, m in zip(shades, markers, strict=True)]
    return [
        {"color": COLOURS[str(loss)][0], "linestyle": STYLES[number], "marker": marker}
        for loss, number, marker in zip(losses, before, markers, strict=True)
    ]


def _axes(results: Results, title: str, horizontal: str, vertical: str) -> tuple[Figure, Axes]:
    """Axes with a title that says what ours is."""
    protocol = results.record["protocol"]
    shared = [protocol["model"]] if "model" in protocol else []
    if "epochs" in protocol:
        shared.append(f"{protocol['epochs']} epoch{'s' * (protocol['epochs'] != 1)}")
    title += "\n" + ", ".join([f"ours: preset {results.record['preset']}", *shared])
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=horizontal, ylabel=vertical)
    axes.set_title(title, fontsize=10)
    return figure, axes


def _line(
    axes: Axes, points: Sequence[tuple[float, Estimate | None]], label: str, look: Any
) -> None:
    """Means, with a band of one deviation to both sides, broken where there is none."""
    if not any(each for _, each in points):
        return
    x = [place for place, _ in points]
    middle = [each.mean if each else nan for _, each in points]
    spread = [(each.std if each else None) or 0.0 for _, each in points]
    axes.plot(x, middle, label=label, **look)
    if any(spread):
        low = [m - s for m, s in zip(middle, spread, strict=True)]
        high = [m + s for m, s in zip(middle, spread, strict=True)]
        axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)


def _published(
    axes: Axes, points: list[tuple[float, float]], label: str, look: Any, first: bool
) -> None:
    """Hollow points, those of the second paper smaller."""
    x, y = zip(*points, strict=True)
    edge = {"edgecolors": look["color"], "marker": look["marker"]}
    axes.scatter(x, y, s=34 if first else 12, facecolors="none", label=label, zorder=3, **edge)


def _unit(metric: str) -> str:
    return "scores" if metric == NON_ZERO else f"{title_of(metric)}, %"


def legend_beside(axes: Axes) -> None:
    """A legend that covers nothing."""
    beside = (1.0, 0.5)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=beside, handlelength=3)


def _finished(figure: Figure, axes: Axes) -> Figure:
    if len(axes.get_legend_handles_labels()[0]) > 1:
        legend_beside(axes)
    return figure
