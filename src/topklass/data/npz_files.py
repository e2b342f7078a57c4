"""Reads ``.npz`` files of plain arrays."""

from pathlib import Path
from typing import Any
from zipfile import BadZipFile
from zlib import error as zlib_error

from topklass.data._extras import extra


def read_plain_arrays(path: Path) -> dict[str, Any]:
    """All arrays of a file; a broken file, or one with objects, is a ValueError."""
    numpy = extra("numpy")
    try:
        with open(path, "rb") as file:
            content = numpy.load(file, allow_pickle=False)
            return {name: content[name] for name in content.files}
    except (ValueError, EOFError, AttributeError, BadZipFile, zlib_error) as error:
        raise ValueError(f"{path} is broken, or not a .npz of plain arrays: {error}") from error
