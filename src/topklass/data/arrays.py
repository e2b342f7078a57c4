"""Arrays in a ``.npz`` file: x_train, y_train, x_test, y_test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from topklass.data.dataset import Dataset, Split, Superclasses, check_range
from topklass.data.npz_files import read_plain_arrays

INTEGERS = (
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
)
LAYOUT = (
    "x_train, y_train, x_test and y_test, optionally x_val and y_val, classes (names), superclass "
    "(one for each class) or coarse_train (one for each training image), superclasses (names)"
)


def read_npz(path: str | Path) -> Dataset:
    """Read a ``.npz`` file; nothing in it is executed.

    Args:
        path: a file with ``x_train``, ``y_train``, ``x_test``, ``y_test``: images uint8 (N, H, W),
            (N, H, W, 3) or (N, 3, H, W), and integer labels (N). Optionally ``x_val``, ``y_val``;
            ``classes``, their names; ``superclass``, that of each class, or ``coarse_train``, that
            of each training image; ``superclasses``, their names.

    Returns:
        A dataset in memory.

    Example:
        >>> import numpy, tempfile
        >>> x, y = numpy.zeros((4, 8, 8), numpy.uint8), numpy.array([0, 0, 1, 1])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     numpy.savez(f"{folder}/toy.npz", x_train=x, y_train=y, x_test=x, y_test=y)
        ...     read_npz(f"{folder}/toy.npz").counts
        tensor([2, 2])
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    content = read_plain_arrays(path)
    lacking = [n for n in ("x_train", "y_train", "x_test", "y_test") if n not in content]
    if lacking:
        raise ValueError(
            f"{path} lacks {', '.join(lacking)}: expected {LAYOUT}; found {', '.join(content)}"
        )
    try:
        return _dataset(path, content)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{path}: {error}") from error


def _dataset(path: Path, content: Mapping[str, Any]) -> Dataset:
    keys = {"train": "train", "validation": "val", "test": "test"}
    splits = {name: _split(content, key) for name, key in keys.items() if f"x_{key}" in content}
    names = class_names(
        [split.labels for split in splits.values()],
        _names(content, "classes", sum(map(len, splits.values())), "images"),
    )
    coarse = _superclasses(content, splits["train"].labels, len(names))
    record = {"name": path.stem, "format": "npz", "path": str(path)}
    return Dataset(path.stem, classes=names, superclasses=coarse, record=record, **splits)


def _split(content: Mapping[str, Any], key: str) -> Split:
    x, y = f"x_{key}", f"y_{key}"
    if y not in content:
        raise ValueError(f"there is {x}, but no {y}")
    images = as_images(content[x], x)
    if not len(images):
        raise ValueError(f"{x} is empty, expected at least one image")
    return Split(images, as_labels(content[y], y, len(images), "images"))


def _names(content: Mapping[str, Any], key: str, most: int, what: str) -> tuple[str, ...] | None:
    """An array of names, if there is one that is not longer than there are images or classes."""
    array = content.get(key)
    if array is None:
        return None
    if array.ndim != 1 or len(array) > most:
        raise ValueError(
            f"{key} must be a list of at most {most} names, the number of {what}, got shape "
            f"{array.shape}"
        )
    return tuple(str(name) for name in array)


def class_names(labels: Sequence[Tensor], names: Sequence[Any] | None = None) -> tuple[str, ...]:
    """The names of classes, by default the labels; error if these have gaps.

    Without gaps there are no more classes than labels: nothing is as large as a wrong label.

    Example:
        >>> class_names([torch.tensor([0, 2]), torch.tensor([1])])
        ('0', '1', '2')
        >>> class_names([torch.tensor([0, 10**12])])
        Traceback (most recent call last):
        ...
        ValueError: labels must be 0, 1, 2, … without gaps; there are 2 different labels, ...
    """
    if names is not None:
        return tuple(str(name) for name in names)
    found: Tensor = torch.cat(list(labels)).unique()  # type: ignore[no-untyped-call]
    if not len(found):
        raise ValueError("there are no labels, expected at least one")
    lowest, highest = int(found[0]), int(found[-1])
    if lowest != 0 or highest != len(found) - 1:
        raise ValueError(
            f"labels must be 0, 1, 2, … without gaps; there are {len(found)} different labels, "
            f"from {lowest} to {highest}: number the classes anew, or name all of them"
        )
    return tuple(str(label) for label in range(len(found)))


def as_images(array: Any, name: str = "images") -> Tensor:
    """Images of a NumPy array or tensor as (N, channels, H, W)."""
    images = _tensor(array, name, (torch.uint8,), "uint8, 0 to 255")
    if images.dim() == 3:
        return images.unsqueeze(1)
    if images.dim() == 4 and images.shape[3] in (1, 3):
        return images.movedim(3, 1).contiguous()
    if images.dim() == 4 and images.shape[1] in (1, 3):
        return images
    raise ValueError(
        f"{name} must have shape (N, H, W), (N, H, W, 3) or (N, 3, H, W), got {tuple(images.shape)}"
    )


def as_labels(
    array: Any, name: str = "labels", number: int | None = None, of: str = "images"
) -> Tensor:
    """Labels of a NumPy array, tensor or list as int64 (N), as many as there must be."""
    labels = _tensor(array, name, INTEGERS, "integers")
    if labels.dim() == 2 and labels.shape[1] == 1:
        labels = labels.squeeze(1)
    if number is not None and labels.shape != (number,):  # before it takes eight times its size
        raise ValueError(
            f"{name} must have one label for each of the {number} {of}, got shape "
            f"{tuple(labels.shape)}"
        )
    return labels.long()


def _tensor(array: Any, name: str, kinds: Sequence[torch.dtype], expected: str) -> Tensor:
    try:
        tensor = torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError) as error:  # strings, foreign byte order, …
        given = getattr(array, "dtype", type(array).__name__)
        raise TypeError(f"{name} must be {expected}, got {given}") from error
    if tensor.dtype not in kinds:
        raise TypeError(f"{name} must be {expected}, got {tensor.dtype}")
    return tensor


def superclass_of_class(coarse: Tensor, fine: Tensor, classes: int) -> Tensor:
    """The superclass of each class, (C), from those of samples; error if they contradict."""
    check_range("training labels", fine, classes)
    found = torch.zeros(classes, dtype=torch.int64)
    found[fine] = coarse
    wrong = (found[fine] != coarse).nonzero()
    if len(wrong):
        label = int(fine[wrong[0]])
        raise ValueError(f"class {label} comes with more than one superclass")
    return found


def _superclasses(
    content: Mapping[str, Any], labels: Tensor, classes: int
) -> dict[str, Superclasses]:
    if "superclass" in content:
        of_class = as_labels(content["superclass"], "superclass", classes, "classes")
    elif "coarse_train" in content:
        coarse = as_labels(content["coarse_train"], "coarse_train", len(labels), "training images")
        of_class = superclass_of_class(coarse, labels, classes)
    else:
        return {}
    check_range("superclasses", of_class, classes)
    names = _names(content, "superclasses", classes, "classes")
    if names is None:
        names = tuple(str(number) for number in range(int(of_class.max()) + 1))
    return {"coarse": Superclasses(names, of_class)}
