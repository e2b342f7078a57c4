"""Images with labels: what all readers return, and all corruptions take and return."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

SPLITS = ("train", "validation", "test")


class Pictures(Protocol):
    """Images that are read when they are asked for."""

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, index: int) -> Any:
        """One of them: a Pillow image, or a uint8 tensor (channels, H, W)."""

    def take(self, indices: Tensor) -> Pictures:
        """Those at the indices."""


@dataclass(frozen=True, eq=False)
class Split:
    """Images and their labels; a map-style dataset of pairs.

    Args:
        images: a uint8 tensor (N, channels, H, W) with 1 or 3 channels, or pictures that are read
            on demand.
        labels: class indices, int64 (N).

    Example:
        >>> split = Split(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 0, 1, 1]))
        >>> len(split), split.in_memory, split.take(torch.tensor([3])).labels
        (4, True, tensor([1]))
    """

    images: Tensor | Pictures
    labels: Tensor

    def __post_init__(self) -> None:
        if isinstance(self.images, Tensor):
            _check_images(self.images)
        if not isinstance(self.labels, Tensor) or self.labels.dtype != torch.int64:
            given = getattr(self.labels, "dtype", type(self.labels).__name__)
            raise TypeError(f"labels must be a tensor of int64, got {given}")
        if self.labels.shape != (len(self.images),):
            raise ValueError(
                f"there must be one label for each of the {len(self.images)} images, got labels of "
                f"shape {tuple(self.labels.shape)}"
            )

    @property
    def in_memory(self) -> bool:
        """Whether the images are a tensor."""
        return isinstance(self.images, Tensor)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.images[index], int(self.labels[index])

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        return (self[index] for index in range(len(self)))

    def take(self, indices: Tensor) -> Split:
        """The samples at the indices, in their order."""
        images = self.images
        chosen = images[indices] if isinstance(images, Tensor) else images.take(indices)
        return Split(chosen, self.labels[indices])


def _check_images(images: Tensor) -> None:
    if 0 in images.shape[1:]:
        raise ValueError(f"images must have pixels, got shape {tuple(images.shape)}")
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] not in (1, 3):
        raise ValueError(
            "images in memory must be a uint8 tensor (N, channels, H, W) with 1 or 3 channels, "
            f"got shape {tuple(images.shape)} and {images.dtype}"
        )


@dataclass(frozen=True, eq=False)
class Superclasses:
    """A coarser division of the classes.

    Args:
        names: one for each superclass.
        of_class: the superclass of each class, int64 (C).

    Example:
        >>> kinds = Superclasses(("pet", "farm"), torch.tensor([0, 0, 1]))
        >>> kinds.names[kinds.of_class[2]]
        'farm'
    """

    names: tuple[str, ...]
    of_class: Tensor

    def __post_init__(self) -> None:
        known = self.of_class
        if known.dtype != torch.int64 or known.dim() != 1:
            raise ValueError(
                "of_class must have one int64 for each class, "
                f"got shape {tuple(known.shape)} and {known.dtype}"
            )
        check_range("superclasses", known, len(self.names))


@dataclass(frozen=True, eq=False)
class Dataset:
    """A classification problem: splits, names, and a record of how it was made.

    Args:
        name: what it is called.
        train: what to learn from.
        test: what to report on.
        classes: a name for each class, all different.
        validation: what to choose by; None until :func:`topklass.data.hold_out` makes it.
        superclasses: coarser divisions by name; label noise uses the first.
        record: how it was made, for JSON or YAML: its origin, and the steps taken since.

    Example:
        >>> split = Split(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 0, 1, 2]))
        >>> Dataset("toy", split, split, ("cat", "dog", "cow")).counts
        tensor([2, 1, 1])
    """

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    validation: Split | None = None
    superclasses: Mapping[str, Superclasses] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(set(self.classes)) != len(self.classes):
            twice = next(name for name in self.classes if self.classes.count(name) > 1)
            raise ValueError(f"class names must differ, got {twice!r} more than once")
        for name, split in self.splits.items():
            if not len(split):
                raise ValueError(f"there are no images in {name}, expected at least one")
            _check_same_shape(name, split.images, self.train.images)
            check_range(f"labels of {name}", split.labels, len(self.classes))
        for name, division in self.superclasses.items():
            if len(division.of_class) != len(self.classes):
                raise ValueError(
                    f"superclasses {name!r} are given for {len(division.of_class)} classes, but "
                    f"there are {len(self.classes)}"
                )
        if not self.record:
            object.__setattr__(self, "record", {"name": self.name})

    @property
    def splits(self) -> dict[str, Split]:
        """The splits that there are, by name."""
        found = {name: getattr(self, name) for name in SPLITS}
        return {name: split for name, split in found.items() if split is not None}

    @property
    def counts(self) -> Tensor:
        """Number of training images of each class, (C): what margins and weights depend on."""
        return class_counts(self.train, len(self.classes))

    def changed(self, step: Mapping[str, Any], **splits: Split) -> Self:
        """Itself with other splits, and one more step in its record."""
        steps = [*self.record.get("steps", ()), dict(step)]
        changes: dict[str, Any] = {**splits, "record": {**self.record, "steps": steps}}
        return replace(self, **changes)


def _check_same_shape(name: str, images: Tensor | Pictures, training: Tensor | Pictures) -> None:
    """Require images like those of training: in memory and of the same shape, or on demand."""
    in_memory = [isinstance(each, Tensor) for each in (images, training)]
    if in_memory[0] != in_memory[1]:
        where = ["in memory" if each else "read on demand" for each in in_memory]
        raise ValueError(
            f"images of {name} are {where[0]} but the training images are {where[1]}, and would be "
            "resized differently: make both data sets in the same way, with or without a transform"
        )
    if isinstance(images, Tensor) and isinstance(training, Tensor):
        found, expected = tuple(images.shape[1:]), tuple(training.shape[1:])
        if found != expected:
            raise ValueError(
                f"images of {name} must have the channels, height and width of the training "
                f"images, {expected}, got {found}: resize or convert them"
            )


def class_counts(split: Split, classes: int) -> Tensor:
    """Number of images of each class, (C)."""
    return torch.bincount(split.labels, minlength=classes)


def check_range(what: str, indices: Tensor, number: int) -> None:
    """Require indices from 0 to a number, that one excluded."""
    if indices.numel() == 0:
        return
    lowest, highest = (int(bound) for bound in indices.aminmax())
    if lowest < 0 or highest >= number:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"{what} must be from 0 to {number - 1}, got {wrong}")
