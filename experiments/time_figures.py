"""Lines of times on logarithmic axes."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.epoch_time import BASE, GOAL, PUBLISHED
from experiments.experiment import Record
from experiments.style import LOOK, SMALL, WIDTH, headed, label_ends, save
from topklass.report.colours import COLOURS
from topklass.report.svg import QUIET

HEIGHT = 5.6
"""Inches."""
LOSSES = {
    BASE: ("cross-entropy", "x", "-"),
    "smooth": ("smooth", "o", "-"),
    "noised, B = 3": ("noised", "s", ":"),
    "noised, B = 10": ("noised", "P", "--"),
    "noised, exact": ("noised", "D", "-"),
    PUBLISHED: ("hinge", "^", "-"),
}
"""Whose colour a loss has, with marker and dashes."""
FINE, COARSE = (1, 1.01, 1.02, 1.05, 1.1, 1.2, 1.3, 1.5, 2), (1, 2, 5, 10, 20, 50, 100)
NEAR = (0.96, 1.16)
"""What the second part of the figure shows."""


def draw_epochs(record: Record, folder: Path) -> list[Path]:
    """Times of epochs over that of cross-entropy, against K: all of them, and those near 1."""
    rows = record["rows"]
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        title = "Time of an epoch, cross-entropy = 1"
        headed(figure, title, f"{record['protocol']['model']}, {record['hardware']}")
        whole, near = figure.subplots(2)
        lengths, high = sorted({row["k"] for row in rows}), max(row["ratio"] for row in rows)
        whole.set(yscale="log", ylabel="all")
        near.set(ylim=NEAR, xlabel="K", ylabel="those near 1")
        for axes, highest in ((whole, inf), (near, NEAR[1])):
            parts = {name: [row for row in rows if row["loss"] == name] for name in LOSSES}
            shown = {n: p for n, p in parts.items() if p and p[-1]["ratio"] < highest}
            lines = [line(axes, name, part) for name, part in shown.items()]
            axes.set(xscale="log")
            axes.set_xticks(lengths, map(str, lengths))
            axes.minorticks_off()
            if axes is whole:
                ticks = [tick for tick in (FINE if high < 2 else COARSE) if tick <= max(high, 1.02)]
                axes.set_yticks(ticks, map(str, ticks))
            label_ends(figure, axes, lines)
        near.axhline(1 + GOAL, color=QUIET, linestyle=":", linewidth=1)
        goal = f"+{100 * GOAL:g} %, our goal"
        near.annotate(
            goal, (lengths[0], 1 + GOAL), (0, 2), textcoords="offset points", fontsize=SMALL
        )
        return [save(figure, folder, record["experiment"], title)]


def line(axes: Axes, name: str, rows: Sequence[Record]) -> Line2D:
    """One loss."""
    loss, marker, dash = LOSSES[name]
    x, y = [row["k"] for row in rows], [row["ratio"] for row in rows]
    return axes.plot(x, y, dash, color=COLOURS[loss][0], marker=marker, label=name)[0]
