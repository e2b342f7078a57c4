"""Folders of CIFAR: pickles of anything, programs of the pickle machine, binary files."""

import os
import pickle
import pickletools
import struct
from typing import Any

import numpy as np
from hypothesis import strategies as st

from .judge import TRACE
from .mutations import LARGE, edited, edits, mutated, one_replaced
from .pickle_bombs import BOMBS

NAMES = [f"class {index}" for index in range(4)]


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


CALLS = st.sampled_from(
    [
        Call(os.system, f"touch {TRACE}"),
        Call(os.mkdir, TRACE),
        Call(exec, f"open({TRACE!r}, 'w')"),
        Call(eval, f"open({TRACE!r}, 'w')"),
        Call(getattr, os, "system"),
        Call(np.load, TRACE),
    ]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.sampled_from((*LARGE, 10**30))
    | st.floats()
    | st.binary(max_size=9)
    | st.text(max_size=9)
    | st.sampled_from([np.zeros((2, 3072), np.uint8), np.zeros(3), np.zeros((), np.uint8)])
)
KEYS = st.sampled_from(["data", "fine_labels", "coarse_labels", "labels", "fine_label_names"])
OBJECTS = st.recursive(
    LEAVES | CALLS,
    lambda each: (
        st.lists(each, max_size=4)
        | st.dictionaries(KEYS | KEYS.map(str.encode) | st.integers(), each, max_size=4)
        | st.tuples(each, each)
        | st.frozensets(st.integers(), max_size=3)
    ),
    max_leaves=12,
)


def content(number: int) -> dict[str, Any]:
    labels = [index % len(NAMES) for index in range(number)]
    data = np.zeros((number, 3072), np.uint8)
    return {"data": data, "fine_labels": labels, "coarse_labels": [n // 2 for n in labels]}


META = {"fine_label_names": NAMES, "coarse_label_names": ["one", "two"]}


def dumped(value: Any, protocol: int) -> bytes:
    try:
        return pickle.dumps(value, protocol)
    except Exception:  # a function that cannot be pickled under this protocol
        return b""


CHANGED = st.builds(
    lambda changes, number, protocol: dumped({**content(number), **META, **changes}, protocol),
    st.dictionaries(st.sampled_from([*content(1), *META]), OBJECTS, max_size=2),
    st.integers(0, 8),
    st.integers(0, 5),
)
WORDS = (
    b"numpy\nndarray\n",
    b"numpy\ndtype\n",
    b"_codecs\nencode\n",
    b"os\nsystem\n",
    b"numpy.core.multiarray\n_reconstruct\n",
    b"builtins\nexec\n",
    b"12\n",
    b"'data'\n",
    b"\n",
)
ARGUMENTS = (
    st.sampled_from([*WORDS, b"\x00", b"\x01", b"\x04data", b"\x02u1"])
    | st.sampled_from(LARGE).map(lambda number: struct.pack("<Q", number))
    | st.sampled_from(LARGE).map(lambda number: struct.pack("<I", number % 2**32))
    | st.binary(max_size=9)
)
STEPS = st.builds(
    lambda code, argument: code.code.encode("latin1") + (argument if code.arg else b""),
    st.sampled_from(pickletools.opcodes),
    ARGUMENTS,
)
PROGRAMS = st.lists(STEPS, max_size=40).map(lambda steps: b"\x80\x04}(" + b"".join(steps) + b"u.")
FOLDERS = {
    "pickles": {
        **{name: dumped(content(8), 2) for name in ("train", "test")},
        "meta": dumped(META, 2),
    },
    "binary": {
        "train.bin": bytes([0, 0, *[0] * 3072, 1, 2, *[0] * 3072]),
        "test.bin": bytes([0, 0, *[0] * 3072]),
        "fine_label_names.txt": b"a b c",
        "coarse_label_names.txt": b"one two",
    },
    "cifar10": {
        **{
            f"data_batch_{n}": dumped({"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1]}, 2)
            for n in range(1, 6)
        },
        "test_batch": dumped({"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1]}, 2),
        "batches.meta": dumped({"label_names": ["a", "b"]}, 2),
    },
}
NEW = (
    CHANGED
    | PROGRAMS
    | st.builds(dumped, OBJECTS, st.integers(0, 5))
    | st.builds(edited, CHANGED, edits())
    | st.sampled_from(list(BOMBS.values()))
    | mutated(list(BOMBS.values()))
)
FILES = st.sampled_from(sorted(FOLDERS)).flatmap(
    lambda kind: one_replaced(
        FOLDERS[kind],
        lambda name: (
            mutated([FOLDERS[kind][name]])
            if kind == "binary"
            else NEW | mutated([FOLDERS[kind][name]])
        ),
    )
)
