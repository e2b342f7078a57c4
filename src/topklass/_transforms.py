"""How a call is observed and differentiated: the only file that asks PyTorch's internals."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from math import nan
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Backward = Callable[..., tuple[Tensor | None, ...]]
Saved = Callable[[], tuple[Any, ...]]


def is_eager(tensor: Tensor) -> bool:
    """Whether an ordinary tensor is computed on at once, and nothing records the operations.

    Not so under ``torch.compile`` and ``torch.export``, ``torch.jit.trace``, ``make_fx`` and other
    dispatch modes, ``torch.func`` and forward mode, and for subclasses of tensors. All of these
    must see plain operations: no autograd function of ours, no buffer that is written in place, no
    decision that depends on values or on the number of rows.
    """
    return (
        not torch.compiler.is_compiling()
        and type(tensor) in (Tensor, nn.Parameter)
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._is_tracing()
        and not (forward_ad._current_level >= 0 and _has_tangent(tensor))
    )


def all_eager(*values: object) -> bool:
    """Whether :func:`is_eager` holds for every tensor among the values."""
    return all(is_eager(value) for value in values if isinstance(value, Tensor))


def can_break_graph() -> bool:
    """Whether ``torch.compile`` traces and may leave a call to eager mode.

    ``torch.export`` may not. PyTorch 2.6 cannot tell them apart.
    """
    exports = getattr(torch.compiler, "is_exporting", lambda: True)
    return torch.compiler.is_compiling() and not exports()


def _has_tangent(tensor: Tensor) -> bool:
    """Whether forward mode differentiates through the tensor."""
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def can_read_values(tensor: Tensor) -> bool:
    """Whether values may be read: an eager call, and no device to wait for."""
    return tensor.device.type == "cpu" and is_eager(tensor)


def is_differentiated(value: object) -> bool:
    """Whether derivatives by a value may be asked for, by autograd or any transformation."""
    if not isinstance(value, Tensor):
        return False
    return value.requires_grad or not (torch.compiler.is_compiling() or is_eager(value))


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether the tensor is distributed; without an import of what most calls do not need."""
    return type(tensor).__name__ == "DTensor"


def is_traced() -> bool:
    """Whether ``torch.compile``, ``torch.export`` or ``torch.jit.trace`` records operations."""
    return torch.compiler.is_compiling() or torch._C._is_tracing()


def needs_plain_backward(gradient: Tensor) -> bool:
    """Whether a backward pass is itself differentiated, or its gradient is not an ordinary tensor.

    That of ``is_grads_batched=True`` stands for a batch of gradients.
    """
    return (
        torch.is_grad_enabled()
        or type(gradient) is not Tensor
        or torch._C._functorch.is_legacy_batchedtensor(gradient)
    )


def plain_backward(function: Callable[[Tensor], Tensor], scores: Tensor, grad: Tensor) -> Tensor:
    """The gradient of plain operations, itself differentiable where gradients are enabled."""
    again = torch.is_grad_enabled()
    leaf = scores if again else scores.detach().requires_grad_()
    with torch.enable_grad():
        value = function(leaf)
    (result,) = torch.autograd.grad(value, leaf, grad, create_graph=again)
    return result


def first_order_only(derivative: Tensor, why: str, *sources: Tensor | None) -> Tensor:
    """``derivative``, whose own derivative by any of the sources is an error that says why."""
    result: Tensor = _FirstOrderOnly.apply(derivative, why, *sources)
    return result


class _FirstOrderOnly(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(derivative: Tensor, why: str, *sources: Tensor | None) -> Tensor:
        return derivative.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.why = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(ctx.why)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(ctx.why)


def differentiable_once(why: str) -> Callable[[Backward], Backward]:
    """Make a backward pass whose gradients have no derivative: asking for it is an error.

    PyTorch's ``once_differentiable`` does not say why. The pass takes a function that returns the
    saved tensors before the outgoing gradients: ``checkpoint`` lets them be read only once.
    """

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def once(ctx: Any, *outgoing: Tensor) -> tuple[Tensor | None, ...]:
            saved = cache(lambda: ctx.saved_tensors)
            with torch.no_grad():
                gradients = backward(ctx, saved, *outgoing)
            if not torch.is_grad_enabled():
                return gradients
            sources = (*outgoing, *saved())
            return tuple(g if g is None else first_order_only(g, why, *sources) for g in gradients)

        return once

    return decorate


@contextmanager
def graph_of_its_own() -> Iterator[None]:
    """Record operations that are differentiated at once and once, inside a forward pass.

    What they save is no business of hooks around the call, as those of ``checkpoint``, which would
    compute the call again. Saved results are detached: else they would hold their own graph.
    """
    with torch.enable_grad(), saved_tensors_hooks(Tensor.detach, lambda saved: saved):
        yield


def spread_nan(scores: Tensor) -> Tensor:
    """(R, n) scores, NaN throughout where a row has one, and so is its gradient.

    That is cross-entropy's gradient. The loss of a row may depend on few of its scores, and would
    give a network that has become NaN a finite gradient. Where values may be read, rows without
    NaN cost one look at them.
    """
    if scores.shape[1] == 0:
        return scores
    spoilt = scores.detach().amax(1, keepdim=True).isnan()
    if can_read_values(scores) and not bool(spoilt.any()):
        return scores
    return scores * torch.ones_like(spoilt, dtype=scores.dtype).masked_fill(spoilt, nan)
