"""How much memory a block of code takes at its peak, also what it has freed again (Linux)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")


class Peak:
    grown = 0
    """Bytes beyond what was in use before the block; 0 where it cannot be measured."""


@contextmanager
def memory_peak() -> Iterator[Peak]:
    peak = Peak()
    if not RESET.exists():
        yield peak
        return
    RESET.write_text("5")  # the peak becomes what is in use now
    before = resident()
    try:
        yield peak
    finally:
        peak.grown = resident() - before


def resident() -> int:
    """The largest resident size since the last reset."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])
