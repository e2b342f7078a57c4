"""The expected k-th largest score under noise, and the loss above it."""

from topklass.kernels.expected.launch import backward, expected_topk, forward
from topklass.kernels.expected.operator import traced

__all__ = ["backward", "expected_topk", "forward", "traced"]
