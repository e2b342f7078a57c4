"""Whether the machine was quiet: timings beside other work are worth nothing."""

import os
import time
from pathlib import Path

QUIET = 0.1
"""Processor cores that others may use meanwhile."""


class Others:
    """Processor cores, on average, that other processes have used since it was made (Linux)."""

    def __init__(self) -> None:
        self.start = time.perf_counter(), machine_seconds(), own_seconds()

    def cores(self) -> float | None:
        """That number, with a warning if it is too large; None where it cannot be told."""
        began, machine, own = self.start
        now = machine_seconds()
        if machine is None or now is None:
            return None
        used = (now - machine) - (own_seconds() - own)
        cores = round(max(0.0, used / (time.perf_counter() - began)), 2)
        if cores > QUIET:
            print(f"WARNING: others used {cores} cores meanwhile. Do not trust the times.")
        return cores


def machine_seconds() -> float | None:
    """Processor time of all processes since the machine was started."""
    path = Path("/proc/stat")
    if not path.exists():
        return None
    user, nice, system = (int(word) for word in path.read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
