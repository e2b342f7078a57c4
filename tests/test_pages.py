"""README and documents: links lead somewhere, examples run."""

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
PAGES += sorted(str(x.relative_to(ROOT)) for x in (ROOT / "docs").rglob("*.md"))


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ +(.*?) *$", read(page), re.MULTILINE)
    names = re.findall(r"^::: (\S+)$", read(page), re.MULTILINE)  # of the reference
    return {re.sub(r"[^\w\- ]", "", x).lower().replace(" ", "-") for x in headings} | {*names}


@pytest.mark.parametrize("page", PAGES)
def test_links_within_the_repository_lead_somewhere(page):
    path = ROOT / page
    text = re.sub(r"```.*?```", "", read(path), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file) if file else path
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target), f"{page}: {link}"


@pytest.mark.parametrize("page", [x for x in PAGES if "```python" in read(ROOT / x)])
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```python\n(.*?)```", read(ROOT / page), re.DOTALL):
        exec(block, {"__name__": "example"})


@pytest.mark.parametrize("page", [x for x in PAGES if "```pycon" in read(ROOT / x)])
def test_numbers_are_those_of_the_library(page):
    """All ``>>>`` of a page, as one session."""
    blocks = "\n".join(re.findall(r"```pycon\n(.*?)```", read(ROOT / page), re.DOTALL))
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(doctest.DocTestParser().get_doctest(blocks, {}, page, None, None))
    assert runner.summarize() == (0, blocks.count(">>> "))
