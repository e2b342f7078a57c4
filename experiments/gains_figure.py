"""A figure of all gains: those by one metric against those by another."""

from __future__ import annotations

from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.cells import METHOD, Results
from experiments.gains import Gains
from experiments.plan import CASE, Plan, Settings
from experiments.style import WIDTH, headed
from topklass.report.colours import COLOURS
from topklass.report.svg import PAGE, QUIET

HEIGHT, LINE = 4.7, 0.23
"""Inches of the axes, and of a line of the legends below."""
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h")
ROOM = 0.25
"""Share of an axis that is at least on either side of 0."""


def gains_figure(results: Results, part: Settings) -> Figure | None:
    """A point for each case and method, with standard errors; None if there is none.

    Args:
        results: a record with cases.
        part: of a plan, with ``against`` and two ``metrics``.
    """
    across, up = (Gains(results, part["against"], metric) for metric in part["metrics"])
    methods = [str(each) for each in results.values(METHOD, part) if each != part["against"]]
    cases = [str(each) for each in results.values(CASE, part)]
    cells = [(case, method) for case in cases for method in methods]
    points = {
        (case, method): (x, y)
        for case, method in cells
        if (x := across.gain(case, method)) and (y := up.gain(case, method))
    }
    if not points:
        return None
    drawn = {each for point in points for each in point}
    lines = 1 + max(len(drawn & {*methods}), len(drawn & {*cases}))
    figure = Figure(figsize=(WIDTH, HEIGHT + LINE * lines), layout="constrained")
    axes, below = figure.subplots(2, height_ratios=(HEIGHT, LINE * lines))
    colour, mark = colours(results.plan, methods), dict(zip(cases, cycle(MARKS), strict=False))
    for (case, method), (x, y) in points.items():
        axes.errorbar(
            x.mean,
            y.mean,
            xerr=x.error,
            yerr=y.error,
            color=colour[method],
            elinewidth=0.7,
            linestyle="none",
            marker=mark[case],
            markersize=_size(mark[case]),
            markeredgecolor=PAGE,
            markeredgewidth=0.5,
        )
    _quadrants(axes, *(metric.partition(" ")[2] for metric in part["metrics"]))
    headed(figure, part["title"], f"preset {results.record['preset']}")
    losses = [_key(each, "o", colour[each]) for each in methods if each in drawn]
    data = [_key(each, mark[each], QUIET) for each in cases if each in drawn]
    below.axis("off")
    look = {"alignment": "left", "handlelength": 1.0, "handletextpad": 0.3}
    look |= {"borderpad": 0, "borderaxespad": 0}
    below.add_artist(below.legend(handles=losses, title="loss", loc="upper left", **look))
    below.legend(handles=data, title="data", loc="upper right", **look)
    return figure


def colours(plan: Plan, methods: list[str]) -> dict[str, str]:
    """The colour of each method: that of its loss for the first, then those that are free."""
    chosen: dict[str, str] = {}
    for method in methods:
        loss = str(plan.methods[method].get("loss"))
        if loss in COLOURS and COLOURS[loss][0] not in chosen.values():
            chosen[method] = COLOURS[loss][0]
    free = [pair[0] for pair in COLOURS.values() if pair[0] not in chosen.values()]
    others = [method for method in methods if method not in chosen]
    return {**chosen, **dict(zip(others, cycle(free or [QUIET]), strict=False))}


def _quadrants(axes: Axes, across: str, up: str) -> None:
    """Lines at 0, and a word in each corner."""
    axes.axhline(0, color=QUIET, linewidth=1, zorder=1)
    axes.axvline(0, color=QUIET, linewidth=1, zorder=1)
    axes.margins(0.1)
    for get, put in ((axes.get_xlim, axes.set_xlim), (axes.get_ylim, axes.set_ylim)):
        low, high = get()  # each quadrant has room for its name
        put(min(low, ROOM * (low - high)), max(high, ROOM * (high - low)))
    axes.set(xlabel=f"gain of {across}, points", ylabel=f"gain of {up}, points")
    for x, y, text in (
        (1, 1, "gains both"),
        (0, 1, f"gains {up} only"),
        (0, 0, "gains neither"),
        (1, 0, f"gains {across} only"),
    ):
        axes.annotate(
            text,
            (x, y),
            xycoords="axes fraction",
            xytext=(-4 if x else 4, -4 if y else 4),
            textcoords="offset points",
            ha="right" if x else "left",
            va="top" if y else "bottom",
            color=QUIET,
            style="italic",
            zorder=4,
        )


def _key(label: str, marker: str, colour: str) -> Line2D:
    return Line2D([], [], color=colour, marker=marker, label=label, ls="none", ms=_size(marker))


def _size(marker: str) -> float:
    """Stars look small."""
    return 9.5 if marker == "*" else 6.5
