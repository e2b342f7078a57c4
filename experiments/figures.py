"""Figures of a record: metrics by a setting with the papers' points, curves by epoch, gains."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, pairwise
from math import nan
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.cells import METHOD, Results, named, named_axis
from experiments.experiment import Record
from experiments.gains_figure import gains_figure
from experiments.metrics import GRADIENT, NON_ZERO, title_of
from experiments.plan import Plan, Settings
from experiments.style import LOOK, WIDTH, headed, label_ends, legend_below, save
from topklass.report.colours import COLOURS, MARKERS, SHADES
from topklass.report.svg import QUIET
from topklass.train.statistics import Estimate, estimate

HEIGHT = 3.2
"""Inches."""
EVEN = 4
"""Places whose largest gap is this many times the smallest one are drawn at even distances."""
SHORT = {"0.0001": "10⁻⁴"}
"""Of numbers below an axis."""
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
                files.append(save(figure, folder, f"{plan.name}-{part['file']}", part["title"]))
    return files


def _draw(results: Results, part: Settings) -> Figure | None:
    if "against" in part:
        return gains_figure(results, part)
    return _curves(results, part) if "curve" in part else _metric(results, part)


def _metric(results: Results, part: Settings) -> Figure | None:
    """A metric against a setting; hollow points are the papers'."""
    axis, metric = part["x"], part["metric"]
    by_method = axis != METHOD
    lines = results.values(METHOD, part) if by_method else [part["title"]]
    values = results.values(axis, part)
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
    known = [v for v in values if v in run or any(each[v].papers for each in cells.values())]
    place = places(known)
    for line, look in zip(lines, _looks(results.plan, lines), strict=True):
        ours = [(place[value], cells[line][value].ours) for value in run]
        _line(axes, ours, str(line) if by_method else "ours", look)
        for value in known:
            for number in cells[line][value].papers:
                first = number.paper == results.numbers[0].paper
                _published(axes, place[value], number.value, look, first)
    papers = {n.paper for each in cells.values() for cell in each.values() for n in cell.papers}
    for paper in sorted(papers):  # what hollow points are
        first = paper == results.numbers[0].paper
        _published(axes, nan, nan, {"color": QUIET, "marker": "o"}, first, paper)
    name, ticks = shared_name([named(value, axis) for value in run])
    axes.set_xticks([place[value] for value in run], [SHORT.get(tick, tick) for tick in ticks])
    if name:
        axes.set_xlabel(name)
    points = [sum(cell.ours is not None for cell in each.values()) for each in cells.values()]
    least = 2 if len(values) > 1 else 1  # one point does not say how it depends on a setting
    return _finished(figure, axes) if max(points, default=0) >= least else None


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
        shades = cycle([light for light, _ in SHADES.values()])
        return [{"color": c, "marker": m} for c, m in zip(shades, markers, strict=False)]
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
    below = ", ".join([f"ours: preset {results.record['preset']}", *shared])
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    headed(figure, title, below)
    axes = figure.subplots()
    axes.set(xlabel=horizontal, ylabel=vertical)
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
    axes: Axes, x: float, y: float, look: Any, first: bool, label: str | None = None
) -> None:
    """A hollow point, smaller for the second paper."""
    edge = {"edgecolors": look["color"], "marker": look["marker"], "label": label}
    axes.scatter([x], [y], s=34 if first else 12, facecolors="none", zorder=3, **edge)


def _unit(metric: str) -> str:
    return "scores" if metric == NON_ZERO else f"{title_of(metric)}, %"


def _finished(figure: Figure, axes: Axes) -> Figure:
    """With names beside lines, and below what hollow points are."""
    lines = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    hollow = [each for each in axes.collections if not str(each.get_label()).startswith("_")]
    if hollow:
        legend_below(figure, hollow)
    if len(lines) > 1 or hollow:
        label_ends(figure, axes, lines)
    return figure
