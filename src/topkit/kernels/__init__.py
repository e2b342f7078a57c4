"""Triton kernels behind the operators and losses; :mod:`topkit.dispatch` decides when they run."""
