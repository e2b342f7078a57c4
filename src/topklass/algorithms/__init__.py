"""Algorithm 1 of Berrada et al. (2018), which :mod:`topklass.operators` uses for large k."""

from topklass.algorithms.divide_and_conquer import log_esp_tree

__all__ = ["log_esp_tree"]
