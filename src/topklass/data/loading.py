"""One function for all data: a name, or a path whose format is recognised."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

from topklass._checks import did_you_mean
from topklass.data import arrays, folder
from topklass.data.cifar import LAYOUTS, find_cifar, read_cifar
from topklass.data.dataset import Dataset
from topklass.data.glyphs import glyphs

BUILT_IN: dict[str, Callable[..., Dataset]] = {"glyphs": glyphs}

FORMATS = {
    "glyphs": "built in: characters of many scripts, drawn from the fonts inside matplotlib",
    **{f"a folder {layout}": "CIFAR, as downloaded and unpacked" for layout in LAYOUTS},
    "an image folder": folder.LAYOUT,
    "a file .npz": arrays.LAYOUT,
}
"""What :func:`load` knows, with a line on each."""


def load(source: str | Path, **options: Any) -> Dataset:
    """A dataset by its name, or from a path whose format is recognised.

    Args:
        source: "glyphs", or the path of a folder of CIFAR (pickles or binary), of an image folder
            or of a ``.npz`` file.
        **options: passed on, see :func:`topklass.data.glyphs`; data on disk has none.

    Returns:
        The dataset.

    Example:
        >>> load("glyph")
        Traceback (most recent call last):
        ...
        FileNotFoundError: there is no data 'glyph'. Did you mean 'glyphs'? ...
    """
    built_in = BUILT_IN.get(str(source))
    known = [] if built_in is None else list(signature(built_in).parameters)
    unknown = [name for name in options if name not in known]
    if unknown:
        listed = ", ".join(known) or "there are none"
        raise TypeError(f"{source} has no option {', '.join(unknown)}; options: {listed}")
    return _reader(Path(source))(source) if built_in is None else built_in(**options)


def _reader(path: Path) -> Callable[..., Dataset]:
    """What reads the format of the path."""
    if path.suffix == ".npz":
        return arrays.read_npz
    if path.is_dir():
        if find_cifar(path) is not None:
            return read_cifar
        if folder.is_image_folder(path):
            return folder.read_image_folder
        raise FileNotFoundError(
            f"the format of the folder {path} is unknown: it has {folder.found_in(path)}; images "
            f"must be sorted into train/<class>/ and test/<class>/. {_known()}"
        )
    meant = did_you_mean(str(path), BUILT_IN) or " It is neither a name nor a path."
    raise FileNotFoundError(f"there is no data {str(path)!r}.{meant} {_known()}")


def _known() -> str:
    lines = "".join(f"\n  {name}: {text}" for name, text in FORMATS.items())
    return f"There is:{lines}"
