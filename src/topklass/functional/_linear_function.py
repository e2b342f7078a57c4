"""The loss of a linear layer's logits as a function for autograd, differentiable once.

Gradients are made with the losses in the forward pass. The backward pass multiplies them by the
outgoing gradient. Where that is one for each row, it is unknown in the forward pass, and the
backward pass makes all of it again.
"""

from typing import Any

import torch
from torch import Tensor

from topklass._transforms import Saved, differentiable_once, needs_plain_backward
from topklass.dispatch import find_kernel
from topklass.functional._chunks import Gradients, Problem, Wanted, chunk_rows, in_chunks
from topklass.functional._class_chunks import fewer_bytes, in_class_chunks
from topklass.reference.power_sums import working_dtype


def linear_loss(input: Tensor, weight: Tensor, bias: Tensor | None, problem: Problem) -> Tensor:
    """The reduced loss of the logits of (N, d) inputs, or (N) losses, differentiable once."""
    if not torch.is_grad_enabled():
        input, weight = input.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    result: Tensor = _LinearLoss.apply(input, weight, bias, problem)
    return result


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, problem: Problem
    ) -> Tensor:
        reduction = problem.options.reduction
        wanted = ctx.needs_input_grad[:3]
        early = reduction != "none" and any(wanted)
        scale = _scale(input, problem) if early else None
        share, ctx.late = 1.0, None
        if scale is not None and problem.dtype == torch.float16:
            # Divided for a mean, gradients of rows may be too small for float16; their sums, too
            # large if they are not. So sums are divided before they are rounded.
            share = 1 / max(1, len(input)) if reduction == "mean" else 1.0
            ctx.late = (scale, scale / share, scale / share)
            scale = torch.ones_like(scale)
        with torch.autocast(input.device.type, enabled=False):
            shared = problem._replace(share=share)
            losses, gradients = _made(input, weight, bias, shared, scale, wanted)
        if any(wanted):
            ctx.save_for_backward(input, weight, bias)
            ctx.problem, ctx.gradients = problem, gradients if early else None
        if reduction != "none":
            losses = losses.sum()
        if reduction == "mean":
            losses = losses / (len(input) if problem.total is None else problem.total)
        return losses if problem.factor == 1 else losses * problem.factor

    @staticmethod
    @differentiable_once(
        "the linear losses have no second derivative, since their gradient is made in the forward "
        "pass: apply the loss without 'linear' to torch.nn.functional.linear(…)"
    )
    def backward(ctx: Any, saved: Saved, outgoing: Tensor) -> tuple[Tensor | None, ...]:
        if needs_plain_backward(outgoing):
            raise RuntimeError(
                "the linear losses take one outgoing gradient, not a batch of them: call "
                "torch.autograd.grad once for each, without is_grads_batched=True"
            )
        return *_gradients(ctx, saved, outgoing), None


def _gradients(ctx: Any, saved: Saved, outgoing: Tensor) -> Gradients:
    """Those made in the forward pass, multiplied in place; made again if there are none."""
    problem: Problem = ctx.problem
    made: Gradients | None = ctx.gradients
    ctx.gradients = None  # so that they become those of parameters without a copy
    if made is not None:
        for i, gradient in enumerate(made):
            if gradient is not None:
                factor = outgoing if ctx.late is None else outgoing.float() * ctx.late[i]
                _multiply(gradient, factor)
        return made
    input, weight, bias = saved()
    outgoing = outgoing * _scale(input, problem)
    with torch.autocast(input.device.type, enabled=False):
        return _made(input, weight, bias, problem, outgoing, ctx.needs_input_grad[:3])[1]


def _multiply(gradient: Tensor, factor: Tensor) -> None:
    """In place; a kernel does not even read the gradient where the factor is 1, as it mostly is."""
    kernel = find_kernel("multiply", gradient, 1, optional=True)
    if kernel is None or not gradient.is_contiguous():
        gradient.mul_(factor)
    else:
        kernel.multiply(gradient, factor)


def _made(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    problem: Problem,
    outgoing: Tensor | None,
    wanted: Wanted,
) -> tuple[Tensor, Gradients]:
    """(N) losses, and with an outgoing gradient, () or (N), those of input, weight and bias."""
    rows = chunk_rows(input, weight, problem)
    if fewer_bytes(input, len(weight), problem, rows):
        return in_class_chunks(input, weight, bias, problem, outgoing, wanted)
    return in_chunks(input, weight, bias, problem, outgoing, wanted, rows)


def _scale(input: Tensor, problem: Problem) -> Tensor:
    """What the gradient of a row's loss is multiplied by: 0 for the mean of no row."""
    factor, wide = problem.factor, working_dtype(problem.dtype)
    if problem.options.reduction == "mean":
        if problem.total is not None:
            total = problem.total.to(wide)
            return torch.where(total == 0, 0.0, factor / total)
        factor /= max(1, len(input))
    return input.new_full((), factor, dtype=wide)
