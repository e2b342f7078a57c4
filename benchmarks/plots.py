"""Plots of the recorded results, to docs/images."""

from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.candidates import BASE, OURS
from benchmarks.environment import ROOT, read
from benchmarks.gains_plot import gains
from benchmarks.markdown import shape
from experiments.style import LOOK, WIDTH, headed, label_ends, legend_below, powers, save
from topklass.report.colours import COLOURS
from topklass.report.svg import QUIET

IMAGES = ROOT / "docs" / "images"
LIKE = {name: light for name, (light, _) in COLOURS.items()}
METHODS = {
    "summation": (LIKE["calibrated-hinge"], "s"),
    "divide and conquer, autograd": (LIKE["topk-cross-entropy"], "D"),
    "divide and conquer, bare recursion": (LIKE["short-list"], "v"),
    "divide and conquer, recursion and eq. 60": (LIKE["hinge"], "P"),
    "published code": (LIKE["noised"], "^"),
    "topklass": (LIKE["smooth"], "o"),
    BASE: (LIKE["cross-entropy"], "x"),
}
SHORT = {
    "divide and conquer, autograd": "d. & c., autograd",
    "divide and conquer, bare recursion": "d. & c., recursion",
    "divide and conquer, recursion and eq. 60": "d. & c., eq. 60",
}
"""Of divide and conquer, beside lines."""
LOSSES = {
    "published smooth loss": (LIKE["noised"], "^"),
    "published noised loss": (LIKE["calibrated-hinge"], "v"),
    "topklass, noised": (LIKE["hinge"], "P"),
    "topklass, k = 20": (LIKE["short-list"], "D"),
    "topklass, k = 10": (LIKE["topk-cross-entropy"], "s"),
    OURS: (LIKE["smooth"], "o"),
    f"{BASE}, compiled": (LIKE["cross-entropy"], "x"),
}

Record = dict[str, Any]


def main() -> None:
    with matplotlib.rc_context(LOOK):
        for place in ("cpu", "gpu"):
            if record := read(f"study-{place}"):
                draw(times(record), f"time-{place}")
        if record := read("study-cpu"):  # errors on a GPU are about the same
            draw(stability(record), "stability-cpu")
        if record := read("speed-gpu"):
            draw(ratios(record), "ratios-gpu")
        if record := read("reproduce/cifar100-noise-fast"):
            draw(gains(record), "gains")


def draw(figure: Figure, name: str) -> None:
    """Write a figure whose title says what it shows."""
    path = save(figure, IMAGES, name, figure.get_suptitle().replace("\n", ", "))
    print(f"drew {path.relative_to(ROOT)}")


def times(record: Record) -> Figure:
    """Forward + backward time by the number of classes."""
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    headed(
        figure,
        "Forward + backward, 256 rows, k = 5, float32",
        f"{where(record)}; d. & c.: divide and conquer",
    )
    axes = figure.subplots()
    lines = []
    for method, (colour, marker) in METHODS.items():
        rows = [row for row in record["time"] if row["method"] == method]
        x = [row["classes"] for row in rows]
        y = [row["forward_ms"] + row["backward_ms"] for row in rows]
        name = SHORT.get(method, method)
        lines += axes.plot(x, y, color=colour, marker=marker, label=name) if rows else []
    axes.set(xscale="log", yscale="log", xlabel="classes", ylabel="ms")
    powers(axes.xaxis)
    powers(axes.yaxis)
    label_ends(figure, axes, lines)
    return figure


def ratios(record: Record) -> Figure:
    """Ratios to cross-entropy, a line a shape."""
    rows = [row for row in record["rows"] if row["logits"] == "3·randn"]
    shapes = list(dict.fromkeys(shape(row) for row in rows))
    figure = Figure(figsize=(WIDTH, 0.5 * len(shapes) + 2), layout="constrained")
    headed(figure, f"Time over that of {BASE}, forward + backward", f"float32, {where(record)}")
    axes = figure.subplots()
    points = []
    for place, (loss, (colour, marker)) in enumerate(LOSSES.items()):
        found = [row for row in rows if row["loss"] == loss]
        x = [row["ratio"] for row in found]
        y = [shapes.index(shape(row)) + 0.08 * (place - 3) for row in found]
        points += axes.plot(x, y, marker, color=colour, label=loss)
    axes.axvline(1, color=QUIET, linewidth=1)
    axes.set_yticks(range(len(shapes)), shapes)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel=f"{BASE} = 1", ylabel="N × C")
    axes.xaxis.set_major_formatter("{x:g}")
    legend_below(figure, points)
    return figure


def stability(record: Record) -> Figure:
    """Error of the gradient by temperature; a cross at the top where rows are not finite."""
    figure = Figure(figsize=(WIDTH, 6.2), layout="constrained")
    headed(figure, "Largest relative error of a row's gradient", where(record))
    panels = figure.subplots(2, sharex=True)
    methods = {name: style for name, style in METHODS.items() if name != BASE}
    top = 1e2
    for axes, precision in zip(panels, ("single", "double"), strict=True):
        lines = []
        for place, (method, (colour, marker)) in enumerate(methods.items()):
            rows = [
                row
                for row in record["stability"]
                if (row["method"], row["precision"]) == (method, precision)
            ]
            fine = [row for row in rows if row["finite_gradients"] == 1]
            errors = [min(row["gradient_error"], 1.0) for row in fine]
            taus = [row["tau"] for row in fine]
            lines += axes.plot(taus, errors, color=colour, marker=marker, label=method)
            lost = [row["tau"] for row in rows if row["finite_gradients"] < 1]
            dodged = [tau * 1.6 ** (place - 0.5) for tau in lost]
            axes.plot(dodged, [top] * len(lost), color=colour, marker="x", linestyle="none")
        axes.axhline(8, color=QUIET, linewidth=0.5)
        axes.set(xscale="log", yscale="log", ylim=(1e-17, 1e3), title=f"{precision} precision")
        ticks = {1e-16: "10⁻¹⁶", 1e-12: "10⁻¹²", 1e-8: "10⁻⁸", 1e-4: "10⁻⁴", 1: "≥ 1"}
        axes.set_yticks([*ticks, top], [*ticks.values(), "overflow"])
        axes.minorticks_off()
        powers(axes.xaxis)
    panels[1].invert_xaxis()
    panels[1].set_xlabel("temperature τ")
    legend_below(figure, lines, columns=1)
    return figure


def where(record: Record) -> str:
    return str(record.get("gpu") or record["processor"].split(",")[0])
