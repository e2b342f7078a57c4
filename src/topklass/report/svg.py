"""From a figure of matplotlib to a picture inside a page, in the page's colours and fonts."""

from __future__ import annotations

import re
from html import escape
from io import StringIO
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure

from topklass.report.colours import COLOURS, variable

INK, RULE = "#010101", "#020202"
"""Stand for the colours of text and of thin lines."""
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.6,
    "lines.markersize": 3.5,
}
IN_PAGE = {
    INK: "currentColor",
    RULE: "var(--rule)",
    **{pair[0]: f"var({variable(loss)})" for loss, pair in COLOURS.items()},
}


def inline(figure: Figure, name: str, alt: str = "") -> Markup:
    """SVG for a page.

    Args:
        figure: with the colours of ``SETTINGS`` and ``COLOURS``.
        name: unlike that of other figures of the page, for ids that do not clash.
        alt: what it shows, for those who do not see it; nothing if it is an ornament.
    """
    text = StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": name}):
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    box, body = re.findall(r'<svg[^>]*(viewBox="[^"]*")[^>]*>(.*)</svg>', text.getvalue(), re.S)[0]
    body = re.sub(r"<style.*?</style>", "", body, flags=re.S)  # would hold for the whole page
    body = re.sub(r'<g id="[^"]*">', "<g>", body)
    body = re.sub(r'font-family: [^;"]*', "font-family: system-ui, sans-serif", body)
    body = re.sub(r"\s*\n\s*", " ", body).replace("xlink:href", "href")
    for colour, variable_name in IN_PAGE.items():
        body = body.replace(colour, variable_name)
    role = f'role="img" aria-label="{escape(alt)}"' if alt else 'aria-hidden="true"'
    return Markup(f"<svg {box} {role}>{body}</svg>")
