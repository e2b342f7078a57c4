"""Notebooks of the documents: executed in small, and what is committed of them."""

import re
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "docs" / "notebooks").glob("*.ipynb"))
LARGEST = 350_000
"""Bytes of a file."""
PATHS = re.compile(r"/(home|root|tmp|Users|work|usr)/|[A-Z]:\\\\Users")
SMALL = {
    "confused_labels": {"classes": 100, "epochs": 6},
    "fine_tuning": {"weights": None, "epochs": 5, "classes": 6, "images_per_class": 16},
    "long_tail": {"epochs": 4, "largest": 50, "imbalance": 50},
    "million_classes": {"classes": 100_000, "chunk_bytes": 2**22},
}
"""Settings with which a notebook takes seconds."""
CHECKS = {
    "confused_labels": "assert min(scores.values()) > 2 * k / classes, scores  # twice chance",
    "fine_tuning": """
(best,) = compare([chosen["short-list"]]).runs
assert best.accuracy(1, "micro") > 1.5 / classes, best.accuracy(1, "micro")
assert len(set(chosen.values())) == 2, chosen
assert record["sets"][1]["coverage"]["micro"] > 0.75, record["sets"][1]
""",
    "long_tail": """
assert all(row[1] > 2 * 100 * k / classes for row in accuracy.values()), accuracy
assert accuracy["logit adjustment"][1] > accuracy["cross-entropy"][1], accuracy
assert coverage["PAS"] > coverage["LAC"], coverage
""",
    "million_classes": """
assert in_one[-1] < plain[-1] / 2, (plain, in_one)
assert chunked < usual / 2, (usual, chunked)
assert top5 > 0.5, top5
""",
}
"""What has to come out of it: names of the notebook, after its last cell."""


def read(path: Path):
    return nbformat.read(path, as_version=4)


def outputs(notebook) -> list:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def complaints(notebook) -> list[str]:
    """Errors, warnings and all else that was written to stderr."""
    found = [x for x in outputs(notebook) if x.output_type == "error" or x.get("name") == "stderr"]
    return [str(x.get("text") or x.get("evalue")) for x in found]


every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_settings_and_checks_for_all():
    assert len(NOTEBOOKS) == 4
    assert {path.stem for path in NOTEBOOKS} == SMALL.keys() == CHECKS.keys()


@every_notebook
def test_committed(path):
    """With the outputs of a run from the first cell to the last, and none of the machine."""
    notebook = read(path)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert complaints(notebook) == []
    assert any("image/svg+xml" in output.get("data", ()) for output in outputs(notebook))
    text = path.read_text(encoding="utf-8")
    assert not PATHS.search(text)
    assert "<dc:date>" not in text
    assert path.stat().st_size < LARGEST


@every_notebook
def test_names_of_settings(path):
    """The test replaces what the cell with settings sets."""
    (cell,) = [x for x in read(path).cells if "settings" in x.metadata.get("tags", ())]
    names = {}
    exec(cell.source, names)
    assert SMALL[path.stem].keys() <= names.keys()


@pytest.mark.slow
@every_notebook
def test_executes(path):
    from tools.notebooks import execute

    assert complaints(execute(path, SMALL[path.stem], CHECKS[path.stem])) == []
