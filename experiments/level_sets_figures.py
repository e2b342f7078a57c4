"""Triangles with level sets."""

from __future__ import annotations

from math import sqrt
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.tri import Triangulation, TriContourSet

from experiments.experiment import Record
from experiments.figures import save
from experiments.landscapes import SIZE, simplex
from experiments.level_sets import parameters, unpacked

COLUMNS = {"1": 5, "6": 5, "4": 4, "5": 4}
LEVELS = [-1e-6, *(step / 10 - 0.002 for step in range(1, 10)), 1 + 1e-6]
"""Beside tenths, where some losses are flat and have no line; with both ends."""
COLOURS = "viridis"
INK, MARK = "#202020", "#c0143c"
FORMULAS = {
    "zero-one": ("top-$K$ error", r"$1\{s_{(K)} > s_y\}$"),
    "cross-entropy": ("cross-entropy", r"$-\ln\ \mathrm{softmax}(s)_y$"),
    "hinge": ("hinge", r"$(1 + (s_{\setminus y})_{(K)} - s_y)_+$"),
    "calibrated-hinge": ("calibrated hinge", r"$(1 + s_{(K+1)} - s_y)_+$"),
    "convex-hinge": (
        "convex hinge",
        r"$(\Sigma_{j\leq K} (s + 1 - \delta_y)_{(j)} / K - s_y)_+$",
    ),
    "smooth": ("smoothed hinge", r"$L_{K,\tau}$ with $\alpha = 1/K$"),
    "noised": ("noised, balanced", r"$(1 + \overline{(s + \epsilon Z)_{(K+1)}} - s_y)_+$"),
    "imbalanced": ("noised, imbalanced", r"$(m_y + \overline{(s + \epsilon Z)_{(K+1)}} - s_y)_+$"),
}
TITLES = {
    "1": "Level sets of losses, $K = 2$ (Garcin et al. 2022, Figure 1)",
    "6": "Level sets of losses, $K = 1$ (Garcin et al. 2022, Figure 6)",
    "4": "Number of noise vectors, $\\epsilon = 1$ (Garcin et al. 2022, Figure 4)",
    "5": "Size of the noise (Garcin et al. 2022, Figure 5)",
}
NOTE = (
    "Scores of three labels that add up to 2; the label's own is 2 at the top, 0 at the bottom. "
    "Each loss is rescaled from 0 to 1."
)


def draw(record: Record, folder: Path) -> list[Path]:
    """Draw all figures, each as SVG and PNG."""
    points = simplex(record["protocol"]["grid"]) / SIZE
    x = points[:, 1] + points[:, 2] / 2
    y = points[:, 2] * sqrt(3) / 2
    triangles = Triangulation(x.numpy(), y.numpy())
    paths = []
    for number in TITLES:
        rows = [row for row in record["rows"] if row["figure"] == number]
        with matplotlib.rc_context({"font.size": 9}):
            figure = all_panels(rows, number, triangles)
            paths += save(figure, folder, f"{record['experiment']}-figure-{number}")
    return paths


def all_panels(rows: list[Record], number: str, triangles: Triangulation) -> Figure:
    """All triangles of a figure, with one scale of colours."""
    columns = COLUMNS[number]
    lines = -(-len(rows) // columns)
    figure = Figure(figsize=(2.35 * columns + 0.9, 2.55 * lines + 0.75), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes, row in zip(grid.flat, rows, strict=True):
        filled = triangle(axes, triangles, row)
        axes.set_title(heading(row, number), fontsize=9, pad=9)
    bar = figure.colorbar(filled, ax=grid, shrink=0.6, aspect=30, ticks=[0, 0.5, 1])
    bar.set_label("loss, rescaled")
    figure.suptitle(TITLES[number], fontsize=12)
    figure.supxlabel(NOTE, fontsize=9)
    return figure


def triangle(axes: Axes, triangles: Triangulation, row: Record) -> TriContourSet:
    """One loss."""
    values = unpacked(row).numpy()
    jagged = row["figure"] in ("4", "5") and row["samples"] is not None
    if row["loss"] == "zero-one":  # nothing between
        ends = list(matplotlib.colormaps[COLOURS]([0.05, 0.95]))
        filled = axes.tricontourf(triangles, values, [LEVELS[0], 0.5, LEVELS[-1]], colors=ends)
    else:
        filled = axes.tricontourf(triangles, values, LEVELS, cmap=COLOURS)
    if not jagged and row["loss"] != "zero-one":
        axes.tricontour(triangles, values, LEVELS[1:-1], colors="white", linewidths=0.5, alpha=0.7)
    filled.set_rasterized(True)
    axes.plot([0, 1, 0.5, 0], [0, 0, sqrt(3) / 2, 0], color=INK, linewidth=0.8)
    axes.plot([0.5], [sqrt(3) / 2], "o", color=MARK, markersize=4, clip_on=False)
    axes.annotate("$y$", (0.5, sqrt(3) / 2), (5, -3), textcoords="offset points", color=MARK)
    axes.set_aspect("equal")
    axes.set_axis_off()
    return filled


def heading(row: Record, number: str) -> str:
    """Name and formula, or what the panels of a figure differ in."""
    if number in ("4", "5"):
        samples = "exact ($B = \\infty$)" if row["samples"] is None else f"$B = {row['samples']}$"
        epsilon = "" if number == "4" else f"$\\epsilon = {row['epsilon']:g}$, "
        return f"$K = {row['k']}$, {epsilon}{samples}"
    name, formula = FORMULAS["imbalanced" if "margin" in row else row["loss"]]
    given = f", {parameters(row)}" if row["loss"] == "smooth" else ""
    below = f"\n{parameters(row)}" if row["loss"] == "noised" else "\n"
    return f"{name}{given}\n{formula}{below}"
