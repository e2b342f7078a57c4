"""The noised top-k and its loss, from samples."""

from topklass.kernels.noised.launch import (
    backward,
    forward,
    noised_topk,
    noised_topk_gradient,
    traced,
)

__all__ = [
    "backward",
    "forward",
    "noised_topk",
    "noised_topk_gradient",
    "traced",
]
