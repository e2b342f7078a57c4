"""The expected k-th largest score under noise, and the loss above it."""

from topklass.kernels.expected.launch import (
    backward,
    expected_topk,
    forward,
    traced,
)

__all__ = ["backward", "expected_topk", "forward", "traced"]
