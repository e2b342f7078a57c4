"""The last layer and the loss in one, for a layer whose classes are split over ranks."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from topklass._checks import Options, check_count, check_same_device, check_temperature
from topklass._collectives import Agreement, ClassShards, copied
from topklass._transforms import is_differentiated
from topklass.functional._contract import reduced, result_dtype
from topklass.functional._sharded import agree, sharded_losses
from topklass.functional._sharded_forms import Lists, ShardedLoss
from topklass.functional.smooth import SmoothHinge

CHUNK_BYTES = 2**28
"""What the logits of a chunk of rows may take, in float32, if its rows are not given."""


def sharded_linear_smooth_topk_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    k: int = 5,
    tau: float = 1.0,
    margin: float | Tensor = 1.0,
    *,
    linear_bias: Tensor | None = None,
    group: ProcessGroup | ClassShards | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    chunk_rows: int | None = None,
) -> Tensor:
    """Smooth top-k loss of ``F.linear(input, linear_weight)``, its classes split over ranks.

    Each rank has the weights of its own classes, and the same input. The logits are made for a
    chunk of rows at a time, and their loss and gradient with them, so that they are never whole in
    memory. The gradient of the input is summed over ranks by one exchange in the backward pass;
    those of weights and bias stay on their rank.

    Args:
        input: (…, d), the same on all ranks.
        linear_weight: of this rank's classes, (n, d).
        target: class indices among all classes, of the input's shape without d; the same on all
            ranks.
        k: length of the list that should hold the label, see :func:`sharded_smooth_topk_loss`.
        tau: temperature.
        margin: a number, or one for each class of this rank.
        linear_bias: of this rank's classes, (n).
        group: the process group, or :class:`ClassShards`.
        weight: one weight for each class of this rank.
        ignore_index: a target that contributes neither loss nor gradient.
        reduction: "mean" (weighted by the labels' weights), "sum" or "none". With "none", or where
            margins or weights are differentiated, the backward pass makes the logits again.
        label_smoothing: share of the target that is spread uniformly over all classes.
        chunk_rows: rows of a chunk; by default as many as take 256 MiB in float32 on the rank with
            the most classes.

    Returns:
        A scalar, or with ``reduction="none"`` one loss per target, the same on all ranks.
    """
    options = Options(weight, ignore_index, reduction, label_smoothing)
    with Agreement("sharded_linear_smooth_topk_loss", group) as agreement:
        check_count("k", k)
        check_temperature(tau)
        if chunk_rows is not None:
            check_count("chunk_rows", chunk_rows)
        _check_layer(input, linear_weight, target, linear_bias)
        form = Lists(SmoothHinge(k, tau, margin))
        none = F.linear(input.reshape(-1, input.shape[-1])[:0], linear_weight, linear_bias)
        parameters = {"k": k, "tau": tau, "chunk_rows": chunk_rows}
        agree(agreement, form, none, target.reshape(-1)[:0], 1, options, **parameters)
        agreement.facts["the input's shape"] = list(input.shape)
    shards = agreement.shards
    rows = chunk_rows or max(1, CHUNK_BYTES // (4 * max(shards.sizes)))
    head = _Head(form, options, shards, rows)
    samples = copied(input.reshape(-1, input.shape[-1]), shards.group)
    labels = target.reshape(-1)
    again = reduction == "none" or is_differentiated(margin) or is_differentiated(weight)
    if again:
        parts = [
            checkpoint(head.losses, x, linear_weight, linear_bias, y, use_reentrant=False)
            for x, y in head.chunks(samples, labels)
        ]
        losses, totals = zip(*parts, strict=True)
        total = torch.stack(totals).sum()
        result = reduced(torch.cat(losses), total, reduction)
    else:
        result, total = _AtOnce.apply(samples, linear_weight, linear_bias, labels, head)
        result = result / total if reduction == "mean" else result
    if reduction == "none":
        result = result.reshape(target.shape)
    return result.to(result_dtype(none))


def _check_layer(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None
) -> None:
    """Require a linear layer that fits the input, and a class index for each sample."""
    given = {"input": input, "linear_weight": linear_weight}
    for name, value in given.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            shown = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name} must be a floating-point tensor, got {shown}")
    if linear_weight.dim() != 2 or input.dim() == 0 or input.shape[-1] != linear_weight.shape[1]:
        raise ValueError(
            f"input must be (…, d) and linear_weight (n, d) with the same d, got shapes "
            f"{tuple(input.shape)} and {tuple(linear_weight.shape)}"
        )
    classes = linear_weight.shape[0]
    if linear_bias is not None and linear_bias.shape != (classes,):
        raise ValueError(
            f"linear_bias must have one value for each of the {classes} classes of this rank, got "
            f"shape {tuple(linear_bias.shape)}"
        )
    if not isinstance(target, Tensor) or target.is_floating_point():
        raise TypeError("target must be a tensor of class indices")
    if target.shape != input.shape[:-1]:
        raise ValueError(
            f"for an input of shape {tuple(input.shape)} the target must have shape "
            f"{tuple(input.shape[:-1])}, got {tuple(target.shape)}"
        )
    check_same_device(input, linear_weight=linear_weight, linear_bias=linear_bias, target=target)


class _Head(NamedTuple):
    """The loss behind a linear layer, for chunks of rows."""

    form: ShardedLoss
    options: Options
    shards: ClassShards
    rows: int

    def chunks(self, samples: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Samples (N, d) and their labels (N), at least one chunk."""
        return zip(torch.split(samples, self.rows), torch.split(labels, self.rows), strict=True)

    def losses(
        self, samples: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Losses (R, 1) of a chunk, and what their mean divides by."""
        return self.of_logits(F.linear(samples, weight, bias), labels)

    def of_logits(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The same from logits."""
        return sharded_losses(self.form, logits, labels, 1, self.options, self.shards)


class _AtOnce(torch.autograd.Function):
    """The sum of all losses and the total of their weights; gradients are made with them."""

    @staticmethod
    def forward(
        ctx: Any,
        samples: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        head: _Head,
    ) -> tuple[Tensor, Tensor]:
        wanted = any(ctx.needs_input_grad)
        sums, totals, of_samples = [], [], []
        of_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        of_bias = of_weight.new_zeros(len(weight))
        for x, y in head.chunks(samples, labels):
            logits = F.linear(x, weight, bias).requires_grad_(wanted)
            with torch.set_grad_enabled(wanted):
                losses, total = head.of_logits(logits, y)
                sums.append(losses.sum())
                totals.append(total)
            if wanted:
                (slope,) = torch.autograd.grad(sums[-1], logits)
                of_samples.append(slope @ weight.to(slope.dtype))
                of_weight += slope.t() @ x.to(slope.dtype)
                of_bias += slope.sum(0)
        if wanted:
            ctx.save_for_backward(torch.cat(of_samples), of_weight, of_bias)
            ctx.dtypes = samples.dtype, weight.dtype, None if bias is None else bias.dtype
        total = torch.stack(totals).sum()
        ctx.mark_non_differentiable(total)
        return torch.stack(sums).sum().detach(), total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        results = [
            None if dtype is None else (gradients[0] * each).to(dtype)
            for each, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *results, None, None
