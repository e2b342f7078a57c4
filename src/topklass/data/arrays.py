"""Arrays in a ``.npz`` file: x_train, y_train, x_test, y_test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from topklass.data.dataset import Dataset, Split, Superclasses
from topklass.data.npz_files import read_plain_arrays

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
    splits = {
        name: Split(
            as_images(content[f"x_{key}"], f"x_{key}"), as_labels(content[f"y_{key}"], f"y_{key}")
        )
        for name, key in (("train", "train"), ("validation", "val"), ("test", "test"))
        if f"x_{key}" in content
    }
    number = 1 + max(int(split.labels.max()) for split in splits.values())
    names = tuple(str(name) for name in content.get("classes", range(number)))
    record = {"name": path.stem, "format": "npz", "path": str(path)}
    coarse = _superclasses(content, splits["train"].labels, len(names))
    return Dataset(path.stem, classes=names, superclasses=coarse, record=record, **splits)


def as_images(array: Any, name: str = "images") -> Tensor:
    """Images of a NumPy array or tensor as (N, channels, H, W)."""
    images = torch.as_tensor(array)
    if images.dtype != torch.uint8:
        raise TypeError(f"{name} must be uint8, 0 to 255, got {images.dtype}")
    if images.dim() == 3:
        return images.unsqueeze(1)
    if images.dim() == 4 and images.shape[3] in (1, 3):
        return images.movedim(3, 1).contiguous()
    if images.dim() == 4 and images.shape[1] in (1, 3):
        return images
    raise ValueError(
        f"{name} must have shape (N, H, W), (N, H, W, 3) or (N, 3, H, W), got {tuple(images.shape)}"
    )


def as_labels(array: Any, name: str = "labels") -> Tensor:
    """Labels of a NumPy array, tensor or list as int64 (N)."""
    labels = torch.as_tensor(array)
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(f"{name} must be integers, got {labels.dtype}")
    if labels.dim() == 2 and labels.shape[1] == 1:
        labels = labels.squeeze(1)
    return labels.long()


def superclass_of_class(coarse: Tensor, fine: Tensor, classes: int) -> Tensor:
    """The superclass of each class, (C), from those of samples; error if they contradict."""
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
        of_class = as_labels(content["superclass"], "superclass")
    elif "coarse_train" in content:
        coarse = as_labels(content["coarse_train"], "coarse_train")
        of_class = superclass_of_class(coarse, labels, classes)
    else:
        return {}
    names = content.get("superclasses", range(int(of_class.max()) + 1))
    return {"coarse": Superclasses(tuple(str(name) for name in names), of_class)}
