"""Short trainings, each with its undisturbed run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from signal import SIGTERM
from socket import socket
from tempfile import mkdtemp

import torch
from tests.chaos.commands import GRACE, PATIENCE, Process, Screen, nothing, start, start_cold
from tests.chaos.comparison import Lost, load, require_same
from tests.chaos.moments import count_moments
from tests.image_folders import write_folder

GLYPHS = ("classes=10", "per_class=16", "size=16", "validation_per_class=4", "test_per_class=4")
EPOCHS = 3
SHORT = ("--epochs", str(EPOCHS), "--batch-size", "32", "--k", "2")
PROBLEMS = {
    "smooth": ("--loss", "smooth"),
    "averaged": ("--loss", "noised", "--ema", "0.9", "--cutmix", "0.5", "--cutout", "2"),
    "files": ("--crop", "16", "--workers", "0"),
    "workers": ("--crop", "16", "--workers", "2"),
    "two": ("--loss", "smooth", "--devices", "2"),
}
IMPORTED = (
    "PIL.PngImagePlugin",
    "tensorboard",
    "topklass.cli",
    "topklass.data.characters",
    "topklass.report",
    "topklass.train",
    "torch.utils.tensorboard",
    "torchvision",
)
IN_FILES = ("files", "workers")


@dataclass(frozen=True)
class Problem:
    """A recipe, and the run of it that had no accident."""

    name: str
    settings: tuple[str, ...]
    whole: Path
    images: Path
    calls: int = 0
    files: int = 0
    seconds: float = 0.0
    steps: int = 0
    """Of an epoch."""

    @property
    def processes(self) -> int:
        """How many train together."""
        return 2 if self.name == "two" else 1

    def command(self, run: Path) -> tuple[str, ...]:
        """Train in a folder."""
        return ("train", *self.settings, "--run", str(run))


@dataclass
class Group:
    """The processes of one training: signals reach one or all of them."""

    ranks: list[Process]
    launched: bool = True
    """By a program that ends the others if one fails, as torchrun does."""

    def wait(self) -> Screen:
        """What all have shown; if one fails and others wait for it, a launcher ends them."""
        limit = time.monotonic() + PATIENCE
        failed: list[Process] = []
        while not (ended := all(rank.watch(0.1) for rank in self.ranks)):
            if time.monotonic() > limit:
                break
            if failed or not self.launched:
                continue
            if failed := [rank for rank in self.ranks if rank.has_failed()]:
                limit = time.monotonic() + GRACE
        if failed and not ended:
            self.ranks[0].send(SIGTERM, group=True)
        screens = [rank.wait() for rank in self.ranks]
        shown = zip(self.ranks, screens, strict=True)
        codes = [s.codes[0] for rank, s in shown if ended or not failed or rank in failed]
        return Screen(tuple(codes), "".join(screen.text for screen in screens))

    def kill(self) -> None:
        """End what is left of them."""
        for rank in self.ranks:
            rank.kill()


def launch(
    problem: Problem,
    arguments: tuple[str, ...],
    prepare: Callable[[], None] = nothing,
    *,
    rank: int = 0,
    cold: bool = False,
) -> Group:
    """Start a command as one process, or as several as a launcher does; one has the accident."""
    if cold:
        return Group([start_cold(arguments)], launched=False)
    if problem.processes == 1:
        return Group([start(arguments, prepare)])
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks: list[Process] = []
    for each in range(problem.processes):
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(problem.processes),
            "LOCAL_RANK": str(each),
            "RANK": str(each),
            "NODE_RANK": "0",
        }
        mine = prepare if each == rank else nothing
        group = ranks[0].pid if ranks else 0
        ranks.append(start(arguments, mine, environment=environment, group=group))
    return Group(ranks)


def mount(folder: Path, options: str) -> bool:
    """Mount a disk in memory, if that is allowed here."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


def unmount(folder: Path) -> None:
    """Unmount it."""
    if os.path.ismount(folder):
        subprocess.run(["umount", "--lazy", str(folder)], capture_output=True)


def resume(run: Path) -> tuple[str, ...]:
    """Continue a run, as docs/training.md says."""
    return ("train", "--resume", "--run", str(run))


def import_all() -> None:
    """Import what the commands need and set up what they share, once for all of them."""
    for module in IMPORTED:
        import_module(module)
    torch.set_num_threads(1)
    sys.modules["topklass.data.characters"].characters(2)  # reads all fonts
    sys.modules["topklass.train.trainer"].KEEP_EVERY = timedelta(milliseconds=100)


class Workshop:
    """A folder with the problems that were needed so far."""

    def __init__(self) -> None:
        import_all()
        self.folder = Path(mkdtemp(prefix="chaos-"))
        self.known: dict[str, Problem] = {}
        self.place: Path | None = None
        os.environ["TOPKLASS_CACHE"] = str(self.folder / "cache")

    def __enter__(self) -> Workshop:
        return self

    def __exit__(self, *_: object) -> None:
        self._clean()
        shutil.rmtree(self.folder, ignore_errors=True)

    def problem(self, name: str) -> Problem:
        """A problem; its undisturbed run is made when it is first asked for."""
        if name not in self.known:
            self.known[name] = self._prepare(name)
        return self.known[name]

    def fresh(self) -> Path:
        """A run folder that does not exist yet, in a place for everything else of the accident."""
        self._clean()
        self.place = Path(mkdtemp(prefix="accident-", dir=self.folder))
        return self.place / "run"

    def _clean(self) -> None:
        if self.place is not None:
            unmount(self.place)
            shutil.rmtree(self.place, ignore_errors=True)

    def _prepare(self, name: str) -> Problem:
        images = self.folder / f"images-{name}"
        if name in IN_FILES:
            write_folder(images, train=24)
            data: tuple[str, ...] = ("--data", str(images))
        else:
            data = ("--data", "glyphs", *(f"--option={option}" for option in GLYPHS))
        settings = (*data, *SHORT, *PROBLEMS[name])
        whole, again = (self.folder / f"{each}-{name}" for each in ("whole", "again"))
        problem, record = Problem(name, settings, whole, images), self.folder / "moments.txt"
        screens = [launch(problem, problem.command(whole)).wait()]
        began = time.perf_counter()
        counted = partial(count_moments, again, record)
        screens.append(launch(problem, problem.command(again), counted).wait())
        seconds = time.perf_counter() - began
        for screen in screens:
            if screen.code:
                raise Lost("an undisturbed run failed", screen)
        require_same(whole, again)
        calls, files = map(int, record.read_text().split())
        steps = load(whole / "checkpoints" / "last.ckpt")["global_step"] // EPOCHS
        return Problem(name, settings, whole, images, calls, files, seconds, steps)
