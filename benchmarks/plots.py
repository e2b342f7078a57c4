"""Plots of the recorded results, to docs/images."""

from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.candidates import BASE, OURS
from benchmarks.environment import ROOT, read
from benchmarks.markdown import shape

IMAGES = ROOT / "docs" / "images"
BLACK, ORANGE, SKY, GREEN, BLUE, RED, PINK = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
"""Colours that the colour-blind can tell apart (Okabe and Ito)."""

METHODS = {
    "summation": (ORANGE, "s"),
    "divide and conquer, autograd": (GREEN, "D"),
    "divide and conquer, bare recursion": (PINK, "v"),
    "divide and conquer, recursion and eq. 60": (SKY, "P"),
    "published code": (RED, "^"),
    "topklass": (BLUE, "o"),
    BASE: (BLACK, "x"),
}
LOSSES = {
    "published smooth loss": (RED, "^"),
    "published noised loss": (ORANGE, "v"),
    "topklass, noised": (SKY, "P"),
    "topklass, k = 20": (PINK, "D"),
    "topklass, k = 10": (GREEN, "s"),
    OURS: (BLUE, "o"),
    f"{BASE}, compiled": (BLACK, "x"),
}

Record = dict[str, Any]


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    for place in ("cpu", "gpu"):
        if record := read(f"study-{place}"):
            save(stability(record), f"stability-{place}")
            if record["time"]:
                save(times(record), f"time-{place}")
    if record := read("speed-gpu"):
        save(ratios(record), "ratios-gpu")


def save(figure: Figure, name: str) -> None:
    figure.savefig(
        IMAGES / f"{name}.png", dpi=150, bbox_inches="tight", metadata={"Software": None}
    )
    plt.close(figure)
    print(f"drew docs/images/{name}.png")


def times(record: Record) -> Figure:
    """Forward + backward time by the number of classes."""
    figure, axes = plt.subplots(figsize=(6.4, 4))
    for method, (colour, marker) in METHODS.items():
        rows = [row for row in record["time"] if row["method"] == method]
        axes.plot(
            [row["classes"] for row in rows],
            [row["forward_ms"] + row["backward_ms"] for row in rows],
            color=colour,
            marker=marker,
            label=method,
        )
    axes.set(xscale="log", yscale="log", xlabel="classes", ylabel="forward + backward, ms")
    axes.set_title(f"256 rows, k = 5, float32, {where(record)}", fontsize=10)
    axes.grid(alpha=0.3)
    legend_beside(axes)
    return figure


def ratios(record: Record) -> Figure:
    """Ratios to cross-entropy, a line a shape."""
    rows = [row for row in record["rows"] if row["logits"] == "3·randn"]
    shapes = list(dict.fromkeys(shape(row) for row in rows))
    figure, axes = plt.subplots(figsize=(6.4, 0.5 * len(shapes) + 1.2))
    for place, (loss, (colour, marker)) in enumerate(LOSSES.items()):
        found = [row for row in rows if row["loss"] == loss]
        axes.plot(
            [row["ratio"] for row in found],
            [shapes.index(shape(row)) + 0.08 * (place - 3) for row in found],
            color=colour,
            marker=marker,
            linestyle="none",
            label=loss,
        )
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_yticks(range(len(shapes)), shapes)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel=f"time over {BASE}, forward + backward", ylabel="N × C")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title(f"3·randn logits, float32, {where(record)}", fontsize=10)
    axes.grid(alpha=0.3)
    legend_beside(axes)
    return figure


def stability(record: Record) -> Figure:
    """Error of the gradient by temperature; a cross at the top where rows are not finite."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 4), sharey=True, gridspec_kw={"wspace": 0.08})
    methods = {name: style for name, style in METHODS.items() if name != BASE}
    top = 1e2
    for axes, precision in zip(panels, ("single", "double"), strict=True):
        for place, (method, (colour, marker)) in enumerate(methods.items()):
            rows = [
                row
                for row in record["stability"]
                if (row["method"], row["precision"]) == (method, precision)
            ]
            fine = [row for row in rows if row["finite_gradients"] == 1]
            errors = [min(row["gradient_error"], 1.0) for row in fine]
            taus = [row["tau"] for row in fine]
            axes.plot(taus, errors, color=colour, marker=marker, label=method)
            lost = [row["tau"] for row in rows if row["finite_gradients"] < 1]
            dodged = [tau * 1.6 ** (place - 0.5) for tau in lost]
            axes.plot(dodged, [top] * len(lost), color=colour, marker="x", linestyle="none")
        axes.axhline(8, color="grey", linewidth=0.5)
        axes.set(xscale="log", yscale="log", xlabel="temperature τ", ylim=(1e-17, 1e3))
        axes.set_title(f"{precision} precision", fontsize=10)
        axes.invert_xaxis()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("largest relative error of a row's gradient")
    panels[0].set_yticks([1e-16, 1e-12, 1e-8, 1e-4, 1, top])
    panels[0].set_yticklabels(
        ["$10^{-16}$", "$10^{-12}$", "$10^{-8}$", "$10^{-4}$", "≥ 1", "overflow"]
    )
    legend_beside(panels[1])
    return figure


def legend_beside(axes: Axes) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)


def where(record: Record) -> str:
    return str(record.get("gpu") or record["processor"].split(",")[0])
