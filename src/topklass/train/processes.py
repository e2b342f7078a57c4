"""Several processes of a run: which one has ended, and how many fit a machine."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from topklass.train.file_views import core_count

PATIENCE = 1.0
"""Seconds until a process that has closed its connections has ended, too."""
GRACE = 5.0
"""Seconds in which a rank notices by itself that the others have ended."""
RELEASE = 0.1
"""Seconds in which threads of gloo release their tensors: they only wait for the interpreter."""
LAUNCHER = "TOPKLASS_LAUNCHER"
"""The process that starts the other ranks of a machine."""


class Processes(Callback):
    """Knows the processes of a run on one machine, by rank."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gather their numbers."""
        if trainer.world_size > 1 and trainer.num_nodes == 1 and sys.platform != "win32":
            self.ids = [0] * trainer.world_size
            torch.distributed.all_gather_object(self.ids, os.getpid())

    def ended(self) -> list[int]:
        """The ranks that have ended, after a while; none if that is not known."""
        until = time.monotonic() + PATIENCE
        while self.ids and time.monotonic() < until:
            if ranks := [rank for rank, number in enumerate(self.ids) if not runs(number)]:
                return ranks
            time.sleep(0.02)
        return []


@contextmanager
def ending_with_launcher() -> Iterator[None]:
    """End this rank if the process that started it is killed, also before they are connected.

    Lightning starts all ranks of a machine but the first. They would wait for it half an hour.
    """
    rank, done = int(os.environ.get("LOCAL_RANK", 0)), Event()
    if rank == 0:
        os.environ[LAUNCHER] = str(os.getpid())
    elif LAUNCHER in os.environ and sys.platform != "win32":
        arguments = (int(os.environ[LAUNCHER]), rank, done)
        Thread(target=_end_after, args=arguments, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _end_after(launcher: int, rank: int, done: Event) -> None:
    while runs(launcher):
        if done.wait(1):
            return
    if not done.wait(GRACE):
        sentence = f"Error: the process that started rank {rank} has ended; continue with --resume"
        print(sentence, file=sys.stderr, flush=True)
        os._exit(2)


def runs(number: int) -> bool:
    """Whether there is a process with this number that has not ended."""
    try:
        os.kill(number, 0)
        status = Path(f"/proc/{number}/stat").read_text(encoding="utf-8")
    except ProcessLookupError:
        return False
    except OSError:  # not on Linux
        return True
    return status.rpartition(")")[2].split()[0] != "Z"  # ended, but its parent has not looked


@contextmanager
def naming_ended_ranks(trainer: L.Trainer) -> Iterator[None]:
    """Turn the errors of a lost connection into one sentence that names who has ended."""
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, torch.distributed.DistError) or "gloo" in str(error)
        if trainer.world_size == 1 or not lost:
            raise
        known = [each for each in trainer.callbacks if isinstance(each, Processes)]  # type: ignore[attr-defined]
        ranks = [rank for each in known for rank in each.ended()]
        who = f"rank {', '.join(map(str, ranks))}" if ranks else "another rank"
        raise ChildProcessError(
            f"{who} of {trainer.world_size} has ended, so rank {trainer.global_rank} stops; "
            "continue with --resume"
        ) from error


def disconnect() -> None:
    """Leave the other ranks, before the interpreter ends.

    Threads of gloo may still hold tensors of Python. If they release them when the interpreter
    ends, they abort the process (github.com/pytorch/pytorch/issues/190489), which a launcher takes
    for a failed run; if they do it when the group is destroyed, both may wait for each other.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        time.sleep(RELEASE)
        torch.distributed.destroy_process_group()


def warn_of_few_cores(trainer: L.Trainer) -> None:
    """Warn if several processes share a core."""
    cores = core_count()
    if trainer.strategy.root_device.type == "cpu" and trainer.num_devices > cores:
        warnings.warn(
            f"{trainer.num_devices} processes share {cores} core{'s' if cores > 1 else ''}, which "
            f"is slower than one for each: --devices {cores}",
            stacklevel=2,
        )
