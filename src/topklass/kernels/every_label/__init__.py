"""Label smoothing and class probabilities for losses of lists up to k = 10."""

from topklass.kernels.every_label.launch import backward, forward
from topklass.kernels.every_label.traced import traced

__all__ = ["backward", "forward", "traced"]
