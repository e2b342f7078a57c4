"""A colour for each loss, the same in all reports, on light and on dark pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from topklass.train.comparison import Comparison

THEME = {
    "page": ("#ffffff", "#16181d"),
    "ink": ("#1c1f24", "#e6e8ec"),
    "quiet": ("#565d68", "#a4abb6"),
    "rule": ("#d5d9df", "#3a3f48"),
    "soft": ("#f3f5f8", "#20242b"),
    "right": ("#0b6b3a", "#5fd394"),
}
"""Of pages: on a light one, and on a dark one."""
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
SHADES = {
    "shade-0": ("#0d0887", "#bf3984"),
    "shade-1": ("#43039e", "#d45270"),
    "shade-2": ("#6e00a8", "#e56b5d"),
    "shade-3": ("#9511a1", "#f3874a"),
    "shade-4": ("#b6308b", "#fca537"),
    "shade-5": ("#d14e72", "#fdc827"),
    "shade-6": ("#e76e5b", "#f4ed27"),
}
"""For values of one setting, from low to high (the colour map plasma)."""
PAIRS = {**THEME, **COLOURS, **SHADES}
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


def variable(name: str) -> str:
    """The colour of a loss, or of a part of a page, in CSS."""
    return f"var(--{name})"


def variables(names: Iterable[str], dark: bool) -> str:
    """Definitions of these colours in CSS."""
    return " ".join(f"--{name}: {PAIRS[name][dark]};" for name in names)
