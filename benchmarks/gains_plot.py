"""The README's figure: what the smooth loss gains over cross-entropy, by label noise."""

from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.experiment import Record
from experiments.style import WIDTH, headed, label_ends
from topklass.report.colours import COLOURS
from topklass.report.svg import QUIET

METHOD, BASE = "smooth", "cross-entropy"
LENGTHS = {5: ("top-5", COLOURS["smooth"][0], "o"), 1: ("top-1", COLOURS["noised"][0], "s")}
KINDS = {"block": "arbitrary classes", "superclass": "look-alike classes"}

Gains = dict[float, list[float]]
"""Differences in points, one for each seed, by the noise."""


def gains(record: Record) -> Figure:
    """A panel for each kind of label noise, one dot per seed, lines through their means."""
    figure = Figure(figsize=(WIDTH, 3.0), layout="constrained")
    below = "CIFAR-100, test accuracy in points; one dot per seed"
    headed(figure, "SmoothTopKLoss(k=5) minus cross-entropy", below)
    panels = figure.subplots(1, len(KINDS), sharey=True)
    for axes, (kind, title) in zip(panels, KINDS.items(), strict=True):
        axes.axhline(0, color=QUIET, linewidth=1)
        lines = [line(axes, differences(record, kind, k), k) for k in LENGTHS]
        axes.set(
            title=title,
            xlabel="label noise p",
            xlim=(-0.07, 1.07),
            xticks=[0, 0.2, 0.4, 0.6, 0.8, 1],
        )
        axes.xaxis.set_major_formatter("{x:g}")
    panels[0].set_ylabel("points")
    label_ends(figure, panels[-1], lines)
    return figure


def differences(record: Record, kind: str, k: int) -> Gains:
    """How far the smooth loss is above cross-entropy, for seeds that both have.

    Without noise, its kind does not matter.
    """
    found: dict[tuple[str, float, int], float] = {}
    for row in record["rows"]:
        settings = row["settings"]
        if settings["noise"] == 0 or settings["noise_kind"] == kind:
            at = (row["method"], settings["noise"], row["seed"])
            found[at] = 100 * row["test"]["micro"][k - 1]
    gained: Gains = {}
    for (method, noise, seed), accuracy in sorted(found.items()):
        if method == METHOD and (BASE, noise, seed) in found:
            gained.setdefault(noise, []).append(accuracy - found[BASE, noise, seed])
    return gained


def line(axes: Axes, gained: Gains, k: int) -> Line2D:
    """The gains of lists of k classes."""
    name, colour, marker = LENGTHS[k]
    seeds = [(noise, each) for noise, found in gained.items() for each in found]
    axes.plot(*zip(*seeds, strict=True), marker, color=colour, alpha=0.5, markeredgewidth=0)
    means = [fmean(found) for found in gained.values()]
    return axes.plot(list(gained), means, color=colour, label=name)[0]
