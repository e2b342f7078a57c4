"""Flipped bits and truncation in the files of a run folder."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from random import Random
from signal import SIGKILL, SIGTERM

from tests.chaos.accident import ERRORS, check_screen
from tests.chaos.commands import Screen
from tests.chaos.comparison import Lost, require_same
from tests.chaos.problems import Problem, launch, resume
from tests.chaos.signals import signal_inside


def damage(dice: Random, file: Path) -> str:
    """Change a file; says how."""
    content = bytearray(file.read_bytes())
    how = dice.choice(("bit", "bit", "block", "cut", "cut", "empty"))
    place = dice.randrange(len(content)) if content else 0
    if how == "bit" and content:
        content[place] ^= 1 << dice.randrange(8)
    elif how == "block" and content:
        end = min(len(content), place + 512)
        content[place:end] = bytes(end - place)
    else:
        del content[0 if how == "empty" else place :]
    file.write_bytes(content)
    return f"{file.name} ({how} at {place})"


def interrupted(dice: Random, problem: Problem, run: Path) -> str:
    """Damage to a run that was stopped, before it is continued."""
    number = dice.choice((SIGKILL, SIGTERM))
    launch(problem, problem.command(run), signal_inside(dice, problem, run, number).prepare).wait()
    if not files_of(run):
        return "nothing to damage"
    if (run / "result.json").exists():  # the signal came too late
        return shown_after(dice, problem, run, resume(run))
    file = dice.choice(files_of(run))
    what = damage(dice, file)
    broken = file.name == "last.ckpt" and not is_whole(file)
    screen = launch(problem, resume(run)).wait()
    check_damage(screen, file, what)
    if screen.code == 0:
        try:
            require_same(problem.whole, run)
        except Lost as lost:
            raise Lost(f"after damage to {what}: {lost}", screen) from None
        if broken and file.name not in screen.text:
            raise Lost(f"nobody is told that {what} is damaged", screen)
    return f"{what} → {screen.code}"


def finished(dice: Random, problem: Problem, run: Path) -> str:
    """Damage to a finished run, before its numbers are shown."""
    shutil.copytree(problem.whole, run)
    report = ("--output", str(run.parent / "report.html"))
    commands = [resume(run), ("evaluate", str(run), "--json"), ("compare", str(run), *report)]
    return shown_after(dice, problem, run, dice.choice(commands))


def shown_after(dice: Random, problem: Problem, run: Path, command: tuple[str, ...]) -> str:
    """Damage a file; the command must show the same numbers as before, or name the file."""
    expected = launch(problem, command).wait()
    file = dice.choice(files_of(run))
    what = f"{damage(dice, file)}, {command[0]}"
    screen = launch(problem, command).wait()
    check_damage(screen, file, what)
    if screen.code == 0 and screen.text != expected.text and file.name not in screen.text:
        raise Lost(f"other numbers without a word after damage to {what}", screen)
    return f"{what} → {screen.code}"


def files_of(run: Path) -> list[Path]:
    """All files of a run; not what a killed process had begun to write, which nobody reads."""
    return sorted(each for each in run.rglob("*") if each.is_file() and each.suffix != ".part")


def check_damage(screen: Screen, file: Path, what: str) -> None:
    """Require success, or a message that names the damaged file."""
    try:
        check_screen(screen, (0, *ERRORS))
    except Lost as lost:
        raise Lost(f"after damage to {what}: {lost}") from None
    if screen.code and file.name not in screen.text:
        raise Lost(f"the message does not name the damaged file: {what}", screen)


def is_whole(file: Path) -> bool:
    """Whether all parts of a checkpoint have their checksum."""
    try:
        with zipfile.ZipFile(file) as parts:
            return parts.testzip() is None
    except Exception:  # whatever a damaged file causes
        return False
