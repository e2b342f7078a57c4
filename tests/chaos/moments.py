"""When an accident happens inside a command: at its n-th Python call, or at its n-th file.

Both are the same for every repetition of a run, or nearly so, which a clock is not.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Act = Callable[[], object]
FILE_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.truncate")


def at_calls(acts: Mapping[int, Act]) -> None:
    """Act at these calls and returns of functions, counted from here in this thread."""
    left = sorted(acts, reverse=True)
    count, me = 0, os.getpid()

    def profile(*_: Any) -> None:
        nonlocal count
        count += 1
        if count < left[-1]:
            return
        if os.getpid() != me:  # a process that was forked meanwhile
            sys.setprofile(None)
            return
        act = acts[left.pop()]
        if not left:
            sys.setprofile(None)
        act()

    sys.setprofile(profile)


def at_file(folder: Path, number: int, act: Act, delay: float = 0.0) -> None:
    """Act when so many files in a folder were opened, renamed or removed, or a moment later."""
    left, me = number, os.getpid()

    def later() -> None:
        time.sleep(delay)
        act()

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event not in FILE_EVENTS or left < 0 or os.getpid() != me:
            return
        if not isinstance(arguments[0], str | Path) or not str(arguments[0]).startswith(
            str(folder)
        ):
            return
        left -= 1
        if left < 0:
            if delay:
                threading.Thread(target=later, daemon=True).start()
            else:
                act()

    sys.addaudithook(audit)


def count_moments(folder: Path, record: Path) -> None:
    """Count calls and files of this command, and record both when it ends."""
    import atexit

    calls = files = 0

    def profile(*_: Any) -> None:
        nonlocal calls
        calls += 1

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal files
        if event in FILE_EVENTS and str(arguments[0]).startswith(str(folder)):
            files += 1

    atexit.register(lambda: record.write_text(f"{calls} {files}"))
    sys.addaudithook(audit)
    sys.setprofile(profile)
