"""Image files that vanish or break during training, slow and failing reads, lost workers."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from signal import SIGKILL, SIGTERM
from typing import Any

from tests.chaos.accident import Accident
from tests.chaos.moments import at_calls
from tests.chaos.problems import Problem


def broken_image(dice: Random, problem: Problem, run: Path) -> Accident:
    """An image file that breaks once, at a random moment; the user replaces it.

    Not before the files are listed: without it this is a run on other data.
    """
    image = dice.choice(sorted(problem.images.rglob("*.png")))
    whole = image.read_bytes()
    shortened = whole[: dice.randrange(len(whole) // 2)]
    what, destroy = dice.choice(
        [
            ("vanishes", image.unlink),
            ("is truncated", lambda: image.write_bytes(shortened)),
            ("becomes a folder", lambda: (image.unlink(), image.mkdir())),
            ("becomes a link to nothing", lambda: (image.unlink(), image.symlink_to("nothing"))),
        ]
    )
    moment, struck = dice.randrange(problem.calls), run.with_name("struck")

    def strike() -> None:
        if (run / "recipe.yaml").exists() and not struck.exists():
            struck.touch()
            destroy()

    def repair() -> None:
        shutil.rmtree(image) if image.is_dir() else image.unlink(missing_ok=True)
        image.write_bytes(whole)

    prepare: Callable[[], None] = lambda: at_calls({moment: strike})  # noqa: E731
    return Accident(f"{image.name} {what}", prepare, repair=repair, named=image.name)


def slow_reader(dice: Random, problem: Problem, run: Path) -> Accident:
    """Reads that take long now and then, of which one may fail as a broken disk does."""
    seed = dice.random()
    fails = dice.randrange(1, 400) if dice.random() < 0.6 else -1

    def prepare() -> None:
        from PIL import Image

        real, chance, count = Image.open, Random(seed), 0

        def slow(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if chance.random() < 0.05:
                time.sleep(chance.uniform(0, 0.2))
            if count == fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*arguments, **options)

        Image.open = slow

    if fails < 0:
        return Accident("slow reads", prepare, codes=(0,))
    return Accident(f"slow reads, number {fails} fails", prepare, repair=os.sync, named=".png")


def lost_worker(dice: Random, problem: Problem, run: Path) -> Accident:
    """A process that reads images is killed, as the system does when memory is short."""
    moment, number = dice.randrange(problem.calls), dice.choice((SIGKILL, SIGTERM))

    def act() -> None:
        for worker in multiprocessing.active_children()[:1]:
            os.kill(worker.pid or 0, number)

    return Accident(f"{number.name} to a worker", lambda: at_calls({moment: act}))
