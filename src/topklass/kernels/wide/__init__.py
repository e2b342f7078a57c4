"""The smooth top-k loss from k = 11 to 32, and up to k = 32 of several labels for a row."""

from topklass.kernels.wide.launch import (
    backward,
    forward,
    gradient_of_labels,
    losses_of_labels,
    traced,
)

__all__ = ["backward", "forward", "gradient_of_labels", "losses_of_labels", "traced"]
