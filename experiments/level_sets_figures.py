"""Triangles with level sets."""

from __future__ import annotations

from math import sqrt
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.tri import Triangulation, TriContourSet

from experiments.experiment import Record
from experiments.landscapes import SIZE, simplex
from experiments.level_sets import parameters, unpacked
from experiments.style import LOOK, SMALL, WIDTH, headed, save
from topklass.report.colours import COLOURS
from topklass.report.svg import INK

COLUMNS = {"1": 3, "6": 3, "4": 4, "5": 4}
WIDE = 0.866
"""Height of a triangle over its width."""
DOTS = 150
"""Per inch, of the filled triangles."""
LEVELS = [-1e-6, *(step / 10 - 0.002 for step in range(1, 10)), 1 + 1e-6]
"""Beside tenths, where some losses are flat and have no line; with both ends."""
FILLED = "viridis"
CORNER = COLOURS["short-list"][0]
NAMES = {
    "zero-one": "top-K error",
    "cross-entropy": "cross-entropy",
    "hinge": "hinge",
    "calibrated-hinge": "calibrated hinge",
    "convex-hinge": "convex hinge",
    "smooth": "smoothed hinge",
    "noised": "noised, balanced",
    "imbalanced": "noised, imbalanced",
}
TITLES = {
    "1": "Level sets of losses, K = 2",
    "6": "Level sets of losses, K = 1",
    "4": "Number of noise vectors, ε = 1",
    "5": "Size of the noise",
}
NOTE = "Scores add up to 2; the label's own is 2 in the corner y."


def draw(record: Record, folder: Path) -> list[Path]:
    """Draw all figures."""
    points = simplex(record["protocol"]["grid"]) / SIZE
    x = points[:, 1] + points[:, 2] / 2
    y = points[:, 2] * sqrt(3) / 2
    triangles = Triangulation(x.numpy(), y.numpy())
    paths = []
    for number, title in TITLES.items():
        rows = [row for row in record["rows"] if row["figure"] == number]
        alt = f"{title} (Garcin et al. 2022, Figure {number})"
        with matplotlib.rc_context(LOOK):
            figure = all_panels(rows, number, triangles)
            headed(figure, alt, NOTE)
            paths.append(save(figure, folder, f"{record['experiment']}-figure-{number}", alt))
    return paths


def all_panels(rows: list[Record], number: str, triangles: Triangulation) -> Figure:
    """All triangles of a figure, with one scale of colours."""
    columns = COLUMNS[number]
    lines = -(-len(rows) // columns)
    height = lines * (WIDE * WIDTH / columns + 0.35) + 0.9
    figure = Figure(figsize=(WIDTH, height), layout="constrained", dpi=DOTS)
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, row in zip(grid.flat, rows, strict=False):
        filled = triangle(axes, triangles, row)
        axes.set_title(heading(row, number), fontsize=SMALL, loc="center")
    bar = figure.colorbar(filled, ax=grid, location="bottom", aspect=40, ticks=[0, 0.5, 1])
    bar.set_label("loss, rescaled from 0 to 1")
    return figure


def triangle(axes: Axes, triangles: Triangulation, row: Record) -> TriContourSet:
    """One loss; what is filled is not drawn as paths, which would be long."""
    values = unpacked(row).numpy()
    jagged = row["figure"] in ("4", "5") and row["samples"] is not None
    axes.set_rasterization_zorder(0)
    below = {"zorder": -1}
    if row["loss"] == "zero-one":  # nothing between
        levels, ends = [LEVELS[0], 0.5, LEVELS[-1]], matplotlib.colormaps[FILLED]([0.05, 0.95])
        filled = axes.tricontourf(triangles, values, levels, colors=list(ends), **below)
    else:
        filled = axes.tricontourf(triangles, values, LEVELS, cmap=FILLED, **below)
    if not jagged and row["loss"] != "zero-one":
        white = {"colors": "white", "linewidths": 0.5, "alpha": 0.7}
        axes.tricontour(triangles, values, LEVELS[1:-1], **white, **below)
    axes.plot([0, 1, 0.5, 0], [0, 0, sqrt(3) / 2, 0], color=INK, linewidth=0.8)
    corner = (0.5, sqrt(3) / 2)
    axes.plot(*corner, "o", color=CORNER, markersize=4, clip_on=False)
    axes.annotate("y", corner, (5, -3), textcoords="offset points", color=CORNER, fontsize=SMALL)
    axes.set_aspect("equal")
    return filled


def heading(row: Record, number: str) -> str:
    """Name and parameters, or what the panels of a figure differ in."""
    if number in ("4", "5"):
        samples = "exact" if row["samples"] is None else f"B = {row['samples']}"
        return f"K = {row['k']}, {samples}" + (f"\nε = {row['epsilon']:g}" * (number == "5"))
    name = NAMES["imbalanced" if "margin" in row else row["loss"]]
    return f"{name}\n{parameters(row)}"
