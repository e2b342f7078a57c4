"""A figure of sets of labels: how often those of each class contain it, method by method."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from topklass._files import write_whole
from topklass.report.colours import COLOURS
from topklass.report.figures import BINS, SAME
from topklass.report.svg import SETTINGS

COLUMNS = 3
PANEL = (3.0, 2.3)
"""Inches."""
COLOUR, GOAL = COLOURS["smooth"][0], COLOURS["noised"][0]


def write_sets_figure(record: dict[str, Any], path: Path) -> None:
    """Draw a panel for each method, and write them as a PNG file.

    If some classes are rarer, a point is a class, the rarest on the left, and the line the mean of
    classes that are about as frequent. If not, classes are sorted by their coverage.

    Args:
        record: of :func:`topklass.train.compare_sets`.
        path: of the file to write.
    """
    methods = record["sets"]
    rows = -(-len(methods) // COLUMNS)
    with matplotlib.rc_context({**SETTINGS, "grid.color": "#dddddd", "axes.titlesize": 9}):
        figure = Figure(figsize=(COLUMNS * PANEL[0], rows * PANEL[1]), layout="constrained")
        panels = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).flat
        for axes, method in zip(panels, methods, strict=False):
            _draw(axes, method, record["counts"], 100 * (1 - record["alpha"]))
        for axes in list(panels)[len(methods) :]:
            axes.set_axis_off()
        figure.supylabel("% of test images whose set has their label", fontsize=9)
        label = "training images of a class" if _is_long_tail(record["counts"]) else "% of classes"
        figure.supxlabel(label, fontsize=9)
        write_whole(path, lambda file: figure.savefig(file, format="png", dpi=150))


def _draw(axes: Axes, method: dict[str, Any], counts: list[int], goal: float) -> None:
    tested = [
        (count, 100 * share)
        for count, share in zip(counts, method["by_class"], strict=True)
        if share is not None
    ]
    axes.axhline(goal, color=GOAL, linestyle="--", linewidth=1)
    if _is_long_tail(counts):
        axes.plot(*zip(*tested, strict=True), "o", color=COLOUR, alpha=0.3, markeredgewidth=0)
        axes.plot(*zip(*_bins(sorted(tested)), strict=True), color=COLOUR)
        axes.set_xscale("log")
    else:
        shares = sorted(share for _, share in tested)
        places = [100 * (place + 0.5) / len(shares) for place in range(len(shares))]
        axes.plot(places, shares, color=COLOUR)
    macro = method["coverage"]["macro"]
    axes.set_title(f"{method['name']}\n{method['size']:.2f} labels, macro {100 * macro:.1f} %")
    axes.set_ylim(-3, 103)


def _is_long_tail(counts: list[int]) -> bool:
    return max(counts) > SAME * max(1, min(counts))


def _bins(tested: list[tuple[int, float]]) -> list[tuple[float, float]]:
    """Mean counts and shares of classes that are about as frequent."""
    edges = [round(number * len(tested) / BINS) for number in range(BINS + 1)]
    parts = [tested[low:high] for low, high in pairwise(edges) if high > low]
    return [
        (sum(count for count, _ in part) / len(part), sum(share for _, share in part) / len(part))
        for part in parts
    ]
