"""Losses of ``DTensor`` logits, on a device mesh of any number of dimensions.

As in ``torch.distributed.tensor.parallel.loss_parallel``, one dimension of the mesh may split the
classes, and the others rows. Rows need no exchange but that of the sum.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from topklass._checks import (
    Options,
    check_logits,
    check_options,
    check_target,
    class_dimension,
    index_shape,
    to_rows,
)
from topklass._collectives import Agreement, summed, uncompiled
from topklass._targets import SparseTarget, Target, check_sparse_target
from topklass._transforms import can_read_values
from topklass.functional._contract import (
    RowLoss,
    check_indices_are_ignored,
    check_targets,
    reduced,
    result_dtype,
    row_targets_loss,
    working,
)
from topklass.functional._sharded import agree, sharded_losses
from topklass.functional._sharded_forms import sharded_form


@uncompiled
def mesh_loss(
    loss: RowLoss, logits: DTensor, target: Target, dim: int, options: Options, factor: float
) -> Tensor:
    """``classification_loss`` of a DTensor.

    Args:
        loss: with one margin, or those of all classes.
        logits: at most one dimension of the mesh shards the classes, the others rows, if anything.
        target: a DTensor, or an ordinary tensor that has the targets of all rows; or two of them in
            a SparseTarget.
        dim: the class dimension.
        options: with the weights of all classes.
        factor: multiplies the result.

    Returns:
        A DTensor: replicated, or with ``reduction="none"`` sharded over rows as the logits are.
    """
    mesh, at = logits.device_mesh, class_dimension(logits, dim)
    logits, of_classes = _placed(logits, at)
    of_rows = [_without_classes(placement, at) for placement in logits.placements]
    name, dims = type(loss).__name__, list(range(mesh.ndim)) if of_classes is not None else []
    with _agreed(name, mesh, sorted(dims, key=lambda i: i == of_classes)) as agreements:
        _check(loss, logits, target, dim, options)
        loss, target, options = _own(loss, logits, target, at, options, of_classes)
        local = _local(logits)
        if of_classes is None:
            losses, total = _of_whole_rows(loss, local, target, dim, options)
        else:
            agreement = agreements[-1]
            form = sharded_form(loss, agreement.rank)
            targets = agree(agreement, form, local, target, dim, options, **_parameters(loss))
            of_part = "the number of rows"
            same = {name: each for name, each in agreement.facts.items() if name != of_part}
            for other in agreements[:-1]:
                other.facts |= same
    if of_classes is not None:
        scores, shards = to_rows(local, dim), agreements[-1].shards
        others = [i for i in range(mesh.ndim) if i != of_classes]
        with _agreed(name, mesh, others if can_read_values(scores) else []):  # values may be wrong
            losses, total = sharded_losses(form, scores, targets, options, shards)

    if options.reduction == "none":
        result = losses.reshape(index_shape(local, dim))
        shape, placements = index_shape(logits, dim), of_rows
    else:
        result = losses.sum()
        for i, placement in enumerate(of_rows):
            if placement.is_shard():
                group = mesh.get_group(i)
                result, total = summed(result, group), summed(total, group)
        result = reduced(result.reshape(1, 1), total, options.reduction)
        shape, placements = torch.Size(), [Replicate()] * mesh.ndim
    return DTensor.from_local(
        (result * factor).to(result_dtype(local)),
        mesh,
        placements,
        run_check=False,
        shape=shape,
        stride=tuple(prod(shape[i + 1 :]) for i in range(len(shape))),
    )


@contextmanager
def _agreed(function: str, mesh: DeviceMesh, dims: list[int]) -> Iterator[list[Agreement]]:
    """Agreements of the ranks along these dimensions of the mesh.

    Those along the last one are compared first. An error there is an error along the next one, so
    all ranks learn of it.
    """
    with ExitStack() as stack:
        yield [stack.enter_context(Agreement(function, mesh.get_group(i))) for i in dims]


def _check(loss: RowLoss, logits: DTensor, target: Target, dim: int, options: Options) -> None:
    if getattr(loss, "noise", None) is not None:
        raise NotImplementedError("noise cannot be given for logits that are a DTensor")
    check_options(options, check_logits(logits, dim))
    if isinstance(target, SparseTarget):
        check_sparse_target(logits, target, dim)
    else:
        check_indices_are_ignored(check_target(logits, target, dim), options)


def _own(
    loss: RowLoss,
    logits: DTensor,
    target: Target,
    at: int,
    options: Options,
    of_classes: int | None,
) -> tuple[RowLoss, Target, Options]:
    """This rank's parts of margins, target and weights."""
    mesh = logits.device_mesh
    per_class: list[Placement] = [
        Shard(0) if i == of_classes else Replicate() for i in range(mesh.ndim)
    ]
    margin = loss.margin
    if isinstance(margin, Tensor) and margin.dim():
        loss = replace(loss, margin=_part(margin, mesh, per_class))  # type: ignore[type-var]
    if options.weight is not None:
        options = options._replace(weight=_part(options.weight, mesh, per_class))
    if isinstance(target, SparseTarget):
        few: list[Placement] = [Replicate() if p.is_shard(at) else p for p in logits.placements]
        return loss, SparseTarget(*(_part(tensor, mesh, few) for tensor in target)), options
    of_rows = [_without_classes(placement, at) for placement in logits.placements]
    placements = list(logits.placements) if target.is_floating_point() else of_rows
    return loss, _part(target, mesh, placements), options


