"""Batches of images in memory, as a function of seed, epoch and step alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from topklass.data.seeds import generator

Batch = tuple[Tensor, Tensor]
Augment = Callable[[Tensor, torch.Generator], Tensor]


class ShuffledBatches(ABC):
    """Batches in random order, which can be continued in the middle of an epoch.

    Which samples a batch has depends on seed, epoch and step alone, so a run that is interrupted
    and continued sees the same as one that is not. With several processes each takes its share of
    every batch. The last samples of an epoch that make no full batch are left out.

    Args:
        labels: (N).
        batch_size: samples of a batch, over all processes.
        seed: of the order and the augmentation.
    """

    def __init__(self, labels: Tensor, batch_size: int, seed: int) -> None:
        if len(labels) < batch_size:
            raise ValueError(
                f"there are {len(labels)} training samples, fewer than one batch of {batch_size}: "
                "lower the batch size"
            )
        self.labels, self.batch_size, self.seed = labels, batch_size, seed
        self.rank, self.processes = 0, 1
        self.epoch = self.step = 0

    def share(self, rank: int, processes: int, device: torch.device) -> None:
        """Take the part of process ``rank`` of so many, for its device."""
        if self.batch_size % processes:
            raise ValueError(
                f"batch_size must be a multiple of the number of processes, got {self.batch_size} "
                f"for {processes}"
            )
        self.rank, self.processes = rank, processes

    def __len__(self) -> int:
        return len(self.labels) // self.batch_size

    def __iter__(self) -> Iterator[Batch]:
        epoch, first = self.epoch, self.step
        for step, batch in enumerate(self._batches(epoch, first), first):
            last = step + 1 == len(self)
            self.epoch, self.step = (epoch + 1, 0) if last else (epoch, step + 1)
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The position of the next batch."""
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a position."""
        self.epoch, self.step = state["epoch"], state["step"]

    @abstractmethod
    def _batches(self, epoch: int, first: int) -> Iterator[Batch]:
        """The batches of an epoch from a step on."""

    def _chosen(self, epoch: int, first: int) -> list[Tensor]:
        """The samples of each step from the first on, over all processes, on the labels' device."""
        order = torch.randperm(len(self.labels), generator=generator(self.seed, "order", epoch))
        whole = order[: len(self) * self.batch_size].to(self.labels.device)
        return list(torch.split(whole, self.batch_size))[first:]


class TrainingBatches(ShuffledBatches):
    """Shuffled, augmented batches of images in memory.

    Args:
        images: (N, …), on any device.
        labels: (N), on the same device.
        batch_size: samples of a batch, over all processes.
        seed: of the order and the augmentation.
        augment: maps a batch of images and a generator on the CPU to a batch.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        batch_size: int,
        seed: int,
        augment: Augment | None = None,
    ) -> None:
        super().__init__(labels, batch_size, seed)
        self.images, self.augment = images, augment

    def share(self, rank: int, processes: int, device: torch.device) -> None:
        """Take the part of process ``rank`` of so many, on its device."""
        super().share(rank, processes, device)
        self.images, self.labels = self.images.to(device), self.labels.to(device)

    def _batches(self, epoch: int, first: int) -> Iterator[Batch]:
        for step, chosen in enumerate(self._chosen(epoch, first), first):
            images, labels = self.images[chosen], self.labels[chosen]
            if self.augment is not None:  # all of it: the same for any number of processes
                images = self.augment(images, generator(self.seed, "augmentation", epoch, step))
            yield images[self.rank :: self.processes], labels[self.rank :: self.processes]


class EvaluationBatches:
    """All samples in order; with several processes each takes its share.

    Args:
        images: (N, …).
        labels: (N).
        batch_size: samples of a batch, over all processes.
    """

    def __init__(self, images: Tensor, labels: Tensor, batch_size: int) -> None:
        self.images, self.labels, self.batch_size = images, labels, batch_size
        self.share(0, 1, labels.device)

    def share(self, rank: int, processes: int, device: torch.device) -> None:
        """Take the part of process ``rank`` of so many, on its device."""
        steps = shared_steps(len(self.labels), self.batch_size, rank, processes)
        self.sizes = [len(step) for step in steps]
        self.images = self.images[rank::processes].to(device)
        self.labels = self.labels[rank::processes].to(device)

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Batch]:
        parts = (torch.split(each, self.sizes) for each in (self.images, self.labels))
        yield from zip(*parts, strict=True)


def shared_steps(samples: int, batch_size: int, rank: int, processes: int) -> list[Tensor]:
    """Indices of each batch of a process, with equally many batches for every process.

    A sharded network is gathered from all processes for each batch: a process with one batch more
    would wait for the others forever. So a batch may have one sample more than its share.

    Example:
        >>> [shared_steps(5, 4, rank, processes=2) for rank in range(2)]
        [[tensor([0, 2, 4])], [tensor([1, 3])]]
    """
    if samples < processes > 1:
        raise ValueError(
            f"there are {samples} images to validate on for {processes} processes, which need one "
            "each: hold out more, or take fewer devices"
        )
    each = max(1, batch_size // processes)
    number = -(-(samples // processes) // each)
    indices = torch.arange(samples)[rank::processes]
    return list(indices.tensor_split(number)) if number else []
