"""Kernels on the CPU, by their PTX; this needs Triton's compiler."""

from topklass import dispatch

collect_ignore_glob = ["*.py"] if dispatch.NO_TRITON or dispatch.INTERPRETED else []
