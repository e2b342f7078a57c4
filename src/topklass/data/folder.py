"""Image folders: a folder for each split, in it one for each class (ImageNet, Pl@ntNet-300K)."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from topklass.data.dataset import Dataset, Split
from topklass.data.files import SUFFIXES, ImageFiles, is_image_name

NAMES = {
    "train": ("train", "images_train"),
    "validation": ("val", "validation", "valid", "images_val"),
    "test": ("test", "images_test"),
}
SHOWN = 5
LAYOUT = (
    "train/<class>/*.jpg, val/<class>/*.jpg and test/<class>/*.jpg, of which one of val and "
    "test may be missing, also in a folder 'images'"
)


def read_image_folder(root: str | Path) -> Dataset:
    """Read an image folder: ``root/train/<class>/*.jpg``, the same for ``val`` and ``test``.

    Without a folder ``test``, ``val`` is the test set, as is usual with ImageNet. The folders may
    also be called ``images_train`` and so on, or be in ``root/images`` (Pl@ntNet-300K). Classes are
    the names of the folders, sorted, and must be the same in all splits.

    Args:
        root: the folder.

    Returns:
        A dataset of files that are read on demand.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as name:
        ...     for split in ("train", "test"):
        ...         for each in ("cat", "dog"):
        ...             folder = Path(name, split, each)
        ...             folder.mkdir(parents=True)
        ...             Image.new("RGB", (8, 8)).save(folder / "1.png")
        ...     read_image_folder(name).classes
        ('cat', 'dog')
    """
    root = Path(root)
    folders = _split_folders(root)
    if "train" not in folders or len(folders) == 1:
        raise FileNotFoundError(
            f"{root} is not an image folder: expected {LAYOUT}; found {found_in(root)}"
        )
    if "test" not in folders:
        folders["test"] = folders.pop("validation")
    classes = _classes(folders["train"])
    splits = {name: _read_split(folder, classes) for name, folder in folders.items()}
    record = {"name": root.name, "format": "image folder", "path": str(root)}
    return Dataset(
        root.name,
        splits["train"],
        splits["test"],
        classes,
        splits.get("validation"),
        record=record,
    )


def is_image_folder(root: Path) -> bool:
    """Whether the folder has one for the training images."""
    return "train" in _split_folders(root)


def found_in(root: Path) -> str:
    """What a folder has, in words, for the error of one that is not as expected."""
    with os.scandir(root) as entries:
        visible = sorted((each.name, each.is_dir()) for each in entries if each.name[0] != ".")
    folders = [name for name, is_folder in visible if is_folder]
    images = sum(is_image_name(name) for name, is_folder in visible if not is_folder)
    listed = ", ".join(folders[:SHOWN]) + (", …" if len(folders) > SHOWN else "")
    found = [f"the folders {listed}"] * bool(folders) + [f"{images} images"] * bool(images)
    return " and ".join(found) or "neither folders nor images"


def _split_folders(root: Path) -> dict[str, Path]:
    return {
        split: base / name
        for base in (root / "images", root)
        for split, names in NAMES.items()
        for name in reversed(names)
        if (base / name).is_dir()
    }


def _classes(folder: Path) -> tuple[str, ...]:
    with os.scandir(folder) as entries:
        names = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    if not names:
        raise ValueError(
            f"{folder} has no folders of classes: expected {folder}/<class>/*.jpg, found "
            f"{found_in(folder)} (the validation images of ImageNet come without them, and have to "
            "be sorted into folders first)"
        )
    return tuple(names)


def _read_split(folder: Path, classes: tuple[str, ...]) -> Split:
    found = _classes(folder)
    if found != classes:
        lacking, more = sorted({*classes} - {*found}), sorted({*found} - {*classes})
        wrong = f"lacks {lacking[0]!r}" if lacking else f"has {more[0]!r}, which train lacks"
        raise ValueError(
            f"all splits must have the same classes: {folder} {wrong} "
            f"({len(lacking)} are missing, {len(more)} are unknown)"
        )
    paths: list[str] = []
    counts = []
    for name in classes:
        files = _image_files(folder / name)
        paths += files
        counts.append(len(files))
    labels = torch.arange(len(classes)).repeat_interleave(torch.tensor(counts))
    return Split(ImageFiles(paths), labels)


def _image_files(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        files = [e.path for e in entries if is_image_name(e.name)]
    if not files:
        raise ValueError(f"{folder} has no images ({', '.join(SUFFIXES)})")
    return sorted(files)
