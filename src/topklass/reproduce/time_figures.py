"""Lines of times on logarithmic axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from topklass.reproduce.algorithms import CLASSES, TABLE_3, TABLE_4, hardware
from topklass.reproduce.epoch_time import BASE, GOAL, PUBLISHED
from topklass.reproduce.experiment import Record
from topklass.reproduce.figures import LOOK, legend_beside, save

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
METHODS = {
    BASE: (BLACK, "x"),
    "summation": (ORANGE, "s"),
    "summation, a thread a row, bare recursion": (PINK, "v"),
    "divide and conquer, autograd": (GREEN, "D"),
    "divide and conquer, recursion and eq. 60": (SKY, "P"),
    "published code": (RED, "^"),
    "topklass": (BLUE, "o"),
}
"""Those of the study that are drawn; the tables have all."""
PAPER = dict(zip((*TABLE_3, *TABLE_4), (ORANGE, SKY, GREEN, SKY), strict=True))
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


def draw_algorithms(record: Record, folder: Path) -> list[Path]:
    """Times against the number of classes on each device, the paper's dashed."""
    paths = []
    for device, details in record["protocol"].items():
        rows = [row for row in record["rows"] if row["device"] == device and "classes" in row]
        with matplotlib.rc_context(LOOK):
            figure = Figure(figsize=(9, 5), layout="constrained")
            forward, backward = figure.subplots(1, 2, sharey=True)
            by_classes(forward, rows, "forward_ms", TABLE_3)
            by_classes(backward, rows, "backward_ms", TABLE_4)
            forward.set(title="forward", ylabel="ms")
            backward.set(title="backward")
            legend: dict[str, Artist] = {}
            for axes, pass_ in ((forward, "forward"), (backward, "backward")):
                lines, names = axes.get_legend_handles_labels()
                named = [f"{name} ({pass_})" if name in PAPER else name for name in names]
                legend |= dict(zip(named, lines, strict=True))
            figure.legend(
                legend.values(), legend.keys(), loc="outside lower center", ncols=2, fontsize=8
            )
            figure.suptitle(f"Batch of 256, k = 5: {hardware(details)}", fontsize=11)
            paths += save(figure, folder, f"{record['experiment']}-{device}")
    return paths


def by_classes(
    axes: Axes, rows: list[Record], key: str, paper: Mapping[str, Sequence[float]]
) -> None:
    """Times of methods, and those of the paper."""
    for name, (colour, marker) in METHODS.items():
        points = [(row["classes"], row[key]) for row in rows if row["method"] == name]
        line(axes, name, points, colour, marker)
    for name, values in paper.items():
        line(axes, name, list(zip(CLASSES, values, strict=True)), PAPER[name], "", "--")
    axes.set(xscale="log", yscale="log", xlabel="classes")


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
