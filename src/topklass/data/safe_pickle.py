"""Reads the pickles of CIFAR without executing them.

A pickle names functions and calls them. Here every name that these files need stands for a
function or a class of this module, which only keeps what it is given; any other name is an error.
"""

from __future__ import annotations

import pickle
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class _Kind:
    """In place of ``numpy.dtype``: its name."""

    def __init__(self, name: str | bytes, *_: object) -> None:
        self.name = name.decode("latin1") if isinstance(name, bytes) else name

    def __setstate__(self, state: object) -> None:
        """Byte order and fields, which single bytes do not have."""


class _Array:
    """In place of ``numpy.ndarray``: shape, type and bytes."""

    def __setstate__(self, state: tuple[int, tuple[int, ...], _Kind, bool, bytes]) -> None:
        _, self.shape, self.kind, self.column_major, self.content = state

    def tensor(self) -> Tensor:
        """The array as a tensor, if it is one of bytes in the usual order."""
        if self.kind.name not in ("u1", "|u1") or self.column_major:
            raise ValueError(f"an array must hold uint8 by rows, found {self.kind.name!r}")
        if prod(self.shape) != len(self.content):
            raise ValueError(f"an array of {self.shape} cannot have {len(self.content)} bytes")
        return torch.frombuffer(bytearray(self.content), dtype=torch.uint8).reshape(self.shape)


def _reconstruct(*_: object) -> _Array:
    """In place of NumPy's function that makes an empty array."""
    return _Array()


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """In place of ``_codecs.encode``: how Python 3 writes bytes for Python 2."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes must be written as latin1, found {encoding!r}")
    return text.encode("latin1")


_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Kind,
    ("_codecs", "encode"): _encode,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which is not executed: "
                "only arrays of bytes, numbers, strings, lists and dictionaries are read"
            )
        return _KNOWN[module, name]


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary in a pickle of arrays, numbers and strings; arrays come as tensors.

    Raises:
        ValueError: the file is corrupt or truncated, or asks for anything else.
    """
    try:
        with open(path, "rb") as file:
            content = _plain(_Reader(file, encoding="bytes").load())
    except OSError:
        raise
    except Exception as error:  # what a corrupt pickle raises can be anything
        raise ValueError(f"{path} is corrupt, or not a file of CIFAR: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a dictionary, found {type(content).__name__}")
    return content


def _plain(value: object) -> Any:
    """Strings for bytes and tensors for arrays, also in lists and dictionaries."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, _Array):
        return value.tensor()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return value
