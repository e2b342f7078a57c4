"""A gradient times the outgoing one, on a GPU."""

from torch import Tensor

from topklass.kernels.scaling.scale import scale_kernel
from topklass.kernels.smooth.launch import launch

PROGRAMS = 2048
BLOCK = 4096


def multiply(values: Tensor, factor: Tensor) -> None:
    """Multiply contiguous values by a number, in place; if it is 1, they are not even read."""
    size = values.numel()
    programs = min(PROGRAMS, -(-size // BLOCK))
    launch(scale_kernel, (programs,), 4, values, values, factor, size, BLOCK)
