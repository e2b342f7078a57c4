"""All kinds of accidents, and how often each happens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from signal import SIGINT, SIGKILL, SIGTERM
from typing import NamedTuple

from tests.chaos import damage, disks, readers
from tests.chaos.accident import Accident, train_through
from tests.chaos.comparison import Lost, require_same
from tests.chaos.problems import IN_FILES, Problem, Workshop
from tests.chaos.signals import signal_inside, signal_outside

Make = Callable[[Random, Problem, Path], Accident]
ALONE = ("smooth", "averaged", "files", "workers")
AGAIN = 0.25
"""Probability that the run that is continued has an accident, too."""


class Kind(NamedTuple):
    """A kind of accidents."""

    weight: int
    """How often it happens."""
    problems: tuple[str, ...]
    """To which of them."""
    happen: Callable[[Random, Problem, Path], str]
    """Let it happen, and check what is left; returns a description."""


def to_training(make: Make) -> Callable[[Random, Problem, Path], str]:
    """Accidents to a training and perhaps to its continuation; it must end as without them."""

    def happen(dice: Random, problem: Problem, run: Path) -> str:
        accidents = [make(dice, problem, run)]
        while dice.random() < AGAIN:
            accidents.append(make(dice, problem, run))
        what = train_through(problem, run, accidents)
        require_same(problem.whole, run)
        return what

    return happen


def signal(number: int, twice: bool = False) -> Callable[[Random, Problem, Path], str]:
    """A signal to a training."""
    return to_training(partial(signal_inside, number=number, twice=twice))


KINDS = {
    "kill -9": Kind(14, ALONE, signal(SIGKILL)),
    "SIGTERM": Kind(10, ALONE, signal(SIGTERM)),
    "SIGTERM twice": Kind(4, ALONE, signal(SIGTERM, twice=True)),
    "Ctrl-C": Kind(8, ALONE, signal(SIGINT)),
    "Ctrl-C twice": Kind(8, ALONE, signal(SIGINT, twice=True)),
    "a signal after a cold start": Kind(3, ("smooth", "two"), to_training(signal_outside)),
    "kill -9 to one of two": Kind(4, ("two",), signal(SIGKILL)),
    "SIGTERM to one of two": Kind(4, ("two",), signal(SIGTERM)),
    "Ctrl-C to both": Kind(4, ("two",), signal(SIGINT)),
    "a file-size limit": Kind(5, ALONE, to_training(disks.file_limit)),
    "a full disk": Kind(5, ALONE, to_training(disks.full_disk)),
    "a jump of the clock": Kind(4, ALONE, to_training(disks.clock_jump)),
    "two runs in one folder": Kind(6, (*ALONE, "two"), to_training(disks.second_run)),
    "a broken image": Kind(5, IN_FILES, to_training(readers.broken_image)),
    "a slow or failing reader": Kind(3, IN_FILES, to_training(readers.slow_reader)),
    "a lost worker": Kind(3, ("workers",), to_training(readers.lost_worker)),
    "damage to a stopped run": Kind(12, ALONE, damage.interrupted),
    "damage to a finished run": Kind(8, ALONE, damage.finished),
}


def accident_of(seed: int, workshop: Workshop, only: str | None = None) -> tuple[str, str, str]:
    """Let the accident of a seed happen; its kind, problem, and what was lost, or nothing."""
    dice = Random(seed)
    drawn = dice.choices([*KINDS], [kind.weight for kind in KINDS.values()])[0]
    name = only or drawn
    problem = workshop.problem(dice.choice(KINDS[name].problems))
    try:
        what = KINDS[name].happen(dice, problem, workshop.fresh())
    except Lost as lost:
        return name, problem.name, str(lost)
    return name, f"{problem.name}, {what}", ""
