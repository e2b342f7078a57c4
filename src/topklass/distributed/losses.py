"""Losses of logits whose classes are split over ranks."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from topklass._checks import Options, check_count, check_number, check_temperature, class_dimension
from topklass._collectives import Agreement, ClassShards, uncompiled
from topklass._targets import Target
from topklass.functional._sharded import agree, sharded_classification_loss
from topklass.functional._sharded_forms import ShardedLists, sharded_form
from topklass.functional.noised import NoisedHinge
from topklass.functional.smooth import SmoothHinge
from topklass.functional.topk_cross_entropy import Lengths, length_weights, loss_of_lists
from topklass.operators.noised import noise_rows


def smooth_of_ranks(
    k: int, tau: float, margin: float | Tensor
) -> tuple[ShardedLists, dict[str, Any]]:
    """The smooth loss of split classes, and the parameters that ranks must share."""
    check_count("k", k)
    check_temperature(tau)
    return ShardedLists(SmoothHinge(k, tau, margin)), {"k": k, "tau": tau}


def lists_of_ranks(
    k: Lengths, margin: float | Tensor, temperature: float
) -> tuple[ShardedLists, float, dict[str, Any]]:
    """The same of top-k cross-entropy, and what it is to be multiplied by."""
    lengths = length_weights(k)
    check_temperature(temperature, "temperature")
    loss, factor = loss_of_lists(lengths, margin, temperature)
    return ShardedLists(loss), factor, {"k": lengths, "temperature": temperature}


@uncompiled
def sharded_smooth_topk_loss(
    local_logits: Tensor,
    target: Target,
    k: int = 5,
    tau: float = 1.0,
    margin: float | Tensor = 1.0,
    *,
    group: ProcessGroup | ClassShards | None = None,
    dim: int = 1,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Smooth top-k SVM loss of classes that are split over ranks.

    The value and the gradient of :func:`topklass.functional.smooth_topk_loss` of all classes. Every
    rank calls it with its own classes of the same samples and gets the same loss; each calls
    ``backward`` on it and gets the gradient of its own logits. The ranks exchange 2k + 4 numbers of
    each row in the forward pass and nothing in the backward pass. Class probabilities need 2k + 3,
    a SparseTarget of m classes 2k + 3 + m and label smoothing 2k + 7, and each of them 2k + 2 in
    the backward pass.

    The call is compared on all ranks first: an error of one rank, and a difference between two, is
    an error on all.

    Args:
        local_logits: of this rank's classes, (n), (N, n) or (N, n, d1, …). Ranks may have different
            numbers of classes, also none.
        target: class indices among all classes, or a :class:`topklass.SparseTarget` of such, the
            same on all ranks; or the probabilities of this rank's classes, of the local logits'
            shape.
        k: length of the list that should hold the label, below the number of all classes, and up to
            32; up to 12 for float64 logits.
        tau: temperature.
        margin: a number, or one for each class of this rank.
        group: the process group, in whose order of ranks the slices follow each other; None for all
            ranks. Or :class:`ClassShards`.
        dim: the class dimension.
        weight: one weight for each class of this rank.
        ignore_index: a target that contributes neither loss nor gradient.
        reduction: "mean" (weighted by the labels' weights), "sum" or "none".
        label_smoothing: share of the target that is spread uniformly over all classes.

    Returns:
        A scalar, or with ``reduction="none"`` one loss per target, the same on all ranks. Where
        values cannot be read without waiting, on a GPU, a target that differs between ranks or is
        not a class gives NaN.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> logits, target = torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([1])
        >>> sharded_smooth_topk_loss(logits, target, k=2)  # of one rank, which has all classes
        tensor(1.0633)
        >>> dist.destroy_process_group()
    """
    options = Options(weight, ignore_index, reduction, label_smoothing)
    with Agreement("sharded_smooth_topk_loss", group) as agreement:
        form, parameters = smooth_of_ranks(k, tau, margin)
        targets = agree(agreement, form, local_logits, target, dim, options, **parameters)
    return sharded_classification_loss(form, local_logits, targets, dim, options, agreement.shards)


