"""Batches of pictures in files, read by worker processes; only a few batches are in memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from topklass.data import Pictures, generator
from topklass.train.batches import Batch, ShuffledBatches, shared_steps

Key = list[tuple[int, int]]
"""Of a batch: index and epoch of each picture."""
View = Callable[..., Tensor]


class FileTrainingBatches(ShuffledBatches):
    """Shuffled batches of random views of pictures.

    A view depends on seed, epoch and index of the picture alone, so the number of workers and of
    processes does not change it.

    Args:
        pictures: N pictures, read on demand.
        labels: (N).
        batch_size: samples of a batch, over all processes.
        seed: of the order and the views.
        view: maps a picture and a generator to a tensor; it has to be pickled.
        workers: processes that read pictures; 0 to read them here.
    """

    def __init__(
        self,
        pictures: Pictures,
        labels: Tensor,
        batch_size: int,
        seed: int,
        view: View,
        workers: int = 0,
    ) -> None:
        super().__init__(labels, batch_size, seed)
        self.views, self.plan, self.workers = Views(pictures, view, seed), BatchPlan(), workers
        self.share(0, 1, torch.device("cpu"))

    def share(self, rank: int, processes: int, device: torch.device) -> None:
        """Take the part of process ``rank`` of so many, for its device."""
        super().share(rank, processes, device)
        self.loader = make_loader(self.views, self.plan, self.workers, device)

    def _batches(self, epoch: int, first: int) -> Iterator[Batch]:
        chosen = self._chosen(epoch, first)
        self.plan.steps = [each[self.rank :: self.processes] for each in chosen]
        self.plan.epoch = epoch
        for images, mine in zip(raise_errors(self.loader), self.plan.steps, strict=True):
            yield images, self.labels[mine]


class FileEvaluationBatches:
    """Fixed views of all pictures, in order; with several processes each takes its share.

    Args:
        pictures: N pictures, read on demand.
        labels: (N).
        batch_size: samples of a batch, over all processes.
        view: maps a picture to a tensor; it has to be pickled.
        workers: processes that read pictures; 0 to read them here.
    """

    def __init__(
        self, pictures: Pictures, labels: Tensor, batch_size: int, view: View, workers: int = 0
    ) -> None:
        self.views, self.labels = Views(pictures, view), labels
        self.batch_size, self.workers = batch_size, workers
        self.share(0, 1, torch.device("cpu"))

    def share(self, rank: int, processes: int, device: torch.device) -> None:
        """Take the part of process ``rank`` of so many, for its device."""
        self.plan = BatchPlan(shared_steps(len(self.labels), self.batch_size, rank, processes))
        workers = min(self.workers, len(self)) if len(self) > 1 else 0
        self.loader = make_loader(self.views, self.plan, workers, device)

    def __len__(self) -> int:
        return len(self.plan.steps)

    def __iter__(self) -> Iterator[Batch]:
        for images, mine in zip(raise_errors(self.loader), self.plan.steps, strict=True):
            yield images, self.labels[mine]


@dataclass
class BatchPlan:
    """The samples of each step of an epoch: the loader's batch sampler."""

    steps: list[Tensor] = field(default_factory=list)
    epoch: int = 0

    def __iter__(self) -> Iterator[Key]:
        for step in self.steps:
            yield [(index, self.epoch) for index in step.tolist()]


class UnreadableError(ValueError):
    """A file cannot be read as an image; the message names it."""


@dataclass(frozen=True)
class Views:
    """What workers do: read a picture, and take a view of it.

    The error of an unreadable picture is returned, not raised: its message would come with the
    worker's whole traceback.

    Args:
        pictures: what to read.
        view: maps a picture, and a generator if there is a seed, to a tensor.
        seed: of random views.
    """

    pictures: Pictures
    view: View
    seed: int | None = None

    def __getitem__(self, key: tuple[int, int]) -> Tensor | UnreadableError:
        index, epoch = key
        try:
            picture = self.pictures[index]
        except (OSError, ValueError) as error:
            return UnreadableError(str(error))
        if self.seed is None:
            return self.view(picture)
        return self.view(picture, generator(self.seed, "augmentation", epoch, index))


def collated(views: list[Tensor | UnreadableError]) -> Tensor | UnreadableError:
    """A batch, or the first error."""
    for view in views:
        if isinstance(view, UnreadableError):
            return view
    shapes = sorted({tuple(view.shape) for view in views if isinstance(view, Tensor)})
    if len(shapes) > 1:
        return UnreadableError(f"all images must have the same channels, got views of {shapes}")
    batch: Tensor = default_collate(views)
    return batch


def make_loader(
    views: Views,
    plan: BatchPlan,
    workers: int,
    device: torch.device,
    collate: Callable[[list[Any]], Any] = collated,
) -> DataLoader[Any]:
    """A loader whose workers stay from epoch to epoch."""
    return DataLoader(
        views,  # type: ignore[arg-type]
        batch_sampler=plan,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=device.type == "cuda",
        persistent_workers=workers > 0,
        worker_init_fn=leave_signals,
    )


def leave_signals(worker: int) -> None:
    """Ignore Ctrl-C and signals to the group in a worker: the main process still needs its batch.

    A termination signal to the worker itself ends it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)


def raise_errors(loader: DataLoader[Any]) -> Iterator[Tensor]:
    """The batches of a loader; an error that a worker returned is raised here."""
    with naming_lost_workers():
        for batch in loader:
            if isinstance(batch, UnreadableError):
                raise batch
            yield batch


@contextmanager
def naming_lost_workers() -> Iterator[None]:
    """Turn the error of a worker that failed or was killed into one sentence, at any time."""
    try:
        yield
    except (RuntimeError, OSError, EOFError) as error:
        connection = isinstance(error, ConnectionError | EOFError)  # to a worker that just ended
        if not connection and "DataLoader worker" not in str(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1].rstrip(". ")
        raise ChildProcessError(
            f"a process that reads images has ended, perhaps for lack of memory ({reason}): take "
            "fewer with --workers (0 for none), and continue a training with --resume"
        ) from error