def _placed(logits: DTensor, at: int) -> tuple[DTensor, int | None]:
    """The logits without partial sums, and which dimension of the mesh shards their classes."""
    placements = [
        Replicate() if placement.is_partial() else placement for placement in logits.placements
    ]
    strange = [p for p in placements if type(p) not in (Shard, Replicate)]
    of_classes = [i for i, p in enumerate(placements) if p.is_shard(at)]
    if strange or len(of_classes) > 1:
        raise ValueError(
            f"logits may be sharded over classes by one dimension of the mesh, and over rows by "
            f"the others, got placements {tuple(logits.placements)} with classes in dimension {at}"
        )
    if placements != list(logits.placements):  # PyTorch 2.6 cannot always go back to the same
        logits = logits.redistribute(placements=placements)
    return logits, of_classes[0] if of_classes else None


def _without_classes(placement: Placement, at: int) -> Placement:
    """How class indices, and losses, of rows are placed."""
    if not isinstance(placement, Shard) or placement.dim == at:
        return Replicate()
    return Shard(placement.dim - (placement.dim > at))


def _part(tensor: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> Tensor:
    """This rank's part of a DTensor, or of an ordinary tensor that every rank has whole."""
    if not isinstance(tensor, DTensor):
        whole = [Replicate()] * mesh.ndim
        tensor = DTensor.from_local(tensor, mesh, whole, run_check=False)
    return _local(tensor.redistribute(placements=placements))


def _local(tensor: DTensor) -> Tensor:
    """This rank's part, whose gradient becomes one of the whole tensor again."""
    result: Tensor = _Local.apply(tensor)
    return result


class _Local(torch.autograd.Function):
    """``to_local``, but with the strides of the whole tensor, not those that a part suggests.

    If parts differ in size, PyTorch 2.6 would take the gradient for one of another layout, and copy
    it into a replicated tensor.
    """

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        ctx.mesh, ctx.placements = tensor.device_mesh, tensor.placements
        ctx.shape, ctx.stride = tensor.shape, tensor.stride()
        local = tensor.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> DTensor:
        return DTensor.from_local(
            gradients[0],
            ctx.mesh,
            ctx.placements,
            run_check=False,
            shape=ctx.shape,
            stride=ctx.stride,
        )


def _of_whole_rows(
    loss: RowLoss, logits: Tensor, target: Target, dim: int, options: Options
) -> tuple[Tensor, Tensor]:
    """Losses of this rank's rows, (R, 1), and what their mean divides by."""
    targets = check_targets(loss, logits, target, dim, options)
    scores, alone = to_rows(logits, dim), options._replace(reduction="none")
    losses = row_targets_loss(loss, scores, targets, alone)
    counted = torch.ones_like(losses)
    if isinstance(targets, Tensor) and not targets.is_floating_point():
        ignored = targets.squeeze(1) == options.ignore_index
        if options.weight is not None:
            counted = working(options.weight)[targets.squeeze(1).masked_fill(ignored, 0)]
        counted = counted.masked_fill(ignored, 0.0)
    return losses.unsqueeze(1), counted.sum()


def _parameters(loss: RowLoss) -> dict[str, Any]:
    """The numbers that a loss has besides its margin."""
    return {
        name: value
        for name, value in vars(loss).items()
        if isinstance(value, (int, float, tuple)) and name != "margin"
    }
