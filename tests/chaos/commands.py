"""The command ``topklass`` as child processes: forked from this warm one, or started cold."""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

PATIENCE = 300.0
"""Seconds after which a command hangs."""
GRACE = 10.0
"""Seconds in which a process notices that another one is gone."""


class Screen(NamedTuple):
    """What a user sees of a command that has ended."""

    codes: tuple[int, ...]
    """Of each process."""
    text: str

    @property
    def code(self) -> int:
        """That of the first process that failed."""
        return next(filter(None, self.codes), 0)


def nothing() -> None:
    """Prepare no accident."""


@dataclass
class Process:
    """A running command."""

    pid: int
    group: int
    output: int
    """Where its stdout and stderr can be read."""
    read: bytearray = field(default_factory=bytearray)

    def send(self, number: int, *, group: bool = False) -> None:
        """Send a signal, to the group as a terminal does; nothing if the process has ended."""
        with suppress(ProcessLookupError):
            os.killpg(self.group, number) if group else os.kill(self.pid, number)

    def watch(self, seconds: float, until: str | None = None) -> bool:
        """Read the screen for so long, or until it ends or shows a text; whether that happened."""
        limit = time.monotonic() + seconds
        while until is None or until.encode() not in self.read:
            left = limit - time.monotonic()
            if left <= 0 or not select.select([self.output], [], [], left)[0]:
                return False
            if not (more := os.read(self.output, 1 << 16)):
                return True
            self.read += more
        return True

    def has_failed(self) -> bool:
        """Whether it has ended, and not well; processes that it started may be there still."""
        end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return end is not None and (end.si_code != os.CLD_EXITED or end.si_status != 0)

    def wait(self) -> Screen:
        """Wait for the end; what does not end soon is killed, with everything that it started."""
        ended = self.watch(GRACE)
        code = self.kill() if not ended else os.waitpid(self.pid, 0)[1]
        self.pid = 0
        os.close(self.output)
        hung = "" if ended else "\nthe command hangs"
        code = os.waitstatus_to_exitcode(code)
        return Screen((code,), self.read.decode(errors="replace") + hung)

    def kill(self) -> int:
        """End it if it has not ended, with its group."""
        if not self.pid:
            return 0
        self.send(signal.SIGKILL, group=True)
        return os.waitpid(self.pid, 0)[1]


def start(
    arguments: Sequence[str],
    prepare: Callable[[], None] = nothing,
    *,
    environment: Mapping[str, str] | None = None,
    group: int = 0,
) -> Process:
    """Fork a child that prepares an accident and then is ``topklass ARGUMENTS``."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.setpgid(pid, group or pid)
        os.close(writer)
        return Process(pid, group or pid, reader)
    code = 1
    try:
        os.setpgid(0, group or os.getpid())
        os.close(reader)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in (1, 2):
            os.dup2(writer, number)
        os.close(writer)
        _set_environment(environment or {})
        sys.argv = ["topklass", *arguments]
        code = _run(prepare)
    finally:
        os._exit(code)


def _set_environment(environment: Mapping[str, str]) -> None:
    """Set variables; Lightning has read that of the rank when it was imported."""
    from lightning.pytorch.utilities import rank_zero_only

    os.environ.update(environment)
    rank_zero_only.rank = int(environment.get("RANK", 0))


def _run(prepare: Callable[[], None]) -> int:
    """The command, then what an interpreter does at its end."""
    from topklass.__main__ import main

    code = 0
    try:
        prepare()
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.setprofile(None)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code


def start_cold(arguments: Sequence[str]) -> Process:
    """A new interpreter with ``python -m topklass ARGUMENTS``."""
    reader, writer = os.pipe()
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # the same packages
    process = subprocess.Popen(
        [sys.executable, "-m", "topklass", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=writer,
        env={**os.environ, **paths},
        start_new_session=True,
    )
    os.close(writer)
    process.returncode = 0  # it is waited for by its number
    return Process(process.pid, process.pid, reader)
