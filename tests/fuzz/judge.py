"""What a reader may do with a file: read it, or refuse it with an error that names it."""

import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from topklass.data.limits import MIB, VARIABLE
from topklass.train.finished import NotFinished

from .memory_peak import memory_peak

NAME = "toy"
"""Begins the name of every file, and must be in every message."""
TRACE = "/tmp/topklass-fuzz-trace"
"""What planted code would create."""
CLEAN = (ValueError, TypeError, OSError, NotFinished)
LIMIT = 8 * MIB
"""Of decoded files, instead of the default."""
SPARE = 32 * MIB
"""For Python's and Pillow's own needs."""
LONGEST = 10
"""Seconds for one file."""
LONGEST_MESSAGE = 5000
EXAMPLES = 200
"""Of a round."""
STARTS_PROGRAM = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen")

Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Target:
    """A reader, and files for it.

    Args:
        files: by their path below the folder that the reader gets.
        read: reads the folder, and uses what it has read.
        growth: how many times the size of the files may be decoded, if that is more than the limit.
        names: under which a message may speak of the files, besides their own.
    """

    files: SearchStrategy[Files]
    read: Callable[[Path], object]
    growth: int = 1
    names: tuple[str, ...] = ()


class Hang(BaseException):
    """A reader took too long; not an Exception, which readers catch."""


programs: list[str] = []
sys.addaudithook(lambda event, _: programs.append(event) if event in STARTS_PROGRAM else None)


def judge(target: Target, files: Files, folder: Path) -> None:
    """Let a reader read files, and raise an AssertionError if it misbehaves."""
    root = folder / NAME
    shutil.rmtree(root, ignore_errors=True)
    write(root, files)
    remove_trace()
    programs.clear()
    size = sum(map(len, files.values()))
    caught = None
    with memory_peak() as peak, limited_time():
        try:
            target.read(root)
        except CLEAN as error:
            caught = error
    assert not programs, f"it started a program: {programs}"
    assert not os.path.exists(TRACE), "it ran what the file says"
    allowed = 2 * max(LIMIT, target.growth * size) + SPARE
    assert peak.grown <= allowed, f"{size} bytes took {peak.grown // MIB} MiB"
    if caught is not None:
        message = str(caught)
        assert any(name in message for name in (NAME, *target.names)), (
            f"{type(caught).__name__} without the file's name: {message}"
        )
        assert len(message) < LONGEST_MESSAGE, f"a message of {len(message)} characters"


def remove_trace() -> None:
    if os.path.isdir(TRACE):
        os.rmdir(TRACE)
    Path(TRACE).unlink(missing_ok=True)


def write(root: Path, files: Files) -> None:
    root.mkdir()
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@contextmanager
def limited_time() -> Iterator[None]:
    """Raise in a block that computes, or waits, for too long."""

    def hang(*_: object) -> None:
        raise Hang(f"it took more than {LONGEST} seconds")

    numbers = (signal.SIGPROF, signal.SIGALRM)
    before = [signal.signal(number, hang) for number in numbers]
    signal.setitimer(signal.ITIMER_PROF, LONGEST)  # of the processor: others may use it, too
    signal.setitimer(signal.ITIMER_REAL, 20 * LONGEST)
    try:
        yield
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def run_rounds(
    targets: Mapping[str, Target],
    seconds: float,
    first: int = 0,
    say: Callable[[str], object] = print,
) -> tuple[Counter[str], list[str]]:
    """Rounds of all targets until the time is over, one in any case.

    Returns:
        How many files each reader was given, and a sentence on each failure.
    """
    tried: Counter[str] = Counter()
    failed: list[str] = []
    end, number = time.monotonic() + seconds, first
    while time.monotonic() < end:
        for name, target in targets.items():
            if number > first and time.monotonic() >= end:
                break
            error = run_round(target, number, lambda name=name: tried.update([name]))
            if error is not None:
                repeat = f"python -m tests.fuzz --only {name} --seed {number} --seconds 1"
                failed.append(f"{name}: {type(error).__name__}: {error!s:.2000}\n  {repeat}")
                say(failed[-1])
        number += 1
    return tried, failed


def run_round(target: Target, number: int, count: Callable[[], object]) -> BaseException | None:
    """One round with its seed; the error that it ends with, of the simplest file that causes it."""
    with TemporaryDirectory(prefix="topklass-fuzz-") as folder:

        @seed(number)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        @given(target.files)
        def each(files: Files) -> None:
            count()
            judge(target, files, Path(folder))

        try:
            with mock.patch.dict(os.environ, {VARIABLE: str(LIMIT // MIB)}):
                each()
        except (Exception, Hang) as error:
            return error
    return None
