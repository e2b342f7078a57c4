"""The last layer and the loss in one, for a layer whose classes are split over ranks."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from topklass._checks import Options, check_count, check_not_distributed
from topklass._collectives import Agreement, ClassShards, all_reduce, copied, uncompiled
from topklass._targets import SparseTarget, Target
from topklass._transforms import graph_of_its_own
from topklass.distributed.losses import lists_of_ranks, smooth_of_ranks
from topklass.functional._chunks import Problem, default_bytes
from topklass.functional._contract import RowLoss, result_dtype
from topklass.functional._linear_function import linear_loss
from topklass.functional._sharded import agree, sharded_losses
from topklass.functional._sharded_forms import ShardedLists, ShardedLoss
from topklass.functional._sharded_messages import own_labels, values_of
from topklass.functional.linear import (
    check_not_differentiated,
    logits_dtype,
    stand_in,
    to_samples,
)
from topklass.functional.topk_cross_entropy import Lengths


@uncompiled
def sharded_linear_smooth_topk_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Target,
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
    chunk_bytes: int | None = None,
) -> Tensor:
    """Smooth top-k loss of a linear layer whose classes are split over ranks.

    :func:`topklass.functional.linear_smooth_topk_loss` of all classes. Each rank has the weights of
    its own classes, and the same input. The logits are made for a chunk of rows at a time, and
    their loss and gradient with them, so that they are never whole in memory; ranks exchange what
    :func:`sharded_smooth_topk_loss` does, for each chunk. The gradient of the input is summed over
    ranks by one exchange in the backward pass; those of weights and bias stay on their rank.

    Args:
        input: (d), (N, d) or (…, d), the same on all ranks.
        linear_weight: of this rank's classes, (n, d).
        target: class indices among all classes, of the input's shape without its last dimension, or
            a :class:`topklass.SparseTarget` of such, the same on all ranks; or the probabilities of
            this rank's classes.
        k: length of the list that should hold the label, see :func:`sharded_smooth_topk_loss`.
        tau: temperature.
        margin: a number, or one for each class of this rank; not differentiated.
        linear_bias: of this rank's classes, (n).
        group: the process group, or :class:`ClassShards`.
        weight: one weight for each class of this rank; not differentiated.
        ignore_index: a target that contributes neither loss nor gradient.
        reduction: "mean" (weighted by the labels' weights), "sum" or "none". With "none" the
            backward pass makes the chunks again, exchanges included.
        label_smoothing: share of the target that is spread uniformly over all classes.
        chunk_bytes: memory for the logits of a chunk, their gradient included, on the rank with the
            most classes; the same on all ranks. By default 7/8 of its weight, but 0.5
            to 1.75 GiB.

    Returns:
        A scalar, or with ``reduction="none"`` one loss per target, the same on all ranks.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> input, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[4.0, 0], [1, 1], [0, 1]])
        >>> sharded_linear_smooth_topk_loss(input, weight, torch.tensor([0]), k=2)
        tensor(0.4839)
        >>> dist.destroy_process_group()
    """
    layer = Layer(input, linear_weight, linear_bias)
    options = Options(weight, ignore_index, reduction, label_smoothing)
    with Agreement("sharded_linear_smooth_topk_loss", group) as agreement:
        form, parameters = smooth_of_ranks(k, tau, margin)
        targets = _agree(agreement, form, layer, target, options, chunk_bytes, parameters)
    return _loss(form, layer, targets, options, 1.0, chunk_bytes, agreement.shards)


@uncompiled
def sharded_linear_topk_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Target,
    k: Lengths = 5,
    margin: float | Tensor = 0.0,
    temperature: float = 1.0,
    *,
    linear_bias: Tensor | None = None,
    group: ProcessGroup | ClassShards | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    chunk_bytes: int | None = None,
) -> Tensor:
    """Top-k cross-entropy of a linear layer whose classes are split over ranks.

    :func:`topklass.functional.linear_topk_cross_entropy` of all classes; with k = 1 it is
    cross-entropy. See :func:`sharded_linear_smooth_topk_loss` for how it is computed, and
    :func:`sharded_topk_cross_entropy` for ``ShortListLoss``.

    Args:
        input: (d), (N, d) or (…, d), the same on all ranks.
        linear_weight: of this rank's classes, (n, d).
        target: class indices among all classes, a SparseTarget, or probabilities of this rank's
            classes.
        k: length of the list, or lengths and their weights.
        margin: subtracted from the label's logit over T; a number, or one for each local class.
        temperature: T.
        linear_bias: of this rank's classes, (n).
        group: the process group, or :class:`ClassShards`.
        weight: one weight for each class of this rank.
        ignore_index: a target that contributes neither loss nor gradient.
        reduction: "mean" (weighted by the labels' weights), "sum" or "none".
        label_smoothing: share of the target that is spread uniformly over all classes.
        chunk_bytes: memory for the logits of a chunk; the same on all ranks.

    Returns:
        A scalar, or with ``reduction="none"`` one loss per target, the same on all ranks.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> input, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[4.0, 0], [1, 1], [0, 1]])
        >>> sharded_linear_topk_cross_entropy(input, weight, torch.tensor([1]), k={1: 0.5, 2: 0.5})
        tensor(0.6931)
        >>> dist.destroy_process_group()
    """
    layer = Layer(input, linear_weight, linear_bias)
    options = Options(weight, ignore_index, reduction, label_smoothing)
    with Agreement("sharded_linear_topk_cross_entropy", group) as agreement:
        form, factor, parameters = lists_of_ranks(k, margin, temperature)
        targets = _agree(agreement, form, layer, target, options, chunk_bytes, parameters)
    return _loss(form, layer, targets, options, factor, chunk_bytes, agreement.shards)


class Layer(NamedTuple):
    """The input of a linear layer, and the parameters of this rank's classes."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None


