"""Launches of kernels, with little of what Python usually spends on them."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

_known: dict[tuple[Any, ...], Callable[..., None]] = {}
_counters: dict[tuple[int, int], Tensor] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...],
    warps: int,
    scores: Tensor,
) -> None:
    """Run ``kernel`` over ``grid`` on the device of the scores.

    Which compiled version serves is decided by the constants, the scores' dtype and whether their
    memory is aligned, and by nothing else: kernels are declared such that no other argument
    matters. So a version that is known is launched without looking at the arguments again.
    """
    if torch.compiler.is_compiling() or not scores.is_cuda:
        kernel[grid](*arguments, *constants, num_warps=warps)
        return
    index = scores.get_device()
    if _several_devices() and torch.cuda.current_device() != index:
        with torch.cuda.device(index):
            launch(kernel, grid, arguments, constants, warps, scores)
        return
    key = (id(kernel), index, scores.dtype, scores.data_ptr() % 16 == 0, constants, warps)
    known = _known.get(key)
    if known is None:
        _known[key] = _bare_launch(kernel[grid](*arguments, *constants, num_warps=warps))
    else:
        known(grid, current_stream(index), *arguments, *constants)


def unharmed(scores: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
    """What a kernel reads, the scores for what is not there; for a compiler, copies.

    ``torch.compile`` finds out what a kernel writes by following addresses. It does not look into
    functions that the kernel calls: if an address depends on their result, so does it on all of
    their arguments. What is written by mistake would be copied back to the user's tensors.
    """
    if torch.compiler.is_compiling():
        scores = scores.clone()
        others = tuple(None if other is None else other.clone() for other in others)
    return scores, *(scores if other is None else other for other in others)


def _bare_launch(compiled: Any) -> Callable[..., None]:
    """What a compiled kernel does in ``compiled[grid](…)``, without hooks for profilers."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def known(grid: tuple[int, int, int], stream: int, *arguments: Any) -> None:
        run(*grid, stream, function, metadata, None, None, None, *arguments)

    return known


@cache
def _several_devices() -> bool:
    return torch.cuda.device_count() > 1


def current_stream(index: int) -> int:
    """The stream of a device on which this thread launches."""
    return torch._C._cuda_getCurrentRawStream(index)


def zero_counter(scores: Tensor) -> Tensor:
    """A counter for one launch at a time, which leaves it at 0.

    Launches on one stream follow each other and share theirs. A CUDA graph gets its own, since it
    may be replayed on any stream.
    """
    eager = scores.is_cuda and not torch.compiler.is_compiling()
    if not eager or torch.cuda.is_current_stream_capturing():
        return scores.new_zeros(1, dtype=torch.float64)
    index = scores.get_device()
    key = (index, current_stream(index))
    counter = _counters.get(key)
    if counter is None:
        _counters[key] = counter = scores.new_zeros(1, dtype=torch.float64)
    return counter
