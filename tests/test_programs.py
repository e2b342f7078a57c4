"""The programs of ``examples/programs`` learn, and pages show the lines that concern us."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAMS = {
    "plain_pytorch": "torch",
    "lightning_module": "lightning",
    "hf_sequence_classification": "transformers",
    "hf_causal_lm": "transformers",
    "timm_mixup": "timm",
    "accelerate_loop": "accelerate",
}
SECTION = re.compile(r"^ *# --8<-- \[start:(\w+)\]\n(.*?)^ *# --8<-- \[end:\1\]$", re.M | re.S)


def sections(program: Path) -> dict[str, str]:
    return dict(SECTION.findall(program.read_text(encoding="utf-8")))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_learns(name, tmp_path):
    """Three classes of each group look alike: 0.25 for guesses, 1 for lists of the right group."""
    pytest.importorskip(PROGRAMS[name])
    program = ROOT / "examples" / "programs" / f"{name}.py"
    ended = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"},
    )
    assert ended.returncode == 0, ended.stderr
    last = ended.stdout.splitlines()[-1]
    first, list_of_three = map(float, re.findall(r"accuracy (\d\.\d+)", last))
    assert list_of_three > 0.95
    assert 0.2 < first < 0.5  # a third at best
    assert not list(tmp_path.iterdir()), "it leaves files behind"


@pytest.mark.parametrize("name", PROGRAMS)
def test_ten_lines_concern_us(name):
    shown = sections(ROOT / "examples" / "programs" / f"{name}.py")["loss"]
    assert "topklass." in shown
    assert len([line for line in shown.splitlines() if line.strip()]) <= 10


def test_pages_show_sections_that_exist():
    for page in (ROOT / "docs").rglob("*.md"):
        for file, name in re.findall(r'--8<-- "([^":]+):(\w+)"', page.read_text(encoding="utf-8")):
            assert sections(ROOT / file)[name].strip(), f"{page}: {file}:{name}"


def test_every_program_is_on_the_page():
    page = (ROOT / "docs" / "programs.md").read_text(encoding="utf-8")
    for name in PROGRAMS:
        assert f'--8<-- "examples/programs/{name}.py:loss"' in page
        assert f"python examples/programs/{name}.py" in page