def _agree(
    agreement: Agreement,
    form: ShardedLists,
    layer: Layer,
    target: Target,
    options: Options,
    chunk_bytes: int | None,
    parameters: dict[str, Any],
) -> Target:
    """``agree`` of the logits of a layer."""
    input, weight, bias = layer
    check_not_distributed(input=input, linear_weight=weight, linear_bias=bias)
    if chunk_bytes is not None:
        check_count("chunk_bytes", chunk_bytes)
    shared = {**parameters, "chunk_bytes": chunk_bytes}
    targets = agree(agreement, form, stand_in(*layer), target, -1, options, **shared)
    own = target.weights if isinstance(target, SparseTarget) else target
    check_not_differentiated(form.loss.margin, options.weight, own)
    agreement.facts["the input's shape"] = list(input.shape)
    wanted = [t is not None and torch.is_grad_enabled() and t.requires_grad for t in layer]
    agreement.facts["which of input, weight and bias require a gradient"] = wanted
    return targets


def _loss(
    form: ShardedLists,
    layer: Layer,
    targets: Target,
    options: Options,
    factor: float,
    chunk_bytes: int | None,
    shards: ClassShards,
) -> Tensor:
    input, weight, bias = layer
    logits = input.new_empty((), dtype=logits_dtype(input))
    most = weight.new_empty(()).expand(max(shards.sizes), input.shape[-1])
    problem = Problem(
        _OfRanks(form, shards),
        targets,
        options,
        _total(targets, options, shards),
        factor,
        logits.dtype,
        default_bytes(most) if chunk_bytes is None else chunk_bytes,
        len(most),
    )
    result = linear_loss(copied(to_samples(input), shards.group), weight, bias, problem)
    if options.reduction == "none":
        result = result.reshape(input.shape[:-1])
    return result.to(result_dtype(logits))


def _total(labels: Target, options: Options, shards: ClassShards) -> Tensor | None:
    """What the mean divides by, if not by the number of rows: the labels' weights, from owners."""
    if isinstance(labels, SparseTarget) or labels.is_floating_point():
        return None
    ignored = labels == options.ignore_index
    if options.weight is None:
        return (~ignored).sum()
    here = own_labels(labels, ignored, shards)
    return all_reduce(values_of(options.weight, here).sum(), shards.group)


@dataclass(frozen=True, eq=False)
class _OfRanks(RowLoss):
    """Losses of (R, n) scores of this rank's classes among those of all ranks."""

    form: ShardedLoss
    shards: ClassShards

    def cost(self) -> int:
        """That of the loss."""
        return self.form.loss.cost()

    def losses(self, scores: Tensor, targets: Target, options: Options) -> Tensor:
        """(R) losses, the same on all ranks."""
        return sharded_losses(self.form, scores, targets, options, self.shards)[0].squeeze(1)

    def losses_and_gradient(
        self, scores: Tensor, targets: Target, options: Options, outgoing: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(R) losses, and the gradient of this rank's scores."""
        leaf = scores.detach().requires_grad_()
        with graph_of_its_own():
            losses = self.losses(leaf, targets, options)
        (gradient,) = torch.autograd.grad(losses, leaf, outgoing.to(losses.dtype).expand_as(losses))
        return losses.detach(), gradient
