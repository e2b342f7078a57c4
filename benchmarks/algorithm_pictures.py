"""The one-pass algorithm on the example of docs/how-it-works.md, to docs/images/how-it-works."""

from math import inf, log10

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import topklass
from benchmarks.environment import ROOT
from experiments.style import LOOK, SMALL, WIDTH, powers, save
from topklass.reference import power_sums
from topklass.report.colours import COLOURS
from topklass.report.svg import INK, QUIET

IMAGES = ROOT / "docs" / "images" / "how-it-works"
SCORES, LABEL, K, TAU = torch.tensor([2.0, 3.0, 1.0, 0.0, 2.5, -1.0]), 0, 2, 1.0
OWN, HEAD, TAIL, OVER = (
    COLOURS[name][0] for name in ("topk-cross-entropy", "noised", "smooth", "ldam")
)
"""Colours of the label, of heads, of the tail, and of what overflows."""


def main() -> None:
    for name, draw, alt in (
        ("split", split, "Six scores: the label, two heads with the threshold, three of the tail"),
        ("scaled", scaled, "Exponentials of scores, and the same relative to the threshold"),
        ("range", ranges, "Largest number in the computation by temperature"),
    ):
        with matplotlib.rc_context(LOOK):
            figure = draw()
        print(f"drew {save(figure, IMAGES, name, alt).relative_to(ROOT)}")


def example() -> power_sums.Split:
    """Heads and tail of the rivals."""
    rivals = SCORES.clone()
    rivals[LABEL] = -inf
    return power_sums.split(rivals, K, K * TAU)


def colours() -> list[str]:
    """Of each class."""
    heads = example().places.tolist()
    return [OWN if c == LABEL else HEAD if c in heads else TAIL for c in range(len(SCORES))]


def bars(axes: Axes, values: list[float], shown: list[str]) -> None:
    """A bar for each class, with its value."""
    drawn = axes.bar(range(len(values)), values, color=colours(), width=0.7)
    axes.bar_label(drawn, shown, fontsize=SMALL, padding=2)
    axes.set_xticks(range(len(values)), [f"class {c}" if c == 0 else str(c) for c in range(6)])
    axes.grid(axis="x", visible=False)
    axes.set_axisbelow(True)
    axes.margins(y=0.18)


def split() -> Figure:
    """Step 1."""
    figure = Figure(figsize=(WIDTH, 2.7), layout="constrained")
    axes = figure.subplots()
    bars(axes, SCORES.tolist(), [f"{s:g}" for s in SCORES.tolist()])
    axes.axhline(0, color=INK, linewidth=0.8)
    threshold = float(example().threshold)
    axes.axhline(threshold, color=HEAD, linewidth=1.2, linestyle=(0, (4, 2)))
    axes.text(5.45, threshold + 0.08, "threshold t", color=HEAD, fontsize=SMALL, ha="right")
    for place, word in enumerate(("label", "heads", "tail")):
        axes.text(place, 0.12, word, color="#ffffff", fontsize=SMALL, ha="center")
    axes.set(ylabel="score")
    return figure


def scaled() -> Figure:
    """Step 2."""
    row, parts = example(), {}
    for place, v in zip(row.places.tolist(), row.inverted.tolist(), strict=True):
        parts[place] = v
    values = [0.0 if c == LABEL else parts.get(c, float(row.tail[c])) for c in range(len(SCORES))]
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    above, below = figure.subplots(2)
    plain = (SCORES / (K * TAU)).exp().tolist()
    bars(above, plain, [f"{e:.2f}" for e in plain])
    above.set(ylabel="exp(s / kτ)")
    shown = ["" if c == LABEL else f"{value:.3f}" for c, value in enumerate(values)]
    bars(below, values, shown)
    below.axhline(1, color=QUIET, linewidth=1.2, linestyle=(0, (4, 2)))
    below.set(ylabel="v (heads), u (tail)")
    return figure


def ranges() -> Figure:
    """Why nothing overflows: 1,000 scores of standard deviation 3, k = 5."""
    torch.manual_seed(0)
    scores, k = 3 * torch.randn(1000, dtype=torch.float64), 5
    taus = torch.logspace(-3, 1, 81, dtype=torch.float64).tolist()
    plain = [float(topklass.log_esp(scores / (k * tau), k)[k]) / 2.302585 for tau in taus]
    ours = []
    for tau in taus:
        row = power_sums.split(scores, k, k * tau)
        q = power_sums.newton(power_sums.power_sums(row.tail, k))
        s = power_sums.with_heads(q, row.inverted)
        ours.append(log10(max(float(q.max()), float(s.max()))))
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(taus, plain, color=OVER, linestyle="--", label="σ of exp(s / kτ)")
    axes.plot(taus, ours, color=TAIL, linewidth=2.4, label="topklass")
    for bits, most in (("float32", 38.5), ("float64", 308.3)):
        axes.axhline(most, color=QUIET, linewidth=1, linestyle=(0, (2, 2)))
        axes.text(10, most * 1.12, f"largest {bits}", color=QUIET, fontsize=SMALL, ha="right")
    axes.set(
        xscale="log", yscale="symlog", xlabel="temperature τ", ylabel="digits before the point"
    )
    axes.set_ylim(0, 3e4)
    for axis in (axes.xaxis, axes.yaxis):
        powers(axis)
    axes.legend(loc="upper right")
    return figure
