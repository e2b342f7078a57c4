"""A colour for each loss, the same in all reports, on light and on dark pages."""

from __future__ import annotations

from typing import NamedTuple

from topklass.train.comparison import Comparison

LIGHT_PAGE, DARK_PAGE = "#ffffff", "#16181d"
COLOURS = {
    "short-list": ("#b8005c", "#ff7ab8"),
    "cross-entropy": ("#33373d", "#d7dbe2"),
    "smooth": ("#0067a3", "#58b4f0"),
    "topk-cross-entropy": ("#007a5a", "#2fc79a"),
    "noised": ("#c04a00", "#ff9a57"),
    "noised-imbalanced": ("#a63d7d", "#ea93c6"),
    "calibrated-hinge": ("#7d5f00", "#d9b84a"),
    "hinge": ("#5c40b8", "#ab97ff"),
    "convex-hinge": ("#0d7885", "#4cd0e0"),
    "ldam": ("#9c1f24", "#ff8080"),
    "focal": ("#526b08", "#a9cc4a"),
}
"""By loss: on a light page, and on a dark one."""
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
MARKERS = ("o", "s", "^", "D", "v")
"""They tell groups of the same loss apart."""


class Style(NamedTuple):
    """How the lines of a group look."""

    colour: str
    dash: object
    marker: str


def styles(comparison: Comparison) -> list[Style]:
    """A style for each group."""
    seen: dict[str, int] = {}
    chosen = []
    for group in comparison.groups:
        loss = group.settings["loss"]
        loss = loss if loss in COLOURS else "smooth"  # other ways to evaluate it
        number = seen[loss] = seen.get(loss, -1) + 1
        marker = MARKERS[(list(COLOURS).index(loss) + number) % len(MARKERS)]
        chosen.append(Style(COLOURS[loss][0], DASHES[number % len(DASHES)], marker))
    return chosen


def variable(loss: str) -> str:
    """Name of the loss's colour in CSS."""
    return f"--{loss}"


def variables(dark: bool) -> str:
    """Definitions of all colours in CSS."""
    return " ".join(f"{variable(loss)}: {pair[dark]};" for loss, pair in COLOURS.items())
