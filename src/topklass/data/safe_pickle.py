"""Reads the pickles of CIFAR without executing them.

A pickle names functions and calls them. Here every name that these files need stands for a class
of this module, which only keeps what it is given; any other name is an error.

A small pickle can also describe much: an object in a thousand places, or the billionth entry of a
table. So an object is converted once, an array only when it is asked for, and the table is the
dictionary of the reader that Python has in Python.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor


class _Bytes:
    """In place of ``_codecs.encode``, how Python 3 writes bytes for Python 2: its text."""

    def __init__(self, text: str, encoding: str = "latin1") -> None:
        if not isinstance(text, str) or encoding != "latin1":
            raise pickle.UnpicklingError("bytes must be written as latin1")
        self.text = text


class _Kind:
    """In place of ``numpy.dtype``: its name."""

    def __init__(self, name: str | bytes, *_: object) -> None:
        self.name = name.decode("latin1") if isinstance(name, bytes) else name

    def __setstate__(self, state: object) -> None:
        """Byte order and fields, which single bytes do not have."""


class _Array:
    """In place of ``numpy.ndarray``, and of NumPy's function that makes an empty one."""

    def __init__(self, *_: object) -> None:
        self.shape: Any = ()
        self.kind: Any = None
        self.by_columns: Any = False
        self.content: Any = b""

    def __setstate__(self, state: tuple[int, Any, Any, Any, Any]) -> None:
        _, self.shape, self.kind, self.by_columns, self.content = state


_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Kind,
    ("_codecs", "encode"): _Bytes,
}
_BUILD: Any = pickle._Unpickler.dispatch[pickle.BUILD[0]]
_REFUSED = b"".join(
    [
        *(pickle.EMPTY_SET, pickle.FROZENSET, pickle.BYTEARRAY8, pickle.NEWOBJ, pickle.NEWOBJ_EX),
        *(pickle.EXT1, pickle.EXT2, pickle.EXT4),
    ]
)


class _Table(dict[Any, Any]):
    """A dictionary by strings: the hash of a tuple of tuples of … may take forever."""

    def __setitem__(self, key: object, value: object) -> None:
        if not isinstance(key, str | bytes | _Bytes):
            raise pickle.UnpicklingError(f"keys must be strings, found {type(key).__name__}")
        super().__setitem__(key, value)


class _Reader(pickle._Unpickler):
    stack: list[Any]
    append: Any
    pop_mark: Any

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(
                f"it asks for {module[:80]}.{name[:80]}, which is not executed: "
                "only arrays of bytes, numbers, strings, lists and dictionaries are read"
            )
        return _KNOWN[module, name]

    def load_dictionary(self) -> None:
        self.append(_Table())

    def load_items(self) -> None:
        items, table = self.pop_mark(), _Table()
        for key, value in zip(items[::2], items[1::2], strict=True):
            table[key] = value
        self.append(table)

    def load_state(self) -> None:
        if not isinstance(self.stack[-2], _Array | _Kind):
            self.refuse()
        _BUILD(self)

    def refuse(self) -> NoReturn:
        raise pickle.UnpicklingError("it has objects that no file of CIFAR has")

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.EMPTY_DICT[0]: load_dictionary,
        pickle.DICT[0]: load_items,
        pickle.BUILD[0]: load_state,
        **dict.fromkeys(_REFUSED, refuse),
    }


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary in a pickle of arrays, numbers and strings; :func:`as_tensor` reads arrays.

    Raises:
        ValueError: the file is corrupt or truncated, or asks for anything else.
    """
    with open(path, "rb") as file:
        try:
            content = _plain(_Reader(file, encoding="bytes").load(), {})
        except Exception as error:  # what a corrupt pickle raises can be anything
            reason = str(error) or type(error).__name__
            raise ValueError(f"{path} is corrupt, or not a file of CIFAR: {reason}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a dictionary, found {type(content).__name__}")
    return content


def as_tensor(value: object) -> Tensor:
    """An array of a pickle as a tensor, if it is a table of bytes in the usual order."""
    if not isinstance(value, _Array):
        raise ValueError(f"there must be an array, found {type(value).__name__}")
    kind, shape, content = value.kind, value.shape, value.content
    if not isinstance(kind, _Kind) or kind.name not in ("u1", "|u1") or value.by_columns:
        raise ValueError("an array must hold uint8 by rows")
    if isinstance(content, _Bytes):
        content = content.text.encode("latin1")
    if not isinstance(shape, tuple) or [type(side) for side in shape] != [int, int]:
        raise ValueError("an array must have two dimensions")
    if not isinstance(content, bytes) or shape[0] * shape[1] != len(content):
        raise ValueError(f"an array of {shape} cannot have {len(content)} bytes")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(shape)


def _plain(value: object, done: dict[int | str, Any]) -> Any:
    """Strings for bytes, also in lists and dictionaries; what occurs twice is converted once."""
    key = value.text if isinstance(value, _Bytes) else id(value)
    if key not in done:
        done[key] = _converted(value, done)
    return done[key]


def _converted(value: object, done: dict[int | str, Any]) -> Any:
    if isinstance(value, _Bytes):
        return value.text.encode("latin1").decode()
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list):
        return [_plain(item, done) for item in value]
    if isinstance(value, dict):
        return {_plain(key, done): _plain(item, done) for key, item in value.items()}
    return value
