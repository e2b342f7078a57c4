"""Launches of Triton kernels that run their PTX on the CPU.

Triton compiles a launch for a GPU that is not there. Its programs then run in random order, a few
at a time, on the memory of CPU tensors.
"""

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from topklass import dispatch

from . import floats
from .counts import Launch, classes_of
from .decode import CONSTANTS, decode
from .memory import Memory, Region
from .parse import Module, parse
from .races import Clock
from .threads import Code, Threads


@dataclass(frozen=True)
class Settings:
    """How programs run."""

    seed: int = 0
    together: int = 4
    """Programs that take turns."""
    warps_apart: bool = False
    """Whether warps take turns too, or run in step, which is faster."""
    perturbation: int = 0
    """Units in the last place that approximations may be off."""
    capability: int = 80
    """Of the GPU that kernels are compiled for."""


@dataclass
class Emulator:
    """Runs launches, and keeps what they did."""

    settings: Settings
    launches: list[Launch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.settings.seed)

    def launch(self, compiled: Any, grid: tuple[int, ...], values: list[Any]) -> None:
        """Run all programs of a grid."""
        metadata = compiled.metadata
        warps, grid = metadata.num_warps, (*grid, 1, 1)[:3]
        together = 32 if self.settings.warps_apart else 32 * warps
        module, codes = decoded(compiled.asm["ptx"], together)
        code, count = codes[metadata.name], grid[0] * grid[1] * grid[2]
        executed = {name: np.zeros(len(one.blocks), np.int64) for name, one in codes.items()}
        launch = Launch(metadata.name, grid, Counter(), Counter())
        memory = Memory("global", [*tensors(values), *constants(module)])
        published: dict[int, np.ndarray] = {}

        def program(number: int) -> Iterator[str]:
            clock = Clock(number, warps, np.zeros(count, np.int64))
            data = np.full(-(-metadata.shared // 16) * 16, 0xFF, np.uint8)
            shared = Memory("shared", [Region("shared memory", 0, data, written=False)])
            places = np.unravel_index(number, grid[::-1])[::-1]
            special = {f"%ctaid.{axis}": int(p) for axis, p in zip("xyz", places, strict=True)}
            special |= {f"%nctaid.{axis}": n for axis, n in zip("xyz", grid, strict=True)}
            groups = []
            for first in range(0, 32 * warps, together):
                threads = Threads(
                    first + np.arange(together),
                    special,
                    memory,
                    shared,
                    np.full((together, code.local), 0xA5, np.uint8),
                    clock,
                    published,
                    executed,
                    launch.bytes,
                )
                threads.enter(code, arguments(code, values, together))
                groups.append(threads.run())
            return self.in_turns(groups, clock)

        self.run([program(int(i)) for i in self.random.permutation(count)])
        for name, times in executed.items():
            for counts, n in zip(classes_of(module.functions[name]), times.tolist(), strict=True):
                launch.instructions.update({kind: each * n for kind, each in counts.items()})
        self.launches.append(launch)

    def run(self, programs: list[Iterator[str]]) -> None:
        """Run programs, some of them in turns."""
        running: list[Iterator[str]] = []
        perturbed = patch.object(floats, "perturbation", self.settings.perturbation)
        with np.errstate(all="ignore"), perturbed:
            while programs or running:
                while programs and len(running) < self.settings.together:
                    running.append(programs.pop())
                i = int(self.random.integers(len(running)))
                if next(running[i], None) is None:
                    running.pop(i)

    def in_turns(self, groups: list[Iterator[str]], clock: Clock) -> Iterator[str]:
        """Run the warps of a program from barrier to barrier, in random order."""
        while groups:
            waiting = []
            for i in self.random.permutation(len(groups)):
                for pause in groups[i]:
                    if pause == "barrier":
                        waiting.append(groups[i])
                        break
                    yield pause
            if waiting and len(waiting) < len(groups):
                raise RuntimeError("some warps wait at a barrier, others have ended")
            groups = waiting
            clock.barrier()
            yield "barrier"


@cache
def decoded(text: str, threads: int) -> tuple[Module, dict[str, Code]]:
    """A PTX text for so many threads that run together."""
    module = parse(text)
    return module, decode(module, threads)


def tensors(values: list[Any]) -> list[Region]:
    """The memory of all tensors that a kernel is given."""
    found: dict[int, Tensor] = {}
    for value in values:
        if isinstance(value, Tensor) and value.untyped_storage().nbytes():
            before = found.setdefault(value.untyped_storage().data_ptr(), value)
            if value.element_size() < before.element_size():
                found[value.untyped_storage().data_ptr()] = value
    return [
        Region(
            f"{one.dtype} {tuple(one.shape)}",
            base,
            torch.empty(0, dtype=torch.uint8).set_(one.untyped_storage()).numpy(),
            one.element_size(),
        )
        for base, one in found.items()
    ]


def constants(module: Module) -> list[Region]:
    """The memory of a module's constants."""
    data = b"".join(one.ljust(-(-len(one) // 16) * 16, b"\0") for one in module.constants.values())
    return [Region("constants", CONSTANTS, np.frombuffer(data, np.uint8))] if data else []


def arguments(code: Code, values: list[Any], threads: int) -> dict[str, np.ndarray]:
    """The bytes of a kernel's parameters; behind the values come two empty scratch pointers."""
    result = {}
    for (name, size), value in zip(code.parameters, [*values, 0, 0], strict=True):
        if isinstance(value, Tensor):
            value = value.data_ptr()
        kind = np.dtype(f"f{size}" if isinstance(value, float) else f"i{size}")
        data = np.array(value, kind).tobytes()
        result[name] = np.tile(np.frombuffer(data, np.uint8), (threads, 1))
    return result


def flattened(signature: Any, value: Any) -> list[Any]:
    """The arguments of a compiled kernel, without those that are compiled in."""
    if isinstance(signature, tuple):
        pairs = zip(signature, value, strict=True)
        return [one for kind, part in pairs for one in flattened(kind, part)]
    return [] if signature == "constexpr" else [value]


class Driver:
    """What Triton asks of a GPU before it compiles; the device is none that may exist."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return -self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


@contextmanager
def emulated(settings: Settings) -> Iterator[Emulator]:
    """Let kernels serve CPU tensors, by their PTX, until the block ends."""
    emulator, compile_or_run = Emulator(settings), JITFunction.run

    def run(kernel: Any, *values: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*FP_FUSION", UserWarning)
            compiled = compile_or_run(kernel, *values, grid=grid, warmup=True, **options)
        if not warmup:
            kinds = tuple(compiled.src.signature.values())
            emulator.launch(compiled, grid, flattened(kinds, values))
        return compiled

    with (
        patch.object(driver, "_active", Driver(settings.capability)),
        patch.object(JITFunction, "run", run),
        patch.object(dispatch, "INTERPRETED", True),
    ):
        yield emulator
