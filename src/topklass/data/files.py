"""Pictures in files, read with Pillow when they are asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate, pairwise
from os import fsdecode, fsencode, fspath
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from topklass._extras import extra
from topklass.data.limits import LimitError, check_decoded_size, decoded_limit, too_large

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".tif", ".tiff", ".webp")
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
"""Pillow knows more, and starts Ghostscript for one of them, whatever the file is called."""
BYTES_PER_PIXEL = 3


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
    _raise_limit_of_pillow(image)
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe would wait forever
            raise ValueError("it is not a file")
        with image.open(path, formats=FORMATS) as picture:
            check_decoded_size(path, BYTES_PER_PIXEL * picture.width * picture.height)
            return eight_bits(picture).convert("RGB")
    except LimitError:
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no image {fspath(path)}") from error
    except image.DecompressionBombError as error:
        raise too_large(path, "too much memory", decoded_limit()) from error
    except Exception as error:  # what a corrupt file raises can be anything
        reason = str(error) or type(error).__name__
        raise ValueError(f"{fspath(path)} cannot be read as an image: {reason}") from error


def _raise_limit_of_pillow(image: Any) -> None:
    """Let Pillow read what our limit allows; the default limits are the same.

    Pillow raises an error at twice the number that it warns at.
    """
    warned_at = decoded_limit() // BYTES_PER_PIXEL // 2
    if image.MAX_IMAGE_PIXELS is not None:
        image.MAX_IMAGE_PIXELS = max(warned_at, image.MAX_IMAGE_PIXELS)


def eight_bits(picture: Any) -> Any:
    """A picture with 16 bits per pixel reduced to 8, where Pillow would clip; others unchanged."""
    if not picture.mode.startswith("I;16"):
        return picture
    return picture.convert("I").point(lambda value: value * (1 / 256)).convert("L")
