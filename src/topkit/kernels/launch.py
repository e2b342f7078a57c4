"""Launches of kernels, without the inspection of arguments that Triton repeats for each."""

from typing import Any

import torch
from torch import Tensor

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...],
    warps: int,
    scores: Tensor,
) -> None:
    """Run ``kernel`` over ``grid`` on the device of the scores, ``arguments[0]`` or like it.

    Which compiled version serves is decided by the constants, the scores' dtype and whether their
    memory is aligned, and by nothing else: kernels are declared such that no other argument
    matters.
    """
    if torch.compiler.is_compiling() or not scores.is_cuda:
        kernel[grid](*arguments, *constants, num_warps=warps)
        return
    index = scores.get_device()
    key = (id(kernel), index, scores.dtype, scores.data_ptr() % 16 == 0, constants, warps)
    compiled = _compiled.get(key)
    if compiled is None:
        with torch.cuda.device(index):
            _compiled[key] = kernel[grid](*arguments, *constants, num_warps=warps)
    elif torch.cuda.current_device() == index:
        compiled[grid](*arguments, *constants)
    else:
        with torch.cuda.device(index):
            compiled[grid](*arguments, *constants)
