"""Execute the notebooks of the documents and keep their outputs.

    python tools/notebooks.py                              # all of docs/notebooks
    python tools/notebooks.py docs/notebooks/long_tail.ipynb

A notebook is executed in an empty folder. What depends on the day or on the machine is left out of
what is saved.
"""

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "docs" / "notebooks"
SETTINGS = "settings"
"""Tag of the cell with settings."""
ENVIRONMENT = {
    "KINETO_LOG_LEVEL": "99",  # no messages of the profiler
    "PYTHONWARNINGS": "ignore:IProgress not found",  # of tqdm, without ipywidgets
    "MATPLOTLIBRC": str(FOLDER / "matplotlibrc"),  # colours for light and dark pages
}
TIMEOUT = 1200
"""Seconds of a cell."""


def execute(path: Path, settings: Mapping[str, Any] | None = None, check: str = "") -> Any:
    """Execute a notebook from its beginning.

    Args:
        path: its file, which is left as it is.
        settings: values that replace those of the cell with settings.
        check: code to execute after the last cell.

    Returns:
        The notebook with the new outputs; an error in a cell is raised.
    """
    notebook = nbformat.read(path, as_version=4)
    for number, cell in enumerate(notebook.cells):
        if settings and SETTINGS in cell.metadata.get("tags", ()):
            lines = "\n".join(f"{name} = {value!r}" for name, value in settings.items())
            notebook.cells.insert(number + 1, nbformat.v4.new_code_cell(lines))
            break
    if check:
        notebook.cells.append(nbformat.v4.new_code_cell(check))
    with tempfile.TemporaryDirectory() as folder, environment(ENVIRONMENT):
        resources = {"metadata": {"path": folder}}
        NotebookClient(
            notebook, timeout=TIMEOUT, resources=resources, record_timing=False
        ).execute()
    return notebook


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def clean(notebook: Any) -> None:
    """Remove versions, dates and the name of the user."""
    notebook.metadata.pop("language_info", None)
    for output in (output for cell in notebook.cells for output in cell.get("outputs", ())):
        if drawing := output.get("data", {}).get("image/svg+xml"):
            without = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)
            output.data["image/svg+xml"] = without
        elif "text" in output:
            output.text = output.text.replace(str(Path.home()), "~")


def main(paths: list[Path]) -> None:
    """Execute notebooks and write them with their outputs."""
    for path in paths:
        notebook = execute(path)
        clean(notebook)
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")))
