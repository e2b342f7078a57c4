"""Elementary symmetric polynomials and marginals, from the states of the smooth loss."""

from topklass.kernels.esp.launch import (
    log_esp,
    topk_marginals,
)

__all__ = ["log_esp", "topk_marginals"]
