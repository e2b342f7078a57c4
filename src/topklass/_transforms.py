"""What is looking at the operations: the only place that asks PyTorch's internals."""

import torch
from torch import Tensor, nn


def transforming() -> bool:
    """Whether vmap or another transformation of torch.func is active."""
    return torch._C._are_functorch_transforms_active()


def has_tangent(tensor: Tensor) -> bool:
    """Whether forward mode differentiates through the tensor."""
    return torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def is_gradient_batch(gradient: Tensor) -> bool:
    """Whether ``torch.autograd.grad(is_grads_batched=True)`` sends many gradients at once."""
    return torch._C._functorch.is_legacy_batchedtensor(gradient)


def tracing() -> bool:
    """Whether torch.jit.trace records."""
    return torch._C._is_tracing()


def is_no_subclass(tensor: object) -> bool:
    """Whether it is an ordinary tensor, with memory of its own."""
    return type(tensor) in (Tensor, nn.Parameter)


def can_look(tensor: Tensor) -> bool:
    """Whether values may be read: an eager CPU call, no transformation, no device to wait for."""
    return (
        is_no_subclass(tensor)
        and tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not transforming()
    )
