"""Signals: at a random moment of a command, once or twice, to one process or to all."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from signal import SIGINT, SIGKILL, SIGTERM, Signals

from tests.chaos.accident import ERRORS, Accident
from tests.chaos.moments import at_calls, at_file
from tests.chaos.problems import Group, Problem

CODES = {SIGKILL: (0, -9), SIGTERM: (0, 143, -15), SIGINT: (0, 130, -2)}


def send(number: Signals) -> None:
    """To this process; Ctrl-C to its group, as a terminal does."""
    if number == SIGINT:
        os.killpg(os.getpgrp(), number)
    else:
        os.kill(os.getpid(), number)


def at_random(dice: Random, problem: Problem, run: Path, act: Callable[[], object]) -> Callable:
    """Prepare an act at a random call of the command, or at or just after a random file."""
    if dice.random() < 0.3:
        number = dice.randrange(problem.files + 1)
        delay = dice.choice((0.0, 10 ** dice.uniform(-4, -1.5)))
        return lambda: at_file(run, number, act, delay)
    number = dice.randrange(problem.calls)
    return lambda: at_calls({number: act})


def signal_inside(
    dice: Random, problem: Problem, run: Path, number: Signals, twice: bool = False
) -> Accident:
    """A signal that comes at a random moment, and perhaps again soon after."""
    pause = 10 ** dice.uniform(-4, -0.5)

    def again() -> None:
        time.sleep(pause)
        send(number)

    def act() -> None:
        if twice:
            threading.Thread(target=again, daemon=True).start()
        send(number)

    prepare = at_random(dice, problem, run, act)
    codes = CODES[number]
    if problem.processes > 1:  # the others learn that one has died
        codes = (*CODES[SIGINT], *CODES[SIGTERM], *codes, *ERRORS)
    what = f"{number.name}{' twice' if twice else ''}"
    return Accident(what, prepare, dice.randrange(problem.processes), codes=codes)


def signal_outside(dice: Random, problem: Problem, run: Path) -> Accident:
    """A signal to a command that is started cold, often while it starts."""
    number = dice.choice([*CODES])
    wait = dice.uniform(0, 5 + problem.seconds)

    def during(group: Group) -> None:
        group.ranks[0].watch(wait)
        group.ranks[0].send(number, group=number == SIGINT)

    codes = CODES[number] if problem.processes == 1 else (*CODES[number], *ERRORS)
    what = f"{number.name} {wait:.1f} s after a cold start"
    return Accident(what, cold=True, during=during, codes=codes)
