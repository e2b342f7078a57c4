"""How large a file may become when it is decoded: a small file must not fill the memory."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "TOPKLASS_MAX_DECODED_MIB"
DEFAULT = 512
MIB = 2**20


class LimitError(ValueError):
    """A file is too large when it is decoded, or the limit is no number."""


def decoded_limit() -> int:
    """Bytes that a file may become: ``$TOPKLASS_MAX_DECODED_MIB`` mebibytes, 512 by default."""
    given = os.environ.get(VARIABLE) or str(DEFAULT)
    if not (given.isascii() and given.isdigit()) or not int(given):
        raise LimitError(f"{VARIABLE} must be a number of MiB, for example 2048, got {given!r}")
    return int(given) * MIB


def check_decoded_size(path: str | Path, size: int, growth: int = 0) -> None:
    """Require that a file is not out of proportion when it is decoded.

    Args:
        path: the file.
        size: its decoded size in bytes.
        growth: how many times its own size it may become, if that is more than the limit.
    """
    own = os.stat(path).st_size
    allowed = max(decoded_limit(), growth * own)
    if size > allowed:
        raise too_large(path, f"{-(-size // MIB):,} MiB", allowed)


def too_large(path: str | Path, size: str, allowed: int) -> LimitError:
    """The error of a file of that decoded size, in words."""
    return LimitError(
        f"{os.fspath(path)} takes {size} when it is decoded, which is more than "
        f"{allowed // MIB:,} MiB; if you trust the file, set the environment variable {VARIABLE} "
        "to a larger number of MiB"
    )
