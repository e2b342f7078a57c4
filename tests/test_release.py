"""Version and date are the same wherever a release states them."""

import re
from pathlib import Path

import topklass

ROOT = Path(__file__).parent.parent


def test_citation_has_the_version_and_date_of_the_changelog():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = re.search(r"^version: (.*)$", citation, re.MULTILINE)[1]
    date = re.search(r'^date-released: "(.*)"$', citation, re.MULTILINE)[1]
    released = re.search(r"^## \[(\d.*?)\] - (.*)$", changelog, re.MULTILINE)
    assert released is not None, "CHANGELOG.md has no section like ## [1.2.3] - 2026-01-31"
    assert (version, date) == released.groups()
    assert version == topklass.__version__
