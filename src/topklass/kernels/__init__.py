"""Triton kernels behind the operators and losses; :mod:`topklass.dispatch` decides when they run."""
