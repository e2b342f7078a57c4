"""Triton kernels of losses and operators; :mod:`topklass.dispatch` decides when they run.

One folder per family. ``launch.py`` runs on the host: it divides the work and launches. All other
files hold Triton code: arguments of kernels are named tuples of pointers and numbers, what they
are compiled for is one frozen object.
"""
