"""Disks that are full, files that become too large, clocks that jump, folders that are taken."""

from __future__ import annotations

import os
import resource
import time
from functools import partial
from pathlib import Path
from random import Random
from signal import SIGKILL

from tests.chaos.accident import BUSY, NO_RUN, Accident, check_screen
from tests.chaos.commands import nothing
from tests.chaos.comparison import Lost
from tests.chaos.moments import at_calls
from tests.chaos.problems import Group, Problem, launch, mount, resume
from tests.chaos.signals import CODES

YEAR = 365 * 86_400


def file_limit(dice: Random, problem: Problem, run: Path) -> Accident:
    """A limit of the size of files, from the smallest record to a whole checkpoint."""
    checkpoint = (problem.whole / "checkpoints" / "last.ckpt").stat().st_size
    limit = dice.randrange(4096) if dice.random() < 0.4 else dice.randrange(checkpoint)

    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    named = "" if problem.name == "workers" else str(run)  # workers share memory, as files
    return Accident(f"files of at most {limit} bytes", prepare, repair=os.sync, named=named)


def full_disk(dice: Random, problem: Problem, run: Path) -> Accident:
    """A disk that has no room for all checkpoints; a limit of files where none can be mounted."""
    checkpoint = (problem.whole / "checkpoints" / "last.ckpt").stat().st_size
    size = dice.randrange(2**14, 5 * checkpoint)
    if run.parent.is_mount() or not mount(run.parent, f"size={size}"):
        return file_limit(dice, problem, run)

    def repair() -> None:
        mount(run.parent, "remount,size=64m")

    return Accident(f"a disk of {size} bytes", repair=repair, named=str(run))


def clock_jump(dice: Random, problem: Problem, run: Path) -> Accident:
    """A clock that jumps by up to ten years, and files that seem to be of another time."""
    jump = dice.uniform(-10, 10) * YEAR
    moments = sorted(dice.sample(range(problem.calls), 2))
    dies = dice.random() < 0.5

    def shift() -> None:
        real = time.time
        time.time = lambda: real() + jump
        for file in run.rglob("*"):
            os.utime(file, (time.time(), time.time()))

    def prepare() -> None:
        end = partial(os.kill, os.getpid(), SIGKILL) if dies else nothing
        at_calls({moments[0]: shift, moments[1]: end})

    return Accident(f"a jump of the clock by {jump:.0f} s", prepare, codes=CODES[SIGKILL])


def second_run(dice: Random, problem: Problem, run: Path) -> Accident:
    """A second command in the same folder, while the first runs."""
    wait = dice.uniform(0, 1.2 * problem.seconds) if dice.random() < 0.8 else 0.0
    command = dice.choice((problem.command(run), resume(run)))

    def during(group: Group) -> None:
        group.ranks[0].watch(wait)
        screen = launch(problem, command).wait()
        check_screen(screen, (0, 2))
        if screen.code and not any(each in screen.text for each in (BUSY, NO_RUN, "--resume")):
            raise Lost("the second command does not say that there is another", screen)

    return Accident(f"a second command after {wait:.1f} s", during=during)
