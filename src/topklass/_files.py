"""Atomic files, and folders locked by one process.

A crash, a full disk or a second process never destroys the last good file.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

PART = ".part"
"""Ends the name of a file that is not complete."""
ADVICE = {
    errno.ENOSPC: "free some space on that disk",
    errno.EDQUOT: "free some of your quota on that disk",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EACCES: "choose another folder, or change its permissions",
    errno.EROFS: "choose a folder on a disk that is not read-only",
}
"""What to do if a file cannot be written."""


class WriteError(OSError):
    """A file could not be written; the message names it, says why, and what to do."""


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file beside the old one, and put it in its place when it is complete."""
    part = path.with_name(f"{path.name}.{os.getpid()}{PART}")
    try:
        with part.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink()
        if isinstance(error, OSError):
            advice = ADVICE.get(error.errno or 0, "see whether that disk works")
            reason = error.strerror or error
            raise WriteError(f"cannot write {path}: {reason}; {advice}") from error
        raise


def remove_parts(folder: Path) -> None:
    """Remove what processes that were killed had begun to write; the folder has to be locked."""
    for part in folder.glob(f"*{PART}"):
        with suppress(OSError):  # another process has it open, where there are no locks
            part.unlink()


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder until the block ends; other processes get an error.

    The folder is created if necessary and removed if it stays empty. The lock is released when the
    process ends. Without file locks (Windows, some network drives), there is no lock.

    Example:
        >>> from tempfile import mkdtemp
        >>> with lock_folder(Path(mkdtemp()) / "runs" / "first"):
        ...     pass
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    check_writable(folder)
    try:
        with _locked(folder):
            yield
    finally:
        with suppress(OSError):  # the first that is not empty
            for each in made:
                each.rmdir()


def check_writable(folder: Path) -> None:
    """Require a folder that files can be written into; it is created if necessary."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file: choose a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise PermissionError(
            f"cannot write into {folder}: {error.strerror}; choose another folder"
        ) from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:
        yield
        return
    place = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"another process works in {folder}: wait until it has ended, or choose another "
                "folder"
            ) from None
        except OSError:  # a drive without locks
            pass
        yield
    finally:
        with suppress(OSError):  # also of processes that were forked meanwhile
            fcntl.flock(place, fcntl.LOCK_UN)
        os.close(place)
