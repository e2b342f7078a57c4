"""Datasets of torchvision, or others of pairs (image, label), passed in from Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from topklass.data.arrays import as_images, as_labels, class_names
from topklass.data.dataset import Dataset, Split


class MapPictures:
    """The images of a dataset of pairs, each read when it is asked for.

    Args:
        source: a map-style dataset; ``source[i][0]`` is a Pillow image or a uint8 tensor.
        indices: which ones, all by default.
    """

    def __init__(self, source: Any, indices: Sequence[int] | None = None) -> None:
        self.source = source
        self.indices = range(len(source)) if indices is None else indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        picture = self.source[self.indices[index]][0]
        if isinstance(picture, Tensor) and picture.dtype != torch.uint8:
            raise TypeError(
                f"images must be Pillow images or uint8 tensors, got {picture.dtype}: construct "
                "the dataset without ToTensor and Normalize, they come later"
            )
        return picture.convert("RGB") if hasattr(picture, "convert") else picture

    def take(self, indices: Tensor) -> MapPictures:
        """Those at the indices."""
        return MapPictures(self.source, [self.indices[index] for index in indices.tolist()])


def map_split(source: Any) -> Split:
    """A map-style dataset of pairs as a split.

    Images and labels that it holds in memory without a transform (``data`` and ``targets`` or
    ``labels``, as CIFAR100, MNIST or SVHN of torchvision; a ``TensorDataset``; a list of pairs)
    become tensors, also those of a ``Subset``. Networks see them in their own size.

    Others are read on demand, and resized and cropped as image files are: set ``crop`` and
    ``resize`` of the recipe if they are small. If there are no ``targets`` either, every sample is
    read once for its label.

    Args:
        source: anything with ``len`` and ``source[i] = (image, label)``.

    Returns:
        A split.

    Example:
        >>> map_split([(torch.zeros(3, 8, 8, dtype=torch.uint8), 1)]).labels
        tensor([1])
    """
    if isinstance(source, Subset):
        return map_split(source.dataset).take(torch.as_tensor(source.indices))
    if isinstance(source, TensorDataset):
        return Split(as_images(source.tensors[0]), as_labels(source.tensors[1]))
    if isinstance(source, list | tuple) and _same_shape([image for image, _ in source]):
        return Split(torch.stack([image for image, _ in source]), as_labels([y for _, y in source]))
    labels = getattr(source, "targets", getattr(source, "labels", None))
    if getattr(source, "target_transform", None) is not None:
        labels = None
    if labels is None:
        labels = [int(source[index][1]) for index in range(len(source))]
    images = getattr(source, "data", None)
    plain = getattr(source, "transform", None) is None
    if plain and str(getattr(images, "dtype", "")).endswith("uint8"):
        return Split(as_images(images), as_labels(labels))
    return Split(MapPictures(source), as_labels(labels))


def _same_shape(images: Sequence[Any]) -> bool:
    """Whether there are images, and all are tensors of bytes of one shape."""
    tensors = all(isinstance(image, Tensor) and image.dtype == torch.uint8 for image in images)
    return tensors and len({image.shape for image in images}) == 1


def from_map_style(
    train: Any,
    test: Any,
    validation: Any = None,
    *,
    classes: Sequence[str] | None = None,
    name: str | None = None,
) -> Dataset:
    """Datasets of torchvision, or others of pairs, as one dataset of topklass.

    Args:
        train: what to learn from, see :func:`map_split`.
        test: what to report on.
        validation: what to choose by.
        classes: names, by default ``train.classes`` or numbers.
        name: by default that of the type of ``train``.

    Returns:
        A dataset.

    Example:
        >>> pairs = [(torch.zeros(3, 8, 8, dtype=torch.uint8), label) for label in (0, 1, 1)]
        >>> from_map_style(pairs, pairs, classes=("cat", "dog")).counts
        tensor([1, 2])
    """
    given = {"train": train, "validation": validation, "test": test}
    splits: dict[str, Any] = {
        key: map_split(source) for key, source in given.items() if source is not None
    }
    if classes is None:
        classes = getattr(getattr(train, "dataset", train), "classes", None)
    names = class_names([split.labels for split in splits.values()], classes)
    name = name or type(train).__name__
    record = {"name": name, "format": "passed in from Python"}
    return Dataset(name, classes=names, record=record, **splits)
