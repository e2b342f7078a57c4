"""Which thread touched a place last, and whether the next one to touch it comes after that.

Threads of a program are ordered by barriers, those of different programs by atomic operations
between barriers. What is not ordered is a race, unless both only read, or write the same. A place
remembers its last writer and its last reader, or that several threads of a program have read it.
"""

from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray
NOBODY = -1
STRIDE = 2048
"""Threads of a grid have the number program · STRIDE + thread."""
SEVERAL = STRIDE - 1
"""Stands for several threads of a program."""


class Race(RuntimeError):
    """Two accesses in no order, at least one of which writes."""


@dataclass
class Clock:
    """How often a program has synchronised its threads, and what it knows of other programs."""

    program: int
    warps: int
    known: Array
    """How many barriers of each program of the launch lie before this one."""
    barriers: int = 1
    learned: dict[int, Array] = field(default_factory=dict)
    """What threads got to know by atomic operations; the others know it after a barrier."""

    def barrier(self) -> None:
        """All threads wait for each other."""
        self.barriers += 1
        for known in self.learned.values():
            np.maximum(self.known, known, out=self.known)
        self.learned.clear()

    def atomic(self, thread: int, published: Array) -> None:
        """A thread makes known what its program did before the last barrier, and learns."""
        np.maximum(published, self.known, out=published)
        published[self.program] = self.barriers
        self.learned[thread] = published.copy()


@dataclass
class Last:
    """Who touched each place last, and when: after how many barriers of the program."""

    what: str
    who: Array
    when: Array


class Accesses:
    """The last accesses to the places of a memory."""

    def __init__(self, name: str, places: int) -> None:
        self.name = name
        self.writes, self.reads = (
            Last(what, np.full(places, NOBODY, np.int64), np.zeros(places, np.int64))
            for what in ("written", "read")
        )

    def load(self, places: Array, threads: Array, clock: Clock) -> None:
        """Threads read, one place each."""
        self._check(self.writes, places, threads, clock)
        who, when, first = self.reads.who, self.reads.when, clock.program * STRIDE
        before = who[places]
        recent = (when[places] == clock.barriers) & (before // STRIDE == clock.program)
        who[places] = first + np.where(recent & (before != first + threads), SEVERAL, threads)
        who[places[who[places] != first + threads]] = first + SEVERAL
        when[places] = clock.barriers

    def store(self, places: Array, threads: Array, changed: Array, clock: Clock) -> None:
        """Threads write, one place each, whose value changes or not."""
        for last in (self.writes, self.reads):
            self._check(last, places[changed], threads[changed], clock)
        self.writes.who[places] = clock.program * STRIDE + threads
        self.writes.when[places] = clock.barriers

    def _check(self, last: Last, places: Array, threads: Array, clock: Clock) -> None:
        """Raise an error unless these accesses come after the last ones."""
        before, when = last.who[places], last.when[places]
        program = before // STRIDE
        known = clock.known[program]
        for thread, learned in clock.learned.items():
            known = np.where(threads == thread, np.maximum(known, learned[program]), known)
        ordered = when < np.where(program == clock.program, clock.barriers, known)
        ordered |= (before == clock.program * STRIDE + threads) | (before == NOBODY)
        if not ordered.all():
            i = int(np.argmin(ordered))
            other = before[i] % STRIDE
            raise Race(
                f"{self.name}, place {places[i]}: thread {threads[i]} of program {clock.program} "
                f"touches what {'some thread' if other == SEVERAL else f'thread {other}'} "
                f"of program {program[i]} has {last.what}, without an order between them"
            )
