"""Threads of a program that run together, and part at branches.

A register is an array with one number for each thread. Where threads part, one side of the branch
runs after the other, both to the first block that lies on all ways from there to the end.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import and_

import numpy as np

from .integers import UNSIGNED
from .memory import Memory
from .races import Clock

Array = np.ndarray
Step = Callable[["Threads"], None]


@dataclass(frozen=True)
class Block:
    """Steps, and where they lead: to the next block unless a branch is taken."""

    steps: list[Step]
    condition: Callable[["Threads"], Array] | None = None
    """Which threads take the branch; None: all."""
    target: int | None = None
    """A block, or behind the last one to return."""
    pause: str = ""
    """``barrier`` or ``atomic``: what happens at the end, where others may run first."""
    meeting: int = -1
    """The block where threads meet again that part here."""


@dataclass(frozen=True)
class Code:
    """A function, ready to run."""

    name: str
    blocks: list[Block]
    widths: list[int]
    parameters: list[tuple[str, int]]
    results: list[tuple[str, int]]
    local: int
    """Bytes of memory that each thread has of its own, for all functions of the module."""


@dataclass
class Frame:
    """What a call of a function has of its own."""

    code: Code
    registers: list[Array]
    parameters: dict[str, Array]
    """Their bytes, (threads, size)."""


class Deadlock(RuntimeError):
    """Threads wait for each other at different places."""


@dataclass
class Threads:
    """Some warps of a program, of which those in the mask are running."""

    numbers: Array
    """Of the threads, from a multiple of 32 on."""
    special: dict[str, int]
    """%ctaid.x and others."""
    global_memory: Memory
    shared: Memory
    local: Array
    """Memory of each thread, (threads, size); a function may be given a place in its caller's."""
    clock: Clock
    published: dict[int, Array]
    """What programs made known at addresses of atomic operations."""
    executed: dict[str, Array]
    """How many warps have run each block, by function."""
    bytes: dict[str, int]
    """Loaded and stored globally."""
    mask: Array | None = None
    """Which threads run; None: all."""
    carry: Array = field(init=False)
    frame: Frame = field(init=False)

    def __post_init__(self) -> None:
        self.count = self.numbers.size
        self.carry = np.zeros(self.count, np.bool_)

    def active(self) -> Array:
        """The positions of those that run."""
        return np.arange(self.count) if self.mask is None else np.flatnonzero(self.mask)

    def write(self, index: int, value: Array) -> None:
        """Give a register of the running threads a value."""
        if self.mask is not None:
            old = self.frame.registers[index]
            value = np.where(self.mask, value, old.view(value.dtype))
        self.frame.registers[index] = value

    def enter(self, code: Code, arguments: dict[str, Array]) -> Frame:
        """Begin a call; what the registers hold has no meaning."""
        bits = np.full(self.count, 0xA5A5A5A5A5A5A5A5)
        garbage = {width: bits.astype(kind) for width, kind in UNSIGNED.items()}
        results = {name: np.zeros((self.count, size), np.uint8) for name, size in code.results}
        registers = [garbage[width] for width in code.widths]
        self.frame = Frame(code, registers, {**arguments, **results})
        return self.frame

    def run(self) -> Iterator[str]:
        """Run the frame to its end; stop at barriers and after atomic operations."""
        code, outer, end = self.frame.code, self.mask, len(self.frame.code.blocks)
        # Where threads are, which ones, and where they meet those below them.
        stack: list[tuple[int, Array | None, int]] = [(0, outer, end)]
        while stack:
            place, self.mask, meeting = stack.pop()
            if place == meeting:
                continue
            block = code.blocks[place]
            self.executed[code.name][place] += self._warps()
            for step in block.steps:
                step(self)
            if block.pause == "barrier" and self.mask is not outer:
                raise Deadlock(f"{code.name}: a barrier where threads have parted")
            ways = self._ways(block, place)
            if len(ways) > 1:
                stack.append((block.meeting, self.mask, meeting))
                meeting = block.meeting
            stack.extend((way, mask, meeting) for way, mask in ways)
            if block.pause:
                yield block.pause
        self.mask = outer

    def _warps(self) -> int:
        if self.mask is None:
            return self.count // 32
        return int(self.mask.reshape(-1, 32).any(1).sum())

    def _ways(self, block: Block, place: int) -> list[tuple[int, Array | None]]:
        """Where the running threads go, and which ones."""
        if block.target is None:
            return [(place + 1, self.mask)]
        if block.condition is None:
            return [(block.target, self.mask)]
        taken = block.condition(self)
        left = ~taken
        if self.mask is not None:
            taken, left = taken & self.mask, left & self.mask
        if not left.any():
            return [(block.target, self.mask)]
        if not taken.any():
            return [(place + 1, self.mask)]
        return [(block.target, taken), (place + 1, left)]


def with_meetings(blocks: list[Block]) -> list[Block]:
    """Blocks that know where threads meet again: the nearest one on all ways to the end."""
    end = len(blocks)
    ways = [{i + 1} if b.target is None else {b.target} for i, b in enumerate(blocks)]
    for i, block in enumerate(blocks):
        if block.condition is not None:
            ways[i].add(i + 1)
    # A set of blocks is a number with one bit for each.
    later = [(1 << (end + 1)) - 1] * end + [1 << end]
    changed = True
    while changed:
        changed = False
        for i in reversed(range(end)):
            on_all = 1 << i | reduce(and_, (later[way] for way in ways[i]))
            changed |= on_all != later[i]
            later[i] = on_all
    result = []
    for i, block in enumerate(blocks):
        others = later[i] & ~(1 << i)
        # The nearest has all others behind it.
        nearest = next(j for j in range(end + 1) if others >> j & 1 and later[j] == others)
        result.append(replace(block, meeting=nearest))
    return result
