"""Files ``.npz``: other arrays, headers and archives that lie, bombs."""

import io
import zipfile
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from .judge import TRACE
from .mutations import LARGE, edited, edits

KEYS = (
    *("x_train", "y_train", "x_test", "y_test", "x_val", "y_val"),
    *("classes", "superclass", "coarse_train", "superclasses", "other"),
)
KINDS = (
    *("|u1", "|u1", "<i8", "<i8", "|i1", "<u2", "<u4", "<u8", ">i8", "<f8", "<f2", "|b1", "<c8"),
    *("<U3", "|S2", "<M8[s]", "|V3", "<U0"),
)


class Planted:
    """Writes a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, (f"open({TRACE!r}, 'w')",)


def valid() -> dict[str, np.ndarray]:
    return {
        "x_train": np.zeros((12, 4, 4, 3), np.uint8),
        "y_train": np.arange(12) % 4,
        "x_test": np.zeros((4, 4, 4, 3), np.uint8),
        "y_test": np.arange(4),
    }


def an_array(kind: str, shape: tuple[int, ...], values: list[int]) -> np.ndarray:
    with np.errstate(all="ignore"):
        numbers = np.resize(np.array(values, np.int64), shape)
        return numbers.astype(kind) if "V" not in kind else np.zeros(shape, kind)


VALUES = st.lists(st.integers(-1, 6) | st.sampled_from(LARGE), min_size=1, max_size=6)
ARRAYS = st.builds(
    an_array,
    st.sampled_from(KINDS),
    st.lists(st.integers(0, 5) | st.sampled_from((3, 4, 12)), max_size=4).map(tuple),
    VALUES,
) | st.just(np.array([Planted()], dtype=object))
USUAL = {
    **{key: array.shape for key, array in valid().items()},
    "x_val": (4, 4, 4, 3),
    "y_val": (4,),
    "coarse_train": (12,),
    "other": (1,),
    **dict.fromkeys(("classes", "superclass", "superclasses"), (4,)),
}


def other_array(key: str) -> SearchStrategy[tuple[str, np.ndarray | None]]:
    """Nothing, any array, or one of the usual shape with other values."""
    kind = "|u1" if key[0] == "x" else "<i8"
    usual = st.builds(an_array, st.just(kind), st.just(USUAL[key]), VALUES)
    return (st.none() | ARRAYS | usual).map(lambda array: (key, array))


CHANGES = st.lists(st.sampled_from(KEYS).flatmap(other_array), max_size=4).map(dict)
CONTENT = CHANGES.map(
    lambda changes: {n: a for n, a in (valid() | changes).items() if a is not None}
)
SHAPES = st.lists(st.integers(-2, 5) | st.sampled_from(LARGE), max_size=4).map(tuple)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array)
    return file.getvalue()


def with_header(kind: str, shape: tuple[int, ...], content: bytes) -> bytes:
    """An array whose header may lie."""
    file = io.BytesIO()
    header = {"descr": kind, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + content


@cache
def zeros(size: int) -> bytes:
    return with_header("|u1", (size,), bytes(size))


LIARS = st.builds(with_header, st.sampled_from((*KINDS, "|O")), SHAPES, st.binary(max_size=64))
BOMBS = st.sampled_from((7 * 2**20, 24 * 2**20)).map(zeros)
HEADERS = st.text("(){}[],:'dtypeshap 0123456789", max_size=200).map(
    lambda text: b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()
)
MEMBERS = st.dictionaries(
    st.sampled_from(KEYS), LIARS | HEADERS | st.binary(max_size=99) | BOMBS, max_size=2
)


def archive(members: dict[str, bytes], method: int, declared: int | None) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method, compresslevel=1) as target:
        for name, content in members.items():
            target.writestr(f"{name}.npy", content)
        if declared is not None and target.filelist:
            target.filelist[0].file_size = declared
    return file.getvalue()


def packed(arrays: dict[str, np.ndarray], members: dict[str, bytes], *rest: Any) -> bytes:
    return archive({name: npy(array) for name, array in arrays.items()} | members, *rest)


ARCHIVES = st.builds(
    packed,
    CONTENT,
    st.just({}) | MEMBERS,
    st.sampled_from((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)),
    st.none() | st.sampled_from(LARGE),
)
FILES = (ARCHIVES | st.builds(edited, ARCHIVES, edits())).map(lambda content: {"toy.npz": content})
