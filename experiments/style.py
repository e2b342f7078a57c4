"""How all figures of documents look: narrow, with large letters, on light and on dark pages.

Text of ``SMALL`` points in a figure of ``WIDTH`` inches has ten pixels where the figure is shown
360 pixels wide, as on a phone. Draw with the colours of :mod:`topklass.report.colours`, those for
light pages: the file has those for dark pages too.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, log10
from pathlib import Path
from statistics import fmean
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter
from matplotlib.transforms import offset_copy

from topklass._files import write_whole
from topklass.report.svg import SETTINGS, standalone

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
LABEL_WIDTH = 22
"""Characters of a line of a label."""
LINE_HEIGHT = 1.25
"""Of labels, in font sizes."""
ROOM = 12
"""Points between axes and labels."""
LEADER = {"arrowstyle": "-", "lw": 0.6, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 3}
"""From a label to its line."""
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


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
    ends = {line: last_point(line) for line in lines}
    to_axes = axes.transData - axes.transAxes
    heights = {line: float(to_axes.transform(end)[1]) for line, end in ends.items()}
    order = sorted(lines, key=heights.__getitem__)
    labels = {line: wrap(str(line.get_label()), LABEL_WIDTH) for line in order}
    gap = SMALL * LINE_HEIGHT / 72 * figure.dpi / axes.get_window_extent().height
    beside = offset_copy(axes.transAxes, figure, x=ROOM, units="points")
    right = max(x for x, _ in ends.values())
    places = iter(spread_out([heights[line] for line in order for _ in labels[line]], gap, 0, 1))
    for line in order:
        dash = "-" if ends[line][0] == right else ":"
        middle = fmean(next(places) for _ in labels[line])
        axes.annotate(
            "\n".join(labels[line]),
            ends[line],
            (1, middle),
            textcoords=beside,
            color=line.get_color(),
            fontsize=SMALL,
            va="center",
            annotation_clip=False,
            arrowprops={"color": line.get_color(), "linestyle": dash, **LEADER},
        )


def last_point(line: Line2D) -> tuple[float, float]:
    """Where a line ends; it may be broken."""
    x, y = (np.asarray(each, float).tolist() for each in line.get_data())
    return [point for point in zip(x, y, strict=True) if isfinite(point[1])][-1]


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


def legend_below(figure: Figure, handles: Sequence[Artist], columns: int = 2) -> None:
    """A legend that covers nothing and takes no width."""
    figure.legend(
        handles=list(handles),
        loc="outside lower left",
        ncols=columns,
        handlelength=1.5,
        columnspacing=1.2,
        borderaxespad=0,
    )


def headed(figure: Figure, title: str, below: str = "") -> None:
    """Write a title, and a line below it that matters less."""
    text = f"{title}\n{below}".strip()
    figure.suptitle(text, x=0.01, ha="left", fontsize=10, linespacing=1.3)


def powers(axis: Axis) -> None:
    """Label a logarithmic axis with powers of ten, as plain text.

    Example:
        >>> power(1e-4), power(0.0), power(1.0), power(1e3)
        ('10⁻⁴', '0', '1', '10³')
    """
    axis.set_major_formatter(FuncFormatter(lambda value, _: power(value)))
    axis.set_minor_formatter(NullFormatter())


def power(value: float) -> str:
    """A power of ten, or 0."""
    if value == 0:
        return "0"
    exponent = round(log10(value))
    return f"{value:g}" if exponent in (0, 1) else "10" + str(exponent).translate(RAISED)
