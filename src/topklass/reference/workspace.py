"""Memory that a thread uses again, so that the system need not hand out fresh pages each call."""

import threading

import torch
from torch import Tensor

LARGEST = 2**20
"""Larger temporaries are not kept, in elements."""


class _Workspace(threading.local):
    buffer: Tensor | None = None


_workspace = _Workspace()


def workspace_like(tensor: Tensor) -> Tensor | None:
    """Scratch memory for ``out=``, or None where an ordinary allocation does better.

    Only for values that are used up before the function returns.
    """
    size = tensor.numel()
    plain = type(tensor) is Tensor and tensor.device.type == "cpu"
    if torch.compiler.is_compiling() or not plain or size > LARGEST:
        return None
    buffer = _workspace.buffer
    if buffer is None or buffer.dtype != tensor.dtype or buffer.numel() < size:
        with torch.inference_mode(False):
            buffer = torch.empty(size, dtype=tensor.dtype, device="cpu")
        if type(buffer) is not Tensor:
            return None
        _workspace.buffer = buffer
    return buffer[:size].view(tensor.shape)
