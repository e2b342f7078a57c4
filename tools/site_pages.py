"""Hooks of mkdocs: formulas as MathML, links into the repository, the options of the command.

The pages are Markdown as GitHub shows it. What it shows and a site does not have is added here, and
a page that would load anything from another host is an error.
"""

import re
import subprocess
import sys
from html import unescape
from pathlib import PurePosixPath
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

REPOSITORY = "https://github.com/topklass/topklass/blob/main"
COMMAND_HELP = "<!-- topklass --help -->"
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', flags=re.DOTALL)
SCRIPT = re.compile(r"<script\b.*?</script>", flags=re.DOTALL)
LINK = re.compile(r"\]\(((?:\.\./)+[^)\s]+)\)")
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc=["']?(?:https?:)?//[^"'\s>]*"""
    r"""|<link\b(?![^>]*rel=["']?canonical)[^>]*\bhref=["']?(?:https?:)?//[^"'\s>]*"""
)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Complete the Markdown of a page."""
    if COMMAND_HELP in markdown:
        markdown = markdown.replace(COMMAND_HELP, command_help())
    return with_repository_links(markdown, page.file.src_uri)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Typeset the formulas of a page. Notebooks come with scripts, which would load others."""
    if page.file.src_uri.endswith(".ipynb"):
        html = with_site_links(SCRIPT.sub("", html))
    return with_formulas(html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Stop if a page would load something from another host."""
    if found := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads from another host: {found[0]}")
    return output


def with_repository_links(markdown: str, page: str) -> str:
    """Let links that leave ``docs/`` lead to the repository.

    Example:
        >>> with_repository_links("[test](../tests/test_x.py), [page](b.md)", "a.md")
        '[test](https://github.com/topklass/topklass/blob/main/tests/test_x.py), [page](b.md)'
        >>> with_repository_links("[page](../b.md)", "losses/a.md")
        '[page](../b.md)'
    """
    depth = len(PurePosixPath(page).parts)

    def link(match: re.Match[str]) -> str:
        steps = match[1].count("../")
        return match[0] if steps < depth else f"]({REPOSITORY}/{match[1][3 * steps :]})"

    return LINK.sub(link, markdown)


def with_site_links(html: str) -> str:
    """Let links of a notebook to pages in the repository lead to those of the site.

    Example:
        >>> with_site_links(f'<a href="{REPOSITORY}/docs/scale.md#prediction">')
        '<a href="../../scale/#prediction">'
    """
    return re.sub(rf'href="{REPOSITORY}/docs/([\w-]+)\.md', r'href="../../\1/', html)


def with_formulas(html: str) -> str:
    r"""Convert LaTeX to MathML, which browsers typeset by themselves.

    Example:
        >>> with_formulas(r'<span class="arithmatex">\(k \lt n\)</span>')
        '<math ... display="inline"><mrow><mi>k</mi><mo>&#x0003C;</mo><mi>n</mi></mrow></math>'
    """

    def mathml(match: re.Match[str]) -> str:
        display = "block" if match[1] == "div" else "inline"
        formula = convert(unescape(match[2]).strip(), display=display)
        if "\\" in formula:
            raise PluginError(f"cannot typeset {match[2]}")
        return formula.replace("&#x029F5;", "∖")  # \setminus by a character that fonts have

    return FORMULA.sub(mathml, html)


def command_help() -> str:
    """All options of the command ``topklass``, as Markdown."""
    typer = [sys.executable, "-m", "typer", "topklass.cli", "utils", "docs", "--name", "topklass"]
    text = subprocess.run(typer, check=True, capture_output=True, encoding="utf-8").stdout
    return re.sub(r"^# .*\n", "", text)
