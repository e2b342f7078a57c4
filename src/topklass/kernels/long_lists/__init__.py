"""The smooth top-k loss beyond k = 32."""

from topklass.kernels.long_lists.launch import (
    backward,
    forward,
    traced,
)

__all__ = ["backward", "forward", "traced"]
