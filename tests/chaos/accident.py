"""An accident, and what a user does after it: read the screen, and follow it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.commands import Screen, nothing
from tests.chaos.comparison import Lost, load
from tests.chaos.problems import Group, Problem, launch, resume

ERRORS = (1, 2)
BUSY, NO_RUN = "another process works in", "no run to continue"
LONGEST_MESSAGE = 800
MESSAGE = re.compile("^Error:", re.MULTILINE)
STOPPED = re.compile(r"stopped after step (\d+)")
EPOCH = re.compile(r"^epoch (\d+)/\d+ ", re.MULTILINE)


@dataclass(frozen=True)
class Accident:
    """What happens to one command."""

    what: str
    prepare: Callable[[], None] = nothing
    """Called in the process, before the command begins."""
    rank: int = 0
    """Of the process, if there are several."""
    cold: bool = False
    """Whether the command is started in a new interpreter."""
    during: Callable[[Group], None] = lambda group: None
    """Called while the command runs."""
    repair: Callable[[], None] = nothing
    """What a user does when the command has ended: make room, replace a file."""
    codes: tuple[int, ...] = (0, *ERRORS)
    """Exit codes that may follow."""
    named: str = ""
    """What the message of an error must name."""


NONE = Accident("nothing")


def train_through(problem: Problem, run: Path, accidents: Sequence[Accident]) -> str:
    """Train with an accident to each command, then follow the advice until training ends.

    Returns what happened, with the exit status of each command.
    """
    history = []
    begin, go_on = problem.command(run), resume(run)
    command = begin
    left = list(accidents)
    for _ in range(len(accidents) + 6):
        accident = left.pop(0) if left else NONE
        running = launch(problem, command, accident.prepare, rank=accident.rank, cold=accident.cold)
        try:
            accident.during(running)
            screen = running.wait()
        finally:
            running.kill()
        check(screen, accident, run, problem)
        accident.repair()
        history.append(f"{accident.what} → {', '.join(map(str, screen.codes))}")
        if screen.code == 0:
            return "; ".join(history)
        if BUSY in screen.text:  # some process of the killed run
            time.sleep(2)
        elif NO_RUN in screen.text:
            command = begin
        elif screen.code not in ERRORS or "--resume" in screen.text:
            command = go_on
        elif accident.repair is nothing or (command is begin and checkpoints_of(run)):
            raise Lost("the message does not say how to go on", screen)
    raise Lost("following the messages leads nowhere", screen)


def checkpoints_of(run: Path) -> list[Path]:
    """The last checkpoint and its predecessor, with which a run can only be continued."""
    return [each for each in (run / "checkpoints").glob("last.ckpt*") if each.suffix != ".part"]


def check(screen: Screen, accident: Accident, run: Path, problem: Problem) -> None:
    """Require expected exit codes, a short message, and the checkpoint that was promised."""
    harmless = BUSY in screen.text or NO_RUN in screen.text
    check_screen(screen, (*accident.codes, 2) if harmless else accident.codes)
    if screen.code in ERRORS and not harmless and accident.named not in screen.text:
        raise Lost(f"the message does not name {accident.named}", screen)
    reached = max((load(each)["global_step"] for each in checkpoints_of(run)), default=0)
    stopped, epochs = STOPPED.search(screen.text), EPOCH.findall(screen.text)
    if stopped and reached != int(stopped[1]):
        raise Lost(f"stopped after step {stopped[1]}, but has that of {reached}", screen)
    if epochs and reached < (int(epochs[-1]) - 1) * problem.steps:  # shown just before it is saved
        raise Lost(f"epoch {epochs[-1]} was shown, but the checkpoint has step {reached}", screen)


def check_screen(screen: Screen, codes: tuple[int, ...]) -> None:
    """Require an end, expected exit codes, no traceback, and a short message for an error."""
    if "the command hangs" in screen.text:
        raise Lost("the command hangs", screen)
    if "Traceback" in screen.text and not is_of_python(screen.text):
        raise Lost("a traceback is on the screen", screen)
    if wrong := [code for code in screen.codes if code not in codes]:
        raise Lost(f"the exit status is {wrong[0]}, expected one of {codes}", screen)
    if any(code in ERRORS for code in screen.codes):
        if (message := MESSAGE.search(screen.text)) is None:
            raise Lost("the command failed without a message", screen)
        if len(screen.text) - message.start() > LONGEST_MESSAGE * len(screen.codes):
            raise Lost("the message about the error is too long", screen)


def is_of_python(text: str) -> bool:
    """Whether a traceback is that of Ctrl-C while PyTorch is imported, before any command runs."""
    return text.rstrip().endswith("KeyboardInterrupt") and "in main" not in text
