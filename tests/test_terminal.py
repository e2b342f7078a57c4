"""Names of files and classes cannot control the terminal."""

import json
import sys
import threading
import warnings
from io import StringIO

import numpy as np
import pytest
from PIL import Image
from rich.progress import Progress, TextColumn
from rich.table import Table

from test_cli import run, settings, write_patterns
from topklass.cli import show_warning
from topklass.train.terminal import SafeConsole, hide_failed_writes, printable

EVIL = "\x1b]0;title\x9c\x1b[31mred\x9b2J\u202e\x7f"
SHOWN = "?]0;title??[31mred?2J??"


def assert_harmless(text: str) -> None:
    """See the name, but none of its control characters."""
    assert SHOWN in text
    assert not (set(EVIL) - set(SHOWN)) & set(text)


def test_printable():
    assert printable(EVIL) == SHOWN
    assert printable("caf\udce9\x07\r") == "caf???"
    kept = "Ж א 漢字\ta\nb é ± – 👍\xa0"
    assert printable(kept) == kept


def test_whatever_is_printed():
    """Text, tables, markup, progress."""
    console = SafeConsole(file=StringIO(), width=100)
    console.print(EVIL, markup=False)
    table = Table(EVIL)
    table.add_row(EVIL)
    console.print(table)
    console.print(f"[bold]{EVIL}[/bold]")
    with Progress(TextColumn("{task.description}"), console=console) as bar:
        bar.add_task(EVIL)
    shown = console.file.getvalue()
    assert_harmless(shown)
    assert shown.count(SHOWN[:15]) == 5


def test_styles_still_work():
    console = SafeConsole(file=StringIO(), force_terminal=True, color_system="standard")
    console.print("a", style="red")
    assert console.file.getvalue() == "\x1b[31ma\x1b[0m\n"


@pytest.mark.filterwarnings("ignore")  # of Lightning and TensorBoard
@pytest.mark.skipif(sys.platform == "win32", reason="such names are not allowed there")
def test_commands(monkeypatch, capsys, tmp_path):
    """Names of classes and files in tables, JSON and errors."""
    classes = np.array([f"{EVIL}{number}" for number in range(6)])
    data = write_patterns(tmp_path / "toy.npz", noise=40, classes=classes)
    folder = tmp_path / "run"
    short = [*settings(data), "--epochs", "1", "--folder", str(folder)]
    assert run(monkeypatch, "train", *short) == 0
    monkeypatch.chdir(tmp_path)
    image = f"{EVIL}.png"
    Image.new("L", (8, 8)).save(image)
    capsys.readouterr()
    arguments = ("predict", "run", image, "--k", "5")
    assert run(monkeypatch, *arguments) == 0
    shown = capsys.readouterr().out
    assert_harmless(shown)
    assert shown.count(SHOWN) == 6  # the file and five classes
    assert run(monkeypatch, *arguments, "--json") == 0
    shown = capsys.readouterr().out
    assert shown.isascii()
    assert "\x1b" not in shown
    assert json.loads(shown)[0]["path"] == image
    assert run(monkeypatch, "predict", "run", f"{EVIL}2.png") == 2
    assert_harmless(capsys.readouterr().err)


def test_warnings(capsys):
    """One line each, without the place in the program."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show_warning
        warnings.warn(f"{EVIL} [bold]is[/bold] broken", stacklevel=1)
    error = capsys.readouterr().err
    assert_harmless(error)
    assert error == f"Warning: {SHOWN} [bold]is[/bold] broken\n"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_threads_that_cannot_write(capsys, monkeypatch):
    """They end without a word; other errors are shown."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    hide_failed_writes()
    for error in (OSError("full"), ZeroDivisionError("wrong")):

        def fail(error: Exception = error) -> None:
            raise error

        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
    said = capsys.readouterr().err
    assert "full" not in said
    assert "ZeroDivisionError: wrong" in said


def test_threads_that_call_the_hook_themselves(capsys, monkeypatch):
    """As those of multiprocessing do when a reader is gone; in the main thread all is shown."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    hide_failed_writes()

    def show(*errors: Exception) -> None:
        for error in errors:
            sys.excepthook(type(error), error, None)

    thread = threading.Thread(target=show, args=(ConnectionResetError("gone"), ValueError("no")))
    thread.start()
    thread.join()
    show(OSError("of the main thread"))
    said = capsys.readouterr().err
    assert "gone" not in said
    assert "ValueError: no" in said
    assert "OSError: of the main thread" in said
