"""Records of a run: JSON with a checksum, compared with its schema when it is read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from topklass._files import write_whole

CHECKSUM = "checksum"
REMAKE = "topklass train --resume --folder {} makes it again"
"""What to do about a broken record of a run."""
SHOWN = 300
"""Characters of what is wrong with a file."""


class BrokenFileError(ValueError):
    """A file of a run cannot be used; the message names it, and says what is wrong."""


@contextmanager
def naming(path: Path, advice: str, what: str = "is broken") -> Iterator[None]:
    """Turn whatever goes wrong in this block into one sentence.

    Args:
        path: of the file that is read.
        advice: what to do about it.
        what: is wrong with it, in general.

    Example:
        >>> with naming(Path("result.json"), "train again"):
        ...     {}["test"]
        Traceback (most recent call last):
            ...
        topklass.train.records.BrokenFileError: result.json is broken: KeyError: 'test'; train again
    """
    try:
        yield
    except (BrokenFileError, FileNotFoundError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        reason = reason if type(error) is ValueError else f"{type(error).__name__}: {reason}"
        reason = reason if len(reason) <= SHOWN else reason[:SHOWN] + "…"
        raise BrokenFileError(f"{path} {what}: {reason}; {advice}") from error


def write_json(path: Path, record: object) -> None:
    """Write something as JSON."""
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    write_whole(path, lambda file: file.write(text.encode()))


def write_record(path: Path, record: Mapping[str, object]) -> None:
    """Write a record as JSON, with a checksum of its contents."""
    write_json(path, {**record, CHECKSUM: checksum(record)})


def read_record(path: Path, schema: Any) -> dict[str, Any]:
    """Read a record.

    Args:
        path: of the file.
        schema: a ``TypedDict`` or a data class, whose members the record has to have.

    Raises:
        BrokenFileError: it is not JSON, has another checksum, or does not fit the schema.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}")
    with naming(path, REMAKE.format(path.parent)):
        record = json.loads(path.read_text(encoding="utf-8"))
        found = record.pop(CHECKSUM, None) if isinstance(record, dict) else None
        if found is not None and found != checksum(record):
            raise ValueError("its contents have changed since it was written")
        if wrong := mismatch(record, schema, "it"):
            raise ValueError(wrong)
        return cast("dict[str, Any]", record)


def checksum(record: Mapping[str, object]) -> str:
    """A hash of what a record holds."""
    text = json.dumps(record, sort_keys=True)
    return blake2b(text.encode(), digest_size=8).hexdigest()


def mismatch(value: Any, kind: Any, name: str) -> str | None:
    """What is wrong with a value of JSON, or None if it has that type.

    Example:
        >>> mismatch({"counts": [1, "2"]}, dict[str, list[int]], "it")
        "it['counts'][1] must be int, got '2'"
    """
    members = get_args(kind)
    origin = get_origin(kind)
    parts: list[tuple[Any, Any, str]] = []
    if kind is Any:
        return None
    if origin in (Union, UnionType):
        fits = any(mismatch(value, each, name) is None for each in members)
    elif origin in (list, tuple):
        fits = isinstance(value, list)
        parts = [(each, members[0], f"{name}[{i}]") for i, each in enumerate(value if fits else [])]
    elif origin is dict:
        fits = isinstance(value, dict)
        entries = value.items() if fits else ()
        parts = [(each, members[1], f"{name}[{key!r}]") for key, each in entries]
    elif hasattr(kind, "__annotations__"):  # a TypedDict or a data class
        fits = isinstance(value, dict)
        for member, its in get_type_hints(kind).items() if fits else ():
            if member not in value:
                return f"{name} has no {member!r}"
            parts.append((value[member], its, f"{name}[{member!r}]"))
    else:
        fits = type(value) in ((int, float) if kind is float else (kind,))
    if not fits:
        expected = "an object" if hasattr(kind, "__annotations__") else _written(kind)
        return f"{name} must be {expected}, got {value!r}"
    return next((wrong for part in parts if (wrong := mismatch(*part))), None)


def _written(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
