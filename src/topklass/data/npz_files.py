"""Reads ``.npz`` files of plain arrays."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any
from zipfile import ZipFile, ZipInfo

from topklass._extras import extra
from topklass.data.limits import LimitError, check_decoded_size

GROWTH = 100
"""How many times its own size a file may become, beyond the limit for small ones."""


def read_plain_arrays(path: Path) -> dict[str, Any]:
    """All arrays of a file; a broken file, or one with objects, is a ValueError.

    Nothing is allocated before the sizes that the file declares have been compared with each other
    and with the limit of :mod:`topklass.data.limits`.
    """
    with open(path, "rb") as file:
        try:
            with ZipFile(file) as archive:
                members = archive.infolist()
                check_decoded_size(path, sum(each.file_size for each in members), GROWTH)
                return {
                    each.filename.removesuffix(".npy"): _read_array(archive, each)
                    for each in members
                }
        except LimitError:
            raise
        except Exception as error:  # what a corrupt archive raises can be anything
            reason = str(error) or type(error).__name__
            raise ValueError(
                f"{path} is broken, or not a .npz of plain arrays: {reason}"
            ) from error


def _read_array(archive: ZipFile, member: ZipInfo) -> Any:
    npy = extra("numpy").lib.format
    headers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    with archive.open(member) as file:
        version = npy.read_magic(file)
        if version not in headers:
            raise ValueError(f"{member.filename} has the unknown version {version}")
        shape, _, kind = headers[version](file)
        if kind.hasobject:
            raise ValueError(f"{member.filename} holds objects of Python")
        declared, found = prod(shape) * kind.itemsize, member.file_size - file.tell()
        if declared != found:
            raise ValueError(
                f"{member.filename} of shape {shape} should have {declared} bytes, not {found}"
            )
    with archive.open(member) as file:
        return npy.read_array(file, allow_pickle=False)
