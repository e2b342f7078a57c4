"""A last layer and its loss in one, without all logits in memory: for 10^4 to 10^7 classes."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from topklass._checks import (
    Options,
    check_count,
    check_k,
    check_margin,
    check_same_device,
    check_temperature,
    labels_in_range,
)
from topklass._targets import SparseTarget, Target
from topklass._transforms import all_eager, can_break_graph
from topklass.functional._chunks import Problem, default_bytes
from topklass.functional._contract import (
    RowLoss,
    check_targets,
    classification_loss,
    result_dtype,
    working,
)
from topklass.functional._linear_function import linear_loss
from topklass.functional.smooth import SmoothHinge
from topklass.functional.topk_cross_entropy import Lengths, checked_lists


def linear_smooth_topk_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Target,
    k: int = 5,
    tau: float = 1.0,
    margin: float | Tensor = 1.0,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    chunk_bytes: int | None = None,
) -> Tensor:
    """Smooth top-k SVM loss of the logits of a linear layer, without all logits in memory.

    ``smooth_topk_loss(F.linear(input, linear_weight, linear_bias), target, k, tau, margin)``, value
    and gradient, as :func:`torch.nn.functional.linear_cross_entropy` is for cross-entropy. Logits
    are made in chunks of rows. With "mean" and "sum", gradients are made with them in the forward
    pass, and no product is computed twice; the backward pass multiplies them by the outgoing
    gradient. Where few rows fit into a chunk, a GPU takes chunks of classes, and computes the
    logits twice. With "none", and in a second backward pass through the same graph, the chunks are
    made again. Gradients are added up in float32, that of a ``linear_weight`` in half precision if
    it fits into ``chunk_bytes`` in float32, and else it is rounded once for each chunk. There is no
    second derivative.

    ``torch.compile`` breaks the graph here. What exports, traces or transforms the call sees the
    layer and the loss one after the other, and all logits.

    Args:
        input: (d), (N, d) or (…, d).
        linear_weight: (C, d), as in :class:`torch.nn.Linear`.
        target: class indices of the input's shape without its last dimension, class
            probabilities with the C classes in the last dimension, or a
            :class:`topklass.SparseTarget` with its m classes in the last dimension.
        k: length of the list that should hold the label, 1 ≤ k ≤ C − 1.
        tau: temperature; small is close to the hinge, large is smoother.
        margin: a number or one per class, not differentiated.
        linear_bias: (C).
        weight: one weight per class, not differentiated.
        ignore_index: a target that contributes neither loss nor gradient.
        reduction: "mean" (weighted by the labels' weights), "sum" or "none".
        label_smoothing: share of the target that is spread uniformly over all classes. Like class
            probabilities it is exact, and needs the loss of every class as the label: 20 to 36
            bytes for each class of a row in float32, for k up to 256. An error says so if a row
            does not fit into ``chunk_bytes``.
        chunk_bytes: memory for the logits of a chunk, their gradient included; at least one row is
            taken. By default 7/8 of the weight, but 0.5 to 1.75 GiB.

    Returns:
        A scalar, or with ``reduction="none"`` one loss per target.

    Example:
        >>> import torch
        >>> input, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[4.0, 0], [1, 1], [0, 1]])
        >>> linear_smooth_topk_loss(input, weight, torch.tensor([0]), k=2)
        tensor(0.4839)
    """
    logits = stand_in(input, linear_weight, linear_bias)
    check_margin(margin, check_k(k, logits, -1))
    check_temperature(tau)
    options = Options(weight, ignore_index, reduction, label_smoothing)
    loss = SmoothHinge(k, tau, margin)
    return _loss(loss, input, linear_weight, linear_bias, target, options, 1.0, chunk_bytes)


def linear_topk_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Target,
    k: Lengths = 5,
    margin: float | Tensor = 0.0,
    temperature: float = 1.0,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    chunk_bytes: int | None = None,
) -> Tensor:
    """Top-k cross-entropy of the logits of a linear layer, without all logits in memory.

    :func:`topklass.functional.topk_cross_entropy` of ``F.linear(input, linear_weight,
    linear_bias)``; with k = 1 it is cross-entropy. See :func:`linear_smooth_topk_loss` for how it
    is computed, and for the arguments that are not here.

    Args:
        input: (d), (N, d) or (…, d).
        linear_weight: (C, d).
        target: class indices, class probabilities or a :class:`topklass.SparseTarget`.
        k: length of the list that should hold the label; a mapping from lengths to weights; or a
            sequence with the weights of the lengths 1, 2, …
        margin: subtracted from the label's logit over the temperature; a number or one per class.
        temperature: T of ``T·ℓ(s/T)``.
        linear_bias: (C).
        weight: one weight per class.
        ignore_index: a target that contributes neither loss nor gradient.
        reduction: "mean" (weighted by the labels' weights), "sum" or "none".
        label_smoothing: share of the target that is spread uniformly over all classes.
        chunk_bytes: memory for the logits of a chunk.

    Returns:
        A scalar, or with ``reduction="none"`` one loss per target.

    Example:
        >>> import torch
        >>> input, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[4.0, 0], [1, 1], [0, 1]])
        >>> linear_topk_cross_entropy(input, weight, torch.tensor([1]), k={1: 0.5, 2: 0.5})
        tensor(0.6931)
    """
    logits = stand_in(input, linear_weight, linear_bias)
    loss, factor = checked_lists(k, margin, temperature, logits, -1)
    options = Options(weight, ignore_index, reduction, label_smoothing)
    return _loss(loss, input, linear_weight, linear_bias, target, options, factor, chunk_bytes)


def _loss(
    loss: RowLoss,
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Target,
    options: Options,
    factor: float,
    chunk_bytes: int | None,
) -> Tensor:
    """In chunks, or where other than eager calls must see plain operations, in one."""
    if chunk_bytes is not None:
        check_count("chunk_bytes", chunk_bytes)
    parameters = (input, linear_weight, linear_bias)
    if can_break_graph():
        return _in_chunks_uncompiled(loss, parameters, target, options, factor, chunk_bytes)
    tensors = target if isinstance(target, SparseTarget) else (target,)
    eager = all_eager(*parameters, *tensors, options.weight, loss.margin)
    if not eager or input.device.type == "meta":
        logits = F.linear(input, linear_weight, linear_bias)
        return classification_loss(loss, logits, target, -1, options, factor)
    return _in_chunks(loss, parameters, target, options, factor, chunk_bytes)


def _in_chunks(
    loss: RowLoss,
    parameters: tuple[Tensor, Tensor, Tensor | None],
    target: Target,
    options: Options,
    factor: float,
    chunk_bytes: int | None,
) -> Tensor:
    input, weight, bias = parameters
    logits = stand_in(*parameters)
    targets = check_targets(loss, logits, target, -1, options)
    own = target.weights if isinstance(target, SparseTarget) else target
    check_not_differentiated(loss.margin, options.weight, own)
    problem = Problem(
        loss,
        targets,
        options,
        _total(targets, len(weight), options),
        factor,
        logits.dtype,
        default_bytes(weight) if chunk_bytes is None else chunk_bytes,
    )
    result = linear_loss(to_samples(input), weight, bias, problem)
    if options.reduction == "none":
        result = result.reshape(input.shape[:-1])
    return result.to(result_dtype(logits))


_in_chunks_uncompiled: Callable[..., Tensor] = torch.compiler.disable(_in_chunks)  # type: ignore[no-untyped-call]


def check_not_differentiated(margin: float | Tensor, weight: Tensor | None, target: Tensor) -> None:
    """Require that no derivatives are wanted but those of the layer."""
    for name, value in {"margin": margin, "weight": weight, "target": target}.items():
        if torch.is_grad_enabled() and isinstance(value, Tensor) and value.requires_grad:
            raise RuntimeError(
                f"the linear losses have no derivative by the {name}: pass {name}.detach(), or "
                f"apply the loss without 'linear' to torch.nn.functional.linear(…)"
            )


def to_samples(input: Tensor) -> Tensor:
    """(…, d) as (N, d), also for d = 0, where −1 would not be clear."""
    return input.reshape(input.shape[:-1].numel(), input.shape[-1])


def stand_in(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> Tensor:
    """What has the shape and the precision of the logits, without memory, once all is checked."""
    check_layer(input, linear_weight, linear_bias)
    return input.new_empty((), dtype=logits_dtype(input)).expand(
        *input.shape[:-1], len(linear_weight)
    )


def logits_dtype(input: Tensor) -> torch.dtype:
    """The precision in which a linear layer computes: under autocast, its own."""
    device = input.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    if autocast and input.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return input.dtype


def check_layer(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> None:
    """Require what ``torch.nn.functional.linear`` takes, with a weight of (C, d)."""
    for name, tensor in {
        "input": input,
        "linear_weight": linear_weight,
        "linear_bias": linear_bias,
    }.items():
        if tensor is None and name == "linear_bias":
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if not tensor.is_floating_point():
            raise NotImplementedError(f"{name} must be floating point, got {tensor.dtype}")
        if logits_dtype(tensor) != logits_dtype(input):
            raise RuntimeError(
                f"input and {name} must have the same dtype outside of autocast, got "
                f"{input.dtype} and {tensor.dtype}"
            )
    check_same_device(input, "input", linear_weight=linear_weight, linear_bias=linear_bias)
    shape, given = tuple(linear_weight.shape), tuple(input.shape)
    if len(shape) != 2:
        raise RuntimeError(f"linear_weight must have the shape (C, d), got {shape}")
    if not given or given[-1] != shape[1]:
        raise RuntimeError(
            f"the last dimension of input must be that of linear_weight, {shape[1]}, got an input "
            f"of shape {given}"
        )
    if linear_bias is not None and tuple(linear_bias.shape) != shape[:1]:
        raise RuntimeError(
            f"linear_bias must have the shape {shape[:1]}, got {tuple(linear_bias.shape)}"
        )


def _total(targets: Target, classes: int, options: Options) -> Tensor | None:
    """What "mean" divides by, if not by the number of rows."""
    if options.reduction != "mean" or isinstance(targets, SparseTarget):
        return None
    if targets.is_floating_point():
        return None
    known = labels_in_range(targets, classes, options.ignore_index)
    if known and options.weight is None:
        return None
    counted = targets != options.ignore_index
    if options.weight is None:
        return counted.sum()
    weights = working(options.weight)[targets.clamp(0, classes - 1)]
    return weights.masked_fill(~counted, 0.0).sum()
