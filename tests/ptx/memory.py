"""Memory that threads load from and store to: bounds, races, and what was never written."""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from .integers import UNSIGNED
from .races import Accesses, Clock

Array = np.ndarray
REAL = {4: np.float32, 8: np.float64}
_random = np.random.default_rng(0)


class InvalidAccess(RuntimeError):
    """An access outside of all tensors, or not aligned, or to what was never written."""


class Region:
    """Bytes from an address on."""

    def __init__(
        self, name: str, base: int, data: Array, cell: int = 1, written: bool = True
    ) -> None:
        self.name, self.base, self.data, self.cell = name, base, data, cell
        self.end = base + data.size
        self.accesses = Accesses(name, data.size // cell)
        self.unwritten = None if written else np.ones(data.size // cell, np.bool_)
        self._views = {w: data[: data.size // w * w].view(UNSIGNED[w]) for w in (1, 2, 4, 8)}

    def _cells(self, offsets: Array, width: int, threads: Array) -> tuple[Array, Array]:
        """The cells of accesses, and the thread of each."""
        count = width // self.cell
        first = offsets // self.cell
        if count <= 1:
            return first, threads
        return (first[:, None] + np.arange(count)).ravel(), np.repeat(threads, count)

    def load(self, addresses: Array, width: int, threads: Array, clock: Clock | None) -> Array:
        """Numbers of so many bytes."""
        offsets = addresses - self.base
        if clock is not None:
            cells, by = self._cells(offsets, width, threads)
            self.accesses.load(cells, by, clock)
            if self.unwritten is not None and self.unwritten[cells].any():
                raise InvalidAccess(f"{self.name}: a load of what was never written")
        return self._views[width][offsets // width]

    def store(self, addresses: Array, values: Array, threads: Array, clock: Clock | None) -> None:
        """Write numbers; threads that write to the same place must write the same.

        Up to rounding: threads that hold the same element of a reduction may have added its terms
        in different orders. Which of them comes last is left to chance.
        """
        width = values.dtype.itemsize
        offsets = addresses - self.base
        view, at = self._views[width], offsets // width
        if clock is not None:
            cells, by = self._cells(offsets, width, threads)
            changed = np.repeat(differ(view[at], values), max(1, width // self.cell))
            self.accesses.store(cells, by, changed, clock)
            if self.unwritten is not None:
                self.unwritten[cells] = False
        order = _random.permutation(at.size)
        view[at[order]] = values[order]
        if differ(view[at], values).any():
            raise InvalidAccess(f"{self.name}: one store writes different numbers to one place")


def differ(a: Array, b: Array) -> Array:
    """Which bits are not those of the same number, up to a few roundings to float32.

    Bits of integers are subnormal numbers as a rule, and must be the same.
    """
    different = a != b
    if different.any() and a.dtype.itemsize in REAL:
        kind = REAL[a.dtype.itemsize]
        a, b = a.view(kind), b.view(kind)
        near = np.abs(a - b) <= 64 * np.finfo(np.float32).eps * np.nanmax(np.abs(b), initial=0)
        for x in (a, b):
            near &= (x == 0) | (np.abs(x) >= np.finfo(kind).tiny)
        different &= ~(near | ((a != a) & (b != b)))
    return different


class Memory:
    """Regions that do not overlap; an access to anything else is an error."""

    def __init__(self, name: str, regions: Sequence[Region]) -> None:
        self.name = name
        self.regions = sorted(regions, key=lambda region: region.base)
        self.bases = [region.base for region in self.regions]

    def _parts(self, addresses: Array, width: int) -> list[tuple[Region, Array | None]]:
        """The regions of addresses, and which of them lie there; None stands for all."""
        lowest, highest = int(addresses.min()), int(addresses.max())
        i = bisect_right(self.bases, lowest) - 1
        if i >= 0 and highest + width <= self.regions[i].end:
            parts = [(self.regions[i], None)]
        else:
            which = np.searchsorted(self.bases, addresses, "right") - 1
            ends = np.array([*(region.end for region in self.regions), 0])
            if (outside := addresses + width > ends[which]).any():
                raise self._outside(int(addresses[outside][0]))
            parts = [(self.regions[j], which == j) for j in np.unique(which)]
        return parts

    def _outside(self, address: int) -> InvalidAccess:
        near = [f"{r.name} [{r.base:#x}, {r.end:#x})" for r in self.regions]
        return InvalidAccess(f"{self.name} address {address:#x} lies in none of {', '.join(near)}")

    def load(self, addresses: Array, width: int, threads: Array, clock: Clock | None) -> Array:
        """Numbers of so many bytes at addresses."""
        parts = self._parts(addresses, width)
        if parts[0][1] is None:
            return parts[0][0].load(addresses, width, threads, clock)
        result = np.empty(addresses.shape, UNSIGNED[width])
        for region, chosen in parts:
            result[chosen] = region.load(addresses[chosen], width, threads[chosen], clock)
        return result

    def store(self, addresses: Array, values: Array, threads: Array, clock: Clock | None) -> None:
        """Write numbers to addresses."""
        width = values.dtype.itemsize
        for region, chosen in self._parts(addresses, width):
            if chosen is None:
                region.store(addresses, values, threads, clock)
            else:
                region.store(addresses[chosen], values[chosen], threads[chosen], clock)
