"""The figures of a report: curves by epoch, accuracy by length of the list and by class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import matplotlib
import torch
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from topklass.report.colours import Style, styles
from topklass.report.svg import SETTINGS, inline
from topklass.train.comparison import Comparison, Group
from topklass.train.engine import LENGTHS
from topklass.train.finished import FinishedRun
from topklass.train.statistics import Estimate, estimate

SIZE = (4.6, 2.9)
"""Inches, such that letters are readable on a phone."""
BINS = 8
"""Of classes that are about as frequent."""
SAME = 2
"""Frequencies of bins within this ratio count as the same."""

Line = list[tuple[float, Estimate]]
"""Places on the horizontal axis, and shares there."""


@dataclass(frozen=True)
class Picture:
    """A figure with its words."""

    title: str
    caption: str
    svg: Markup


def pictures(comparison: Comparison) -> list[Picture]:
    """All figures that the runs have data for."""
    return [*curves(comparison), by_length(comparison), by_class(comparison)]


def swatches(comparison: Comparison, name: str) -> list[Markup]:
    """A piece of each group's line, for a legend of that name."""
    drawn = []
    for place, style in enumerate(styles(comparison)):
        figure = Figure(figsize=(0.45, 0.16))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.plot([0, 1, 2], [0, 0, 0], **_look(style))
        drawn.append(inline(figure, f"{name}{place}"))
    return drawn


def curves(comparison: Comparison) -> list[Picture]:
    """Validation and training accuracy by epoch."""
    k = str(comparison.lengths[-1]) if len(comparison.lengths) == 2 else "k"
    average = "" if comparison.average == "micro" else ", mean over classes"
    wanted = [("validation", None), ("validation", 1), ("train", None)]
    if comparison.lengths == (1,):
        wanted = [("validation", 1), ("train", 1)]
    titles = {"validation": "accuracy in validation", "train": "accuracy in training"}
    captions = {
        "validation": f"On held-out images with clean labels{average}.",
        "train": "On the training images as they are shown: shifted, with noisy labels if there "
        f"are any, while the weights change{average}.",
    }
    drawn = []
    for split, length in wanted:
        names = [f"{split}/top{length or group.settings['k']}" for group in comparison.groups]
        lines = [
            _by_epoch(group, name) for group, name in zip(comparison.groups, names, strict=True)
        ]
        title = f"Top-{length or k} {titles[split]}"
        if any(lines):
            picture = _picture(
                comparison, f"{split}{length or 'k'}", title, captions[split], "epoch", lines
            )
            drawn.append(picture)
    return drawn


def by_length(comparison: Comparison) -> Picture:
    """Test accuracy by the length of the list."""
    lengths = [k for k in LENGTHS if k <= len(comparison.classes)]
    lines: list[Line] = [
        [(k, group.accuracy(k, comparison.average)) for k in lengths] for group in comparison.groups
    ]
    title = "Test accuracy by the number of guesses"
    caption = "How often the label is among so many guesses."
    return _picture(comparison, "lengths", title, caption, "guesses", lines)


def by_class(comparison: Comparison) -> Picture:
    """Test accuracy of classes by their frequency; if that is the same, from worst to best."""
    k = comparison.lengths[-1]
    lines = [_over_runs(group, lambda run: _by_frequency(run, k)) for group in comparison.groups]
    places = [place for line in lines for place, _ in line]
    if max(places) <= SAME * min(places):
        return _sorted_classes(comparison, k)

    def widen(axes: Axes) -> None:
        if max(places) > 10 * min(places) > 0:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("")

    caption = (
        f"Each point is the mean over about 1/{BINS} of the classes, the rarest on the left. "
        "Frequencies are those of the training labels, noise included."
    )
    title = f"Top-{k} test accuracy by the frequency of the class"
    label = "training images of a class"
    return _picture(comparison, "frequency", title, caption, label, lines, widen)


def _sorted_classes(comparison: Comparison, k: int) -> Picture:
    lines = [_over_runs(group, lambda run: _quantiles(run, k)) for group in comparison.groups]
    counts = torch.cat([run.counts for run in comparison.runs])
    fewest, most = int(counts.min()), int(counts.max())
    number = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
    caption = (
        f"All classes have about the same number of training images ({number}), so they are "
        "sorted by their accuracy: a tenth of the classes is below the value at 10."
    )
    title = f"Top-{k} test accuracy of classes, from worst to best"
    return _picture(comparison, "classes", title, caption, "% of classes", lines)


def _picture(
    comparison: Comparison,
    name: str,
    title: str,
    caption: str,
    horizontal: str,
    lines: Sequence[Line],
    adjust: Callable[[Axes], object] = lambda axes: None,
) -> Picture:
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        for line, style in zip(lines, styles(comparison), strict=True):
            _draw(axes, line, style)
        axes.set(xlabel=horizontal, ylabel="%")
        if horizontal in ("epoch", "guesses"):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        adjust(axes)
        return Picture(
            title, caption, inline(figure, name, _described(comparison, title, horizontal, lines))
        )


def _draw(axes: Axes, line: Line, style: Style) -> None:
    """A mean with a band of one deviation to both sides."""
    places = [place for place, _ in line]
    middle = [100 * value.mean for _, value in line]
    spread = [100 * (value.std or 0.0) for _, value in line]
    low = [m - s for m, s in zip(middle, spread, strict=True)]
    high = [m + s for m, s in zip(middle, spread, strict=True)]
    axes.plot(places, middle, markevery=max(1, len(places) // 10), **_look(style))
    if any(spread):
        axes.fill_between(places, low, high, color=style.colour, alpha=0.15, linewidth=0)


def _look(style: Style) -> dict[str, Any]:
    return {"color": style.colour, "linestyle": style.dash, "marker": style.marker}


def _described(comparison: Comparison, title: str, horizontal: str, lines: Sequence[Line]) -> str:
    """What a figure shows, with the ends of its lines."""
    lines_described = [
        f"{comparison.title(group)}: {_at(*line[0])}, {_at(*line[-1])}"
        for group, line in zip(comparison.groups, lines, strict=True)
        if line
    ]
    return f"{title}. Horizontal axis: {horizontal}. {'; '.join(lines_described)}."


def _at(place: float, value: Estimate) -> str:
    return f"{100 * value.mean:.1f} % at {place:g}"


def _by_epoch(group: Group, name: str) -> Line:
    return list(group.curve(name).items())


def _over_runs(group: Group, line: Callable[[FinishedRun], list[tuple[float, float]]]) -> Line:
    """The lines of all seeds as one, point by point."""
    points = zip(*(line(run) for run in group.runs), strict=True)
    return [(fmean(x for x, _ in each), estimate([y for _, y in each])) for each in points]


def _quantiles(run: FinishedRun, k: int) -> list[tuple[float, float]]:
    """Percentages of classes, and the accuracy that so many do not exceed."""
    accuracy = run.accuracy(k, "none").double()
    shares = torch.linspace(0, 1, 51, dtype=torch.float64)
    values = accuracy[~accuracy.isnan()].quantile(shares)
    return list(zip((100 * shares).tolist(), values.tolist(), strict=True))


def _by_frequency(run: FinishedRun, k: int) -> list[tuple[float, float]]:
    """Mean numbers of training images of classes that are about as frequent, and accuracies."""
    accuracy = run.accuracy(k, "none")
    tested = (~accuracy.isnan()).nonzero().flatten()
    order = tested[run.counts[tested].argsort(stable=True)]
    bins = [part for part in order.tensor_split(BINS) if len(part)]
    return [(run.counts[b].double().mean().item(), accuracy[b].mean().item()) for b in bins]
