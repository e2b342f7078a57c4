"""How all figures of documents look: narrow, with large letters, on light and on dark pages.

Text of ``SMALL`` points in a figure of ``WIDTH`` inches has ten pixels where the figure is shown
360 pixels wide, as on a phone. Draw with the colours of :mod:`topklass.report.colours`, those for
light pages: the file has those for dark pages too.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from topklass._files import write_whole
from topklass.report.svg import QUIET, SETTINGS, standalone

WIDTH = 4.4
"""Inches."""
SMALL = 9
"""Points."""
LOOK: dict[Any, Any] = {
    **SETTINGS,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "legend.fontsize": SMALL,
    "legend.frameon": False,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "lines.markersize": 5,
}
"""For ``matplotlib.rc_context``."""
LINE_HEIGHT = 1.25
"""Of labels, in font sizes."""
ROOM = 12
"""Points between axes and labels."""
LEADER = {"arrowstyle": "-", "lw": 0.6, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 3}
"""From a label to its line."""


def save(figure: Figure, folder: Path, name: str, alt: str) -> Path:
    """Write ``name.svg``; the same figure makes the same file.

    Args:
        figure: drawn with ``LOOK``.
        folder: where to write it; it is made if it is not there.
        name: of the file, without its ending.
        alt: what the figure shows, in a sentence.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, text = folder / f"{name}.svg", standalone(figure, name, alt)
    write_whole(path, lambda file: file.write(text.encode()))
    return path


def label_ends(figure: Figure, axes: Axes, lines: Sequence[Line2D]) -> None:
    """Write the label of each line beside its last point, in its colour, none over another.

    Args:
        figure: with constrained layout, otherwise complete.
        axes: of the lines.
        lines: with labels.
    """
    figure.draw_without_rendering()  # such that places are known
    ends = {line: [xy for xy in line.get_xydata() if isfinite(xy[1])][-1] for line in lines}
    to_points, box = 72 / figure.dpi, axes.get_window_extent()
    last = {line: axes.transData.transform(end) * to_points for line, end in ends.items()}
    order = sorted(lines, key=lambda line: float(last[line][1]))
    gap, low, high = SMALL * LINE_HEIGHT, box.y0 * to_points, box.y1 * to_points
    places = spread_out([float(last[line][1]) for line in order], gap, low, high)
    for line, y in zip(order, places, strict=True):
        axes.annotate(
            str(line.get_label()),
            ends[line],
            (box.x1 * to_points + ROOM - last[line][0], y - last[line][1]),
            textcoords="offset points",
            color=line.get_color(),
            fontsize=SMALL,
            va="center",
            annotation_clip=False,
            arrowprops={"color": line.get_color(), **LEADER},
        )


def spread_out(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places closest to those wanted, which rise, that are a gap apart, between two ends.

    Example:
        >>> spread_out([1, 2, 9], gap=2, low=0, high=10)
        [0.5, 2.5, 9.0]
        >>> spread_out([9, 10, 10], gap=2, low=0, high=10)
        [6.0, 8.0, 10.0]
    """
    blocks: list[list[float]] = []  # of labels that touch: where each would have the first
    for number, place in enumerate(wanted):
        blocks.append([place - number * gap])
        while len(blocks) > 1 and fmean(blocks[-2]) > fmean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    highest = high - (len(wanted) - 1) * gap
    firsts = [max(low, min(fmean(block), highest)) for block in blocks for _ in block]
    return [float(first + number * gap) for number, first in enumerate(firsts)]


def legend_below(figure: Figure, axes: Axes, columns: int = 2) -> None:
    """A legend that covers nothing and takes no width."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower left",
        ncols=columns,
        handlelength=2.5,
        columnspacing=1.2,
        labelcolor=QUIET,
    )
