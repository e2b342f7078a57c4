"""Files with small changes, and values of any kind."""

from collections.abc import Callable, Sequence

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

LARGE = (0, 1, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 10**12)
NUMBERS = [
    number.to_bytes(width, order)
    for number in LARGE
    for width in (4, 8)
    for order in ("little", "big")
    if number < 256**width
]
Edit = tuple[str, int, int, bytes]
EDITS = ("flip", "overwrite", "insert", "delete", "repeat", "cut")


def edited(content: bytes, edits: Sequence[Edit]) -> bytes:
    """The content after all edits."""
    for kind, where, length, new in edits:
        at = where % (len(content) + 1)
        begin, end = content[:at], content[at:]
        if kind == "flip" and end:
            content = begin + bytes([end[0] ^ (1 << length % 8)]) + end[1:]
        elif kind == "overwrite":
            content = begin + new + end[len(new) :]
        elif kind == "insert":
            content = begin + new + end
        elif kind == "delete":
            content = begin + end[length:]
        elif kind == "repeat":
            content = begin + end[:length] + end
        elif kind == "cut":
            content = begin
    return content


def edits(most: int = 6) -> SearchStrategy[list[Edit]]:
    """Some edits; cuts are rare, they hide what others do."""
    kind = st.sampled_from(EDITS[:-1] * 4 + EDITS[-1:])
    new = st.sampled_from(NUMBERS) | st.binary(max_size=8)
    place = st.integers(0, 300) | st.integers(0, 2**20)
    return st.lists(st.tuples(kind, place, st.integers(0, 64), new), min_size=1, max_size=most)


def mutated(originals: Sequence[bytes]) -> SearchStrategy[bytes]:
    """One of the files, a little changed."""
    return st.builds(edited, st.sampled_from(originals), edits())


def one_replaced(
    originals: dict[str, bytes], new: Callable[[str], SearchStrategy[bytes]]
) -> SearchStrategy[dict[str, bytes]]:
    """A folder of files, one of which is another."""
    return st.sampled_from(sorted(originals)).flatmap(
        lambda name: new(name).map(lambda content: {**originals, name: content})
    )


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from((*LARGE, -1, 10**20, -(10**20), 10**400))
    | st.floats()
    | st.text(max_size=8)
)
PLAIN = st.recursive(
    LEAVES,
    lambda each: (
        st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=5), each, max_size=4)
    ),
    max_leaves=8,
)
"""What JSON and YAML can hold."""
