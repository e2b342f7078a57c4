"""Run the core of an installed wheel where PyTorch is all that is installed beside it.

``python -I tools/wheel_smoke_test.py README.md VERSION`` runs the README's examples and the
doctests of the core, and checks what an import says when an extra is missing.
"""

import doctest
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import topklass  # noqa: E402

# Which modules need which extra; everything else is the core.
EXTRAS = {
    "cli": "train",
    "data": "train",
    "metrics": "metrics",
    "models": "train",
    "report": "train",
    "train": "train",
}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def main(readme: Path, version: str) -> None:
    """Check where the package is, its version, its examples and its import errors."""
    assert Path(sys.prefix) in Path(topklass.__file__).parents, topklass.__file__
    assert topklass.__version__ == version, (topklass.__version__, version)
    examples, lines = run_examples(readme.read_text(encoding="utf-8")), run_doctests()
    assert examples > 1, f"only {examples} examples in {readme}"
    assert lines > 50, f"only {lines} lines of doctests"
    check_import_errors()
    print(f"{examples} examples of the README and {lines} lines of doctests run on PyTorch alone")


def run_examples(text: str) -> int:
    """Run each Python block that needs no extra; their number."""
    extras = re.compile(rf"topklass\.({'|'.join(EXTRAS)})\b")
    blocks = [
        x for x in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if not extras.search(x)
    ]
    for block in blocks:
        exec(block, {"__name__": "example"})
    return len(blocks)


def run_doctests() -> int:
    """Import every module of the core and run its doctests; the number of their lines."""
    names = ["topklass"]
    has_triton = importlib.util.find_spec("triton") is not None
    for each in pkgutil.walk_packages(topklass.__path__, "topklass."):
        layer = each.name.split(".")[1]
        if layer not in EXTRAS and (has_triton or layer != "kernels"):
            names.append(each.name)
    results = [doctest.testmod(importlib.import_module(x), optionflags=FLAGS) for x in names]
    assert not any(x.failed for x in results), "doctests failed"
    return sum(x.attempted for x in results)


def check_import_errors() -> None:
    """A module without its extra names the extra, and so does the command."""
    for module in ("cli", "metrics", "models"):
        message = "no error"
        try:
            importlib.import_module(f"topklass.{module}")
        except ImportError as error:
            message = str(error)
        expected = f"topklass[{EXTRAS[module]}]"
        assert expected in message, f"topklass.{module}: expected {expected}, got {message}"
    command = [Path(sys.executable).with_name("topklass"), "losses"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1, f"the command topklass: exit status {ended.returncode}"
    assert "Error: the command topklass needs" in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
