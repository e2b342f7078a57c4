"""A missing package is named, with what installs it; other errors are left as they are."""

import subprocess
import sys

import pytest

from topklass._extras import MissingPackageError, extra, requires

WITHOUT = """
import sys

class Finder:
    def find_spec(name, path=None, target=None):
        if name == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Finder)
{code}
"""


def run_without(package: str, code: str) -> subprocess.CompletedProcess:
    """Run code in a process in which a package cannot be found."""
    script = WITHOUT.format(package=package, code=code)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


def test_missing_package():
    ended = run_without("torchvision", "import topklass.models")
    last = ended.stderr.splitlines()[-1]
    assert last.endswith("needs torchvision: pip install 'topklass[train]'")


def test_the_command_without_its_extra():
    """One sentence instead of a traceback."""
    ended = run_without("typer", "from topklass.__main__ import main; main()")
    assert ended.returncode == 1
    assert ended.stderr == (
        "Error: the command topklass needs typer: pip install 'topklass[train]'\n"
    )


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
        ("from topklass import nothing", "ImportError: cannot import name 'nothing'"),
        ("", "ModuleNotFoundError: No module named 'installed.part'"),
        ("raise OSError('libx.so')", "OSError: libx.so"),
    ],
)
def test_errors_inside_a_package_are_passed_on(code, error, tmp_path, monkeypatch):
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "installed", raising=False)
    with pytest.raises((ImportError, OSError)) as raised:
        extra("installed.part")
    assert f"{type(raised.value).__name__}: {raised.value}".startswith(error)
    assert type(raised.value) is not MissingPackageError


def test_the_error():
    """It is what a failed import raises, with the same name."""
    with (
        pytest.raises(MissingPackageError, match=r"^x needs nowhere: pip install 'y'$") as raised,
        requires("x", "other", "nowhere", install="y"),
    ):
        import nowhere.at_all  # noqa: F401
    assert isinstance(raised.value, ModuleNotFoundError)
    assert raised.value.name == "nowhere"


def test_python_m():
    """``python -m topklass`` is the command."""
    command = [sys.executable, "-m", "topklass", "losses"]
    assert "smooth" in subprocess.run(command, capture_output=True, text=True).stdout
