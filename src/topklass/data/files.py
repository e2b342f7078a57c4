"""Pictures in files, read with Pillow when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from os import fsdecode, fsencode, fspath
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from topklass.data._extras import extra

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".tif", ".tiff", ".webp")


def is_image_name(name: str) -> bool:
    """Whether a file is an image by its name; hidden files are not, which some systems leave.

    Example:
        >>> is_image_name("Rosa.JPG"), is_image_name("._Rosa.JPG"), is_image_name("labels.txt")
        (True, False, False)
    """
    return not name.startswith(".") and name.lower().endswith(SUFFIXES)


class ImageFiles:
    """A sequence of RGB pictures, each read from its file when it is asked for.

    The names are kept in one piece. Processes that read pictures share its memory; a list of
    millions of strings would be copied into each of them, little by little, as Python counts
    references.

    Args:
        paths: the files.

    Example:
        >>> ImageFiles(["a.png", "b/c.jpg"]).take(torch.tensor([1])).paths
        ['b/c.jpg']
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        names = [fsencode(path) for path in paths]
        self._names = b"".join(names)
        self._bounds = torch.tensor([0, *accumulate(map(len, names))])

    @property
    def paths(self) -> list[str]:
        """The files."""
        bounds = pairwise(self._bounds.tolist())
        return [fsdecode(self._names[begin:end]) for begin, end in bounds]

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: int) -> Any:
        index = range(len(self))[index]
        begin, end = self._bounds[index : index + 2].tolist()
        return read_image(fsdecode(self._names[begin:end]))

    def take(self, indices: Tensor) -> ImageFiles:
        """Those at the indices."""
        paths = self.paths
        return ImageFiles([paths[index] for index in indices.tolist()])


def read_image(path: str | Path) -> Any:
    """The picture in a file as a Pillow image in RGB; the error of an unreadable one names it."""
    image = extra("PIL.Image")
    try:
        with image.open(path) as picture:
            return eight_bits(picture).convert("RGB")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no image {fspath(path)}") from error
    except (OSError, SyntaxError, ValueError, image.DecompressionBombError) as error:
        raise ValueError(f"{fspath(path)} cannot be read as an image: {error}") from error


def eight_bits(picture: Any) -> Any:
    """A picture with 16 bits per pixel reduced to 8, where Pillow would clip; others unchanged."""
    if not picture.mode.startswith("I;16"):
        return picture
    return picture.convert("I").point(lambda value: value * (1 / 256)).convert("L")
