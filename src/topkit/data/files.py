"""Pictures in files, read with Pillow when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from os import fspath
from pathlib import Path
from typing import Any

from torch import Tensor

from topkit.data._extras import extra

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".tif", ".tiff", ".webp")


class ImageFiles:
    """A sequence of RGB pictures, each read from its file when it is asked for.

    Args:
        paths: the files.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self.paths = [fspath(path) for path in paths]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return read_image(self.paths[index])

    def take(self, indices: Tensor) -> ImageFiles:
        """Those at the indices."""
        return ImageFiles([self.paths[index] for index in indices.tolist()])


def read_image(path: str | Path) -> Any:
    """The picture in a file as a Pillow image in RGB; the error of an unreadable one names it."""
    image = extra("PIL.Image")
    try:
        with image.open(path) as picture:
            return picture.convert("RGB")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no image {fspath(path)}") from error
    except (OSError, SyntaxError, ValueError, image.DecompressionBombError) as error:
        raise ValueError(f"{fspath(path)} cannot be read as an image: {error}") from error