@uncompiled
def sharded_topk_cross_entropy(
    local_logits: Tensor,
    target: Target,
    k: Lengths = 5,
    margin: float | Tensor = 0.0,
    temperature: float = 1.0,
    *,
    group: ProcessGroup | ClassShards | None = None,
    dim: int = 1,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Top-k cross-entropy of classes that are split over ranks, mixtures of lists included.

    The value and the gradient of :func:`topklass.functional.topk_cross_entropy` of all classes,
    with one exchange for all lists; see :func:`sharded_smooth_topk_loss` for the other arguments.
    With k = 1 it is cross-entropy. ``ShortListLoss(k)`` is
    ``sharded_topk_cross_entropy(…, k={1: 0.5, k: 0.5}, temperature=5, label_smoothing=0.1)``.

    Args:
        local_logits: of this rank's classes.
        target: class indices among all classes, a SparseTarget, or probabilities of this rank's
            classes.
        k: length of the list, or lengths and their weights.
        margin: subtracted from the label's logit over T; a number, or one for each local class.
        temperature: T.
        group: the process group, or :class:`ClassShards`.
        dim: the class dimension.
        weight: one weight for each class of this rank.
        ignore_index: a target that contributes neither loss nor gradient.
        reduction: "mean" (weighted by the labels' weights), "sum" or "none".
        label_smoothing: share of the target that is spread uniformly over all classes.

    Returns:
        A scalar, or with ``reduction="none"`` one loss per target, the same on all ranks.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> logits, target = torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([1])
        >>> sharded_topk_cross_entropy(logits, target, k={1: 0.5, 2: 0.5})
        tensor(0.7643)
        >>> dist.destroy_process_group()
    """
    options = Options(weight, ignore_index, reduction, label_smoothing)
    with Agreement("sharded_topk_cross_entropy", group) as agreement:
        form, factor, parameters = lists_of_ranks(k, margin, temperature)
        targets = agree(agreement, form, local_logits, target, dim, options, **parameters)
    shards = agreement.shards
    return sharded_classification_loss(form, local_logits, targets, dim, options, shards, factor)


@uncompiled
def sharded_noised_topk_loss(
    local_logits: Tensor,
    target: Target,
    k: int = 5,
    epsilon: float = 1.0,
    samples: int = 10,
    margin: float | Tensor = 1.0,
    scale: float = 1.0,
    *,
    group: ProcessGroup | ClassShards | None = None,
    dim: int = 1,
    noise: Tensor | None = None,
    generator: torch.Generator | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Noised top-k hinge loss of classes that are split over ranks, with sampled noise.

    For given noise, the value and the gradient of :func:`topklass.functional.noised_topk_loss` of
    all classes; see :func:`sharded_smooth_topk_loss` for the other arguments. The ranks exchange
    (k + 1) · samples + 4 numbers of each row.

    Args:
        local_logits: of this rank's classes.
        target: class indices among all classes, a SparseTarget, or probabilities of this rank's
            classes.
        k: length of the list that should hold the label.
        epsilon: size of the noise.
        samples: number B of noise vectors.
        margin: a number, or one for each class of this rank.
        scale: multiplies the loss before its positive part is taken.
        group: the process group, or :class:`ClassShards`.
        dim: the class dimension.
        noise: the noise vectors of this rank's classes, ``local_logits.shape + (B,)``, which also
            set ``samples``; if not given, each rank draws its own, also from generators that are
            in the same state on all ranks.
        generator: source of the noise.
        weight: one weight for each class of this rank.
        ignore_index: a target that contributes neither loss nor gradient.
        reduction: "mean" (weighted by the labels' weights), "sum" or "none".
        label_smoothing: share of the target that is spread uniformly over all classes.

    Returns:
        A scalar, or with ``reduction="none"`` one loss per target, the same on all ranks.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> logits, target = torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([1])
        >>> sharded_noised_topk_loss(logits, target, k=2, epsilon=0.0)
        tensor(0.)
        >>> dist.destroy_process_group()
    """
    options = Options(weight, ignore_index, reduction, label_smoothing)
    with Agreement("sharded_noised_topk_loss", group) as agreement:
        check_count("k", k)
        if samples is None:
            raise ValueError(
                "samples must be a number of noise vectors, got None: there is no exact "
                "expectation for classes that are split over ranks"
            )
        check_count("samples", samples)
        check_number("epsilon", epsilon, positive=False)
        check_number("scale", scale, positive=True)
        if noise is not None:
            noise = noise_rows(noise, local_logits, class_dimension(local_logits, dim))
            samples = noise.shape[-1]
        loss = NoisedHinge(k, epsilon, samples, scale, margin, noise, generator)
        form = sharded_form(loss, agreement.rank)
        parameters = {"k": k, "epsilon": epsilon, "samples": samples, "scale": scale}
        targets = agree(agreement, form, local_logits, target, dim, options, **parameters)
    return sharded_classification_loss(form, local_logits, targets, dim, options, agreement.shards)
