"""From a figure of matplotlib to SVG in the colours and fonts of a page, light or dark."""

from __future__ import annotations

import re
from html import escape
from io import StringIO
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure

from topklass.report.colours import PAIRS, THEME, variable, variables

INK, QUIET, RULE, PAGE = (THEME[name][0] for name in ("ink", "quiet", "rule", "page"))
"""Of text, of what matters less, of thin lines and of the background, on a light page."""
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
PIXELS = 1.5
"""Of a point, where there is room: text of 10 points is as large as that of a page."""


def inline(figure: Figure, name: str, alt: str = "") -> Markup:
    """SVG for a page that defines the colours.

    Args:
        figure: with the colours of ``SETTINGS`` and ``COLOURS``.
        name: unlike that of other figures of the page, for ids that do not clash.
        alt: what it shows, for those who do not see it; nothing if it is an ornament.
    """
    _, _, box, body = _drawn(figure, name)
    role = f'role="img" aria-label="{escape(alt)}"' if alt else 'aria-hidden="true"'
    return Markup(f"<svg {box} {role}>{body}</svg>")


def standalone(figure: Figure, name: str, alt: str) -> str:
    """An SVG file that is legible on light and on dark pages.

    Args:
        figure: with the colours of ``SETTINGS`` and ``PAIRS``, those for light pages.
        name: of the file; the same figure with the same name makes the same file.
        alt: what it shows, its title.
    """
    width, height, box, body = _drawn(figure, name)
    used = [each for each in PAIRS if variable(each) in body]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{PIXELS * float(width):.0f}" '
        f'height="{PIXELS * float(height):.0f}" {box} role="img">\n<title>{escape(alt)}</title>\n'
        "<style>* { stroke-linejoin: round; stroke-linecap: butt } "
        f"svg {{ {variables(used, dark=False)} }} "
        f"@media (prefers-color-scheme: dark) {{ svg {{ {variables(used, dark=True)} }} }}</style>"
        f"\n{body.strip()}\n</svg>\n"
    )


def _drawn(figure: Figure, name: str) -> tuple[str, str, str, str]:
    """Width and height in points, the box and what is in it."""
    text = StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": name}):
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    found = re.search(
        r'<svg[^>]* width="(.*?)pt" height="(.*?)pt" (viewBox="[^"]*")[^>]*>(.*)</svg>',
        text.getvalue(),
        re.S,
    )
    assert found is not None
    width, height, box, body = found.groups()
    body = re.sub(r"<style.*?</style>", "", body, flags=re.S)  # would hold for the whole page
    body = re.sub(r'<g id="[^"]*">', "<g>", body)
    body = re.sub(r"<!--.*?-->", "", body, flags=re.S)
    body = re.sub(r'font-family: [^;"]*', "font-family: system-ui, sans-serif", body)
    body = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), body)
    body = re.sub(r"\s*\n\s*", " ", body).replace("xlink:href", "href")
    for each, (light, _) in PAIRS.items():
        body = body.replace(light, variable(each))
    return width, height, box, body
