"""Files that cannot be read, found before they end a training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from topklass.data import Dataset, Pictures
from topklass.data.dataset import SPLITS
from topklass.train.file_batches import BatchPlan, UnreadableError, Views, make_loader

AT_ONCE = 64
SHOWN = 10


def unreadable(pictures: Pictures, workers: int = 0) -> list[str]:
    """Read all pictures, and tell what is wrong with those that cannot be read.

    Args:
        pictures: what to read.
        workers: processes that read; 0 to read here.

    Returns:
        A sentence for each, which names the file.
    """
    plan = BatchPlan(list(torch.split(torch.arange(len(pictures)), AT_ONCE)))
    workers = workers if len(plan.steps) > 1 else 0
    views = Views(pictures, nothing)
    loader = make_loader(views, plan, workers, torch.device("cpu"), errors)
    return [error for batch in loader for error in batch]


def unreadable_images(
    dataset: Dataset, workers: int = 0, splits: Iterable[str] = SPLITS
) -> list[str]:
    """The same for all files of a data set, or of some of its splits."""
    return [
        sentence
        for name, split in dataset.splits.items()
        if name in splits and not isinstance(split.images, Tensor)
        for sentence in unreadable(split.images, workers)
    ]


def require_readable(dataset: Dataset, workers: int = 0) -> None:
    """Read what training reads last, validation and test: a broken file must not end it there."""
    found = unreadable_images(dataset, workers, ("validation", "test"))
    if found:
        more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise UnreadableError(f"{'; '.join(found[:SHOWN])}{more}. Replace or delete what is broken")
    expected = channels(dataset.train.images[0])
    for name, split in dataset.splits.items():
        if (given := channels(split.images[0])) != expected:
            raise ValueError(
                f"images of {name} of {dataset.name} have {given} channels, but the training "
                f"images have {expected}: convert them"
            )


@contextmanager
def advice_on_broken_files() -> Iterator[None]:
    """Add to the error of a broken file what to do about it."""
    try:
        yield
    except UnreadableError as error:
        raise UnreadableError(
            f"{error}. Replace the file, and continue with --resume; `topklass check` finds all "
            "such files"
        ) from error


def channels(picture: Any) -> int:
    """Of a Pillow image, or of a tensor (channels, H, W)."""
    return len(picture) if isinstance(picture, Tensor) else len(picture.getbands())


def nothing(picture: Any) -> Tensor:
    """No view of a picture that has been read."""
    return torch.empty(0)


def errors(views: list[Tensor | UnreadableError]) -> list[str]:
    """What is wrong with the unreadable ones of a batch."""
    return [str(view) for view in views if isinstance(view, UnreadableError)]
