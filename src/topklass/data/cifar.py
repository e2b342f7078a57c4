"""CIFAR-100 and CIFAR-10 in the official folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from topklass.data.arrays import superclass_of_class
from topklass.data.dataset import Dataset, Split, Superclasses, class_counts
from topklass.data.safe_pickle import as_tensor, read_pickle

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
LAYOUTS = {
    "cifar-100-python": ("train", "test", "meta"),
    "cifar-100-binary": ("train.bin", "test.bin", "fine_label_names.txt", "coarse_label_names.txt"),
    "cifar-10-batches-py": (
        *(f"data_batch_{number}" for number in range(1, 6)),
        "test_batch",
        "batches.meta",
    ),
}


def read_cifar(folder: str | Path) -> Dataset:
    """Read an official folder of CIFAR: -100 as pickles or binary, -10 as pickles.

    Pickles are read, not executed: what they may contain is fixed.

    Args:
        folder: ``cifar-100-python``, ``cifar-100-binary`` or ``cifar-10-batches-py``, whatever its
            name is; or the folder that contains it.

    Returns:
        A dataset in memory; the coarse labels of CIFAR-100 are its superclasses "coarse".
    """
    found = find_cifar(Path(folder))
    if found is None:
        layouts = "; ".join(f"{name}: {', '.join(files)}" for name, files in LAYOUTS.items())
        raise FileNotFoundError(f"{folder} is not a folder of CIFAR, expected one of {layouts}")
    layout, root = found
    _check_complete(root, LAYOUTS[layout])
    readers = {
        "cifar-100-python": _cifar100_pickles,
        "cifar-100-binary": _cifar100_binary,
        "cifar-10-batches-py": _cifar10_pickles,
    }
    return readers[layout](root)


def find_cifar(folder: Path) -> tuple[str, Path] | None:
    """Layout and folder, if there is CIFAR in it."""
    for layout, files in LAYOUTS.items():
        for root in (folder, folder / layout):
            if (root / files[0]).is_file():
                return layout, root
    return None


def _check_complete(root: Path, files: Sequence[str]) -> None:
    lacking = [name for name in files if not (root / name).is_file()]
    if lacking:
        raise FileNotFoundError(
            f"{root} lacks {', '.join(lacking)}: expected the files {', '.join(files)}"
        )


def _cifar100_pickles(root: Path) -> Dataset:
    meta = read_pickle(root / "meta")
    fine_names = _names(meta, "fine_label_names", root / "meta")
    coarse_names = _names(meta, "coarse_label_names", root / "meta")
    images, fine, coarse = _from_pickle(root / "train", "fine_labels", "coarse_labels")
    train = Split(images, fine)
    test = Split(*_from_pickle(root / "test", "fine_labels"))
    return _cifar100(root, "cifar-100-python", train, test, coarse, fine_names, coarse_names)


def _cifar100_binary(root: Path) -> Dataset:
    fine_names, coarse_names = (
        tuple((root / f"{kind}_label_names.txt").read_text("utf-8", "replace").split())
        for kind in ("fine", "coarse")
    )
    train, coarse = _from_binary(root / "train.bin")
    test, _ = _from_binary(root / "test.bin")
    dataset = _cifar100(root, "cifar-100-binary", train, test, coarse, fine_names, coarse_names)
    for name, split in dataset.splits.items():
        counts = class_counts(split, len(fine_names))
        if counts.min() != counts.max():
            raise ValueError(
                f"{root / name}.bin is incomplete: it has from {int(counts.min())} to "
                f"{int(counts.max())} images of a class, and should have the same number of each"
            )
    return dataset


def _cifar100(
    root: Path,
    layout: str,
    train: Split,
    test: Split,
    coarse: Tensor,
    fine_names: tuple[str, ...],
    coarse_names: tuple[str, ...],
) -> Dataset:
    try:
        of_class = superclass_of_class(coarse, train.labels, len(fine_names))
        return Dataset(
            "cifar100",
            train,
            test,
            fine_names,
            superclasses={"coarse": Superclasses(coarse_names, of_class)},
            record={"name": "cifar100", "format": layout, "path": str(root)},
        )
    except ValueError as error:
        raise ValueError(f"{root} is corrupt: {error}") from error


def _cifar10_pickles(root: Path) -> Dataset:
    names = _names(read_pickle(root / "batches.meta"), "label_names", root / "batches.meta")
    batches = [_from_pickle(root / f"data_batch_{number}", "labels") for number in range(1, 6)]
    train = Split(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
    test = Split(*_from_pickle(root / "test_batch", "labels"))
    record = {"name": "cifar10", "format": "cifar-10-batches-py", "path": str(root)}
    try:
        return Dataset("cifar10", train, test, names, record=record)
    except ValueError as error:
        raise ValueError(f"{root} is corrupt: {error}") from error


def _names(meta: dict[str, Any], key: str, path: Path) -> tuple[str, ...]:
    names = meta.get(key)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path} has no list of names {key!r}; it has {', '.join(meta)}")
    return tuple(names)


def _from_pickle(path: Path, *keys: str) -> list[Tensor]:
    """Images, and the labels of each key."""
    content = read_pickle(path)
    if any(key not in content for key in ("data", *keys)):
        expected = ", ".join(("data", *keys))
        raise ValueError(f"{path} must have {expected}; it has {', '.join(content)}")
    try:
        data = as_tensor(content["data"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    labels = [_labels(content[key], key, path) for key in keys]
    if data.shape[1:] != (PIXELS,) or any(len(numbers) != len(data) for numbers in labels):
        raise ValueError(
            f"{path} must have {PIXELS} bytes of data for each of its {len(labels[0])} labels, "
            f"found shape {tuple(data.shape)}"
        )
    return [data.view(-1, *SHAPE), *labels]


def _labels(numbers: object, key: str, path: Path) -> Tensor:
    if not isinstance(numbers, list) or not all(
        type(number) is int and 0 <= number < 2**31 for number in numbers
    ):
        raise ValueError(f"{path}: {key} must be a list of class indices")
    return torch.tensor(numbers, dtype=torch.int64)


def _from_binary(path: Path) -> tuple[Split, Tensor]:
    """Images with fine labels, and coarse labels: records of 1 + 1 + 3,072 bytes."""
    content = bytearray(path.read_bytes())
    if not content or len(content) % (PIXELS + 2):
        raise ValueError(
            f"{path} is corrupt or truncated: expected records of {PIXELS + 2} bytes, found "
            f"{len(content)} bytes"
        )
    records = torch.frombuffer(content, dtype=torch.uint8).view(-1, PIXELS + 2)
    images = records[:, 2:].reshape(-1, *SHAPE)
    return Split(images, records[:, 1].long()), records[:, 0].long()
