"""Lines of times on logarithmic axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.epoch_time import BASE, GOAL, PUBLISHED
from experiments.experiment import Record
from experiments.figures import LOOK, legend_beside, save

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PINK = "#0072B2", "#D55E00", "#CC79A7"
"""Colours that the colour-blind can tell apart (Okabe and Ito)."""
LOSSES = {
    BASE: (BLACK, "x"),
    "smooth": (BLUE, "o"),
    "noised, B = 3": (GREEN, "s"),
    "noised, B = 10": (SKY, "P"),
    "noised, exact": (PINK, "D"),
    PUBLISHED: (RED, "^"),
}
FINE, COARSE = (1, 1.01, 1.02, 1.05, 1.1, 1.2, 1.3, 1.5, 2), (1, 2, 5, 10, 20, 50, 100)
NEAR = (0.96, 1.16)
"""What the second part of the figure shows."""


def draw_epochs(record: Record, folder: Path) -> list[Path]:
    """Times of epochs over that of cross-entropy, against K: all of them, and those near 1."""
    rows = record["rows"]
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        whole, near = figure.subplots(1, 2)
        lengths, high = sorted({row["k"] for row in rows}), max(row["ratio"] for row in rows)
        whole.set(yscale="log", ylabel="epoch, cross-entropy = 1")
        for axes in (whole, near):
            for name, (colour, marker) in LOSSES.items():
                points = [(row["k"], row["ratio"]) for row in rows if row["loss"] == name]
                line(axes, name, points, colour, marker)
            axes.set(xscale="log", xlabel="K")
            axes.set_xticks(lengths, map(str, lengths))
            axes.minorticks_off()
        ticks = [tick for tick in (FINE if high < 2 else COARSE) if tick <= max(high, 1.02)]
        whole.set_yticks(ticks, map(str, ticks))
        near.set(ylim=NEAR)
        goal = f"+{100 * GOAL:g} %, our goal"
        near.axhline(1 + GOAL, color=BLACK, linestyle=":", linewidth=1, label=goal)
        legend_beside(near)
        figure.suptitle(f"{record['protocol']['model']}, {record['hardware']}", fontsize=10)
        return save(figure, folder, record["experiment"])


def line(
    axes: Axes,
    name: str,
    points: Sequence[tuple[float, float]],
    colour: str,
    marker: str,
    dash: str = "-",
) -> None:
    """One line, unless it has no points."""
    if points:
        x, y = [each for each, _ in points], [each for _, each in points]
        axes.plot(x, y, dash, color=colour, marker=marker, markersize=5, label=name)
