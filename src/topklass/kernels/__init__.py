"""Triton kernels of operators and losses; :mod:`topklass.dispatch` decides when they run."""
