"""The smooth top-k loss up to k = 32."""

from topklass.kernels.smooth.launch import (
    backward,
    forward,
    traced,
)

__all__ = ["backward", "forward", "traced"]
