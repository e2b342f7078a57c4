"""What every loss shares with ``torch.nn.functional.cross_entropy``.

A loss is a data class of its parameters with a method ``rows(scores, labels)``. It maps (R, C)
scores and (R, m) labels to (R, m) losses, and with ``labels=None`` to the (R, C) losses of every
class as the label. Input shapes, class weights, ignored targets, label smoothing, class
probabilities, precision and reduction are here, once.
"""

from math import inf
from typing import Any, ClassVar

import torch
from torch import Tensor

from topklass._checks import (
    Options,
    check_logits,
    check_options,
    check_same_device,
    check_target,
    every_class_counts,
    index_shape,
    labels_in_range,
    to_rows,
)
from topklass._lists import Lists
from topklass._targets import (
    SparseTarget,
    Target,
    check_sparse_target,
    labels_and_chances,
    target_rows,
)
from topklass._transforms import (
    graph_of_its_own,
    is_differentiated,
    is_dtensor,
    needs_plain_backward,
    plain_backward,
    spread_nan,
)
from topklass.reference.every_label import expected_loss, gradient_bytes, serves
from topklass.reference.every_label_rows import Weights
from topklass.reference.noised import piecewise_constant
from topklass.reference.power_sums import working_dtype
from topklass.reference.row_blocks import by_rows


class RowLoss:
    """The parameters of a loss, and its losses of rows. Subclasses are frozen data classes."""

    is_random: ClassVar[bool] = False
    """Whether it draws random numbers, so that rows must be computed once and together."""
    margin: float | Tensor = 0.0

    def rows(self, scores: Tensor, labels: Tensor | None) -> Tensor:
        """Map (R, C) scores and (R, m) labels to (R, m), or to (R, C) without labels."""
        raise NotImplementedError

    def of_labels(self, scores: Tensor, labels: Tensor) -> Tensor:
        """(R, m) losses of rows for each of their labels, by kernels where there are some."""
        return self.rows(spread_nan(scores), labels)

    def cost(self) -> int:
        """What the losses of every label keep for each score, see ``by_rows``."""
        return 8

    def lists(self) -> Lists | None:
        """The loss as one of random lists, if it is one."""
        return None

    def find_kernel(self, scores: Tensor, targets: Target, options: Options) -> Any:
        """The kernels that serve the call, or None, see :func:`topklass.dispatch.find_kernel`."""
        return None

    def find_kernel_of_few(self, scores: Tensor, target: Target, options: Options) -> Any:
        """The kernels that serve a few classes, or labels (R, m), in one pass, or None."""
        return None

    def losses(self, scores: Tensor, targets: Target, options: Options) -> Tensor:
        """(R) losses of (R, C) scores; the reduction must be "none"."""
        return row_targets_loss(self, scores, targets, options)

    def losses_and_gradient(
        self, scores: Tensor, targets: Target, options: Options, outgoing: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(R) losses of (R, C) scores, and their gradient scaled by ``outgoing``, () or (R).

        Without a graph, for scores that are needed no more: the gradient may take their place. The
        reduction must be "none".
        """
        kernel = kernel_of_targets(self, scores, targets, options)
        if kernel is not None:
            labels, options = for_kernel(targets, options)
            losses, saved = kernel.forward(scores, labels, self, options, True)
            return losses, kernel.backward(
                outgoing, scores, labels, saved, self, options, out=scores
            )
        leaf = scores.detach().requires_grad_()
        with graph_of_its_own():
            losses = _reference(self, leaf, targets, options)
        (gradient,) = torch.autograd.grad(losses, leaf, outgoing.to(losses.dtype).expand_as(losses))
        return losses.detach(), gradient

    def gradient_bytes(self, scores: Tensor, targets: Target, options: Options) -> int:
        """About how much memory :meth:`losses_and_gradient` takes for a score, itself included."""
        wide = working_dtype(scores.dtype).itemsize
        if kernel_of_targets(self, scores, targets, options) is not None:
            return scores.element_size()
        if every_class_counts(targets, options):
            lists = self.lists()
            if lists is None or is_differentiated(self.margin) or not serves(scores, lists):
                return self.cost() * wide
            labels = isinstance(targets, Tensor) and not targets.is_floating_point()
            return gradient_bytes(scores, weighted=not labels or options.weight is not None)
        return 2 * scores.element_size() + 4 * wide


def classification_loss(
    loss: RowLoss,
    logits: Tensor,
    target: Target,
    dim: int,
    options: Options,
    factor: float = 1.0,
) -> Tensor:
    """Reduce a loss of rows to what ``cross_entropy`` would return for the same options.

    With class indices the loss of a row is ``Σ_c w_c P_c ℓ(s, c)`` for P the smoothed one-hot
    target, and "mean" divides by the sum of the labels' weights. With class probabilities, all or
    those of a few classes, P is the smoothed target, and "mean" divides by the number of rows. The
    result is multiplied by ``factor``.
    """
    if is_dtensor(logits):
        from topklass.functional._mesh import mesh_loss  # needs torch.distributed

        return mesh_loss(loss, logits, target, dim, options, factor)
    targets = check_targets(loss, logits, target, dim, options)
    result = row_targets_loss(loss, to_rows(logits, dim), targets, options)
    if options.reduction == "none" and logits.dim() != 2:
        result = result.reshape(index_shape(logits, dim))
    if factor != 1:
        result = result * factor
    return result.to(result_dtype(logits))


def check_targets(
    loss: RowLoss, logits: Tensor, target: Target, dim: int, options: Options
) -> Target:
    """Require what fits together.

    Returns class indices (R, 1), class probabilities (R, C), or those of a few classes, (R, m).
    """
    check_options(options, check_logits(logits, dim))
    margin = loss.margin if isinstance(loss.margin, Tensor) and loss.margin.dim() else None
    check_same_device(logits, weight=options.weight, margin=margin)
    if isinstance(target, SparseTarget):
        check_sparse_target(logits, target, dim)
        check_same_device(logits, **target._asdict())
        return target_rows(target, dim)
    probabilities = check_target(logits, target, dim)
    check_indices_are_ignored(probabilities, options)
    check_same_device(logits, target=target)
    return to_rows(target, dim) if probabilities else target.reshape(-1, 1).long()


def check_indices_are_ignored(probabilities: bool, options: Options) -> None:
    """Require that no class is ignored in a target of class probabilities."""
    if probabilities and options.ignore_index >= 0:
        raise RuntimeError(
            "ignore_index is not supported for a target of class probabilities, "
            f"got ignore_index={options.ignore_index}"
        )


def row_targets_loss(loss: RowLoss, scores: Tensor, targets: Target, options: Options) -> Tensor:
    """The reduced loss of (R, C) scores, by a kernel or by the reference.

    ``targets`` are what :func:`check_targets` returns.
    """
    kernel = kernel_of_targets(loss, scores, targets, options)
    if kernel is None:
        return _reference(loss, scores, targets, options)
    labels, options = for_kernel(targets, options)
    if torch.compiler.is_compiling():
        return kernel.traced(scores, labels, loss, options)  # type: ignore[no-any-return]
    if not (torch.is_grad_enabled() and scores.requires_grad):
        return kernel.forward(scores, labels, loss, options, False)[0]  # type: ignore[no-any-return]
    tensors = labels if isinstance(labels, SparseTarget) else (labels,)
    result: Tensor = _KernelLoss.apply(scores, kernel, loss, options, *tensors)
    return result


def kernel_of_targets(loss: RowLoss, scores: Tensor, targets: Target, options: Options) -> Any:
    """The kernels that serve these targets; where none serves a few, ``of_labels`` finds some."""
    if isinstance(targets, SparseTarget) and not options.label_smoothing:
        return loss.find_kernel_of_few(scores, targets, options)
    return loss.find_kernel(scores, targets, options)


def for_kernel(targets: Target, options: Options) -> tuple[Target, Options]:
    """Labels (R), those of a few classes or class probabilities, and options for kernels."""
    if options.weight is not None:
        options = options._replace(weight=options.weight.float().contiguous())
    if isinstance(targets, SparseTarget):
        labels, chances = targets
        return SparseTarget(labels.contiguous(), chances.detach().float().contiguous()), options
    if targets.is_floating_point():
        return targets.contiguous(), options
    return targets.squeeze(1).contiguous(), options


class _KernelLoss(torch.autograd.Function):
    """The loss and its gradient by kernels; higher derivatives are those of the reference."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, kernel: Any, loss: RowLoss, options: Options, *target: Tensor
    ) -> Tensor:
        differentiate = ctx.needs_input_grad[0]
        labels = target[0] if len(target) == 1 else SparseTarget(*target)
        result, saved = kernel.forward(scores, labels, loss, options, differentiate)
        if differentiate:
            ctx.save_for_backward(scores, *target, *saved)
            ctx.call = kernel, loss, options, len(target)
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = gradients
        kernel, loss, options, tensors = ctx.call
        scores, *rest = ctx.saved_tensors
        target, saved = rest[:tensors], rest[tensors:]
        labels = target[0] if tensors == 1 else SparseTarget(*target)
        if not needs_plain_backward(grad):
            result = kernel.backward(grad, scores, labels, saved, loss, options)
        elif loss.is_random:
            rows = len(scores) if options.reduction == "none" else ()
            ones = scores.new_ones(rows, dtype=torch.float32)
            whole = kernel.backward(ones, scores, labels, saved, loss, options)
            each = grad.unsqueeze(-1) if options.reduction == "none" else grad
            result = piecewise_constant(whole * each.to(whole.dtype), scores)
        else:

            def plain(s: Tensor) -> Tensor:
                given: Target = labels
                if isinstance(labels, Tensor) and not labels.is_floating_point():
                    given = labels.unsqueeze(1)
                return _reference(loss, s, given, options).float()

            result = plain_backward(plain, scores, grad)
        return result, None, None, None, *(None for _ in target)


def _reference(loss: RowLoss, scores: Tensor, targets: Target, options: Options) -> Tensor:
    """The reduced loss in plain PyTorch."""
    total = None
    if isinstance(targets, SparseTarget):
        losses = _with_few_classes(loss, scores, targets, options)
    elif targets.is_floating_point():
        losses = _with_probabilities(loss, spread_nan(scores), targets, options)
    else:
        losses, total = _with_indices(loss, spread_nan(scores), targets, options)
    return reduced(losses, total, options.reduction)


def _with_indices(
    loss: RowLoss, scores: Tensor, labels: Tensor, options: Options
) -> tuple[Tensor, Tensor | None]:
    """Losses of rows with class indices, (R, 1), and what their mean divides by, if not R."""
    ignored, weight = None, options.weight
    if not labels_in_range(labels, scores.shape[1], options.ignore_index):
        ignored = labels == options.ignore_index
        labels = labels.masked_fill(ignored, 0)
    weights = None if weight is None else working(weight)[labels]
    if options.label_smoothing == 0:
        losses = loss.rows(scores, labels)
        losses = losses if weights is None else losses * weights
    else:
        spread = options.label_smoothing / scores.shape[1]
        own = 1 - options.label_smoothing
        if weight is None or weights is None:
            chances = Weights(spread, labels, own)
        else:
            chances = Weights((working(weight) * spread).unsqueeze(0), labels, weights * own)
        losses = _over_every_class(loss, scores, chances)
    if ignored is None:
        return losses, None if weights is None else weights.sum()
    counted = torch.ones_like(losses) if weights is None else weights
    return losses.masked_fill(ignored, 0.0), counted.masked_fill(ignored, 0.0).sum()


def _with_probabilities(loss: RowLoss, scores: Tensor, chances: Tensor, options: Options) -> Tensor:
    """Losses of rows with class probabilities, (R, 1)."""
    chances, smoothing = working(chances), options.label_smoothing
    if smoothing:
        chances = chances * (1 - smoothing) + smoothing / scores.shape[1]
    if options.weight is not None:
        chances = chances * working(options.weight)
    return _over_every_class(loss, scores, Weights(chances))


def _with_few_classes(
    loss: RowLoss, scores: Tensor, target: SparseTarget, options: Options
) -> Tensor:
    """Losses of rows with probabilities of a few classes, (R, 1)."""
    classes = scores.shape[1]
    labels, chances = labels_and_chances(target, classes, options.ignore_index)
    chances = working(chances)
    if options.label_smoothing:
        every = SparseTarget(labels, chances).to_dense(classes)
        return _with_probabilities(loss, spread_nan(scores), every, options)
    if options.weight is not None:
        chances = chances * working(options.weight)[labels]
    return _expected(loss.of_labels(scores, labels), chances)


def _expected(losses: Tensor, chances: Tensor) -> Tensor:
    """``Σ_c P_c ℓ_c``, (R, 1)."""
    return possible(losses, chances).sum(1, keepdim=True)


def possible(losses: Tensor, chances: Tensor) -> Tensor:
    """``P_c ℓ_c``, where an absent class of probability 0 does not count."""
    impossible = (chances == 0) & (losses == inf)
    return losses.masked_fill(impossible, 0.0) * chances


def _over_every_class(loss: RowLoss, scores: Tensor, weights: Weights) -> Tensor:
    """``Σ_c w_c ℓ(s, c)``, (R, 1), over all classes."""

    def expected(scores: Tensor, chances: Tensor) -> Tensor:
        return _expected(loss.rows(scores, None), chances)

    def plain(scores: Tensor, weights: Weights) -> Tensor:
        chances = weights.dense(scores)
        if loss.is_random or differentiated:
            return expected(scores, chances)
        return by_rows(expected, scores, chances, cost=loss.cost())

    differentiated = any(map(is_differentiated, (loss.margin, weights.every, weights.own)))
    lists = loss.lists()
    if lists is None or differentiated or not serves(scores, lists):
        return plain(scores, weights)
    return expected_loss(scores, weights, lists, plain)


def reduced(losses: Tensor, total: Tensor | None, reduction: str) -> Tensor:
    """(R, 1) losses as one number, or as (R); "mean" divides by the total, if not by R."""
    if reduction == "none":
        return losses.squeeze(1)
    if reduction == "sum":
        return losses.sum()
    return losses.mean() if total is None else losses.sum() / total


def result_dtype(logits: Tensor) -> torch.dtype:
    """The precision of a loss: that of the logits, or under autocast that of losses."""
    device = logits.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    return working_dtype(logits.dtype) if autocast else logits.dtype


def working(tensor: Tensor) -> Tensor:
    """A tensor in the precision in which losses are computed."""
    return tensor.to(working_dtype(tensor.dtype))


def of_label(values: Tensor, labels: Tensor | None) -> Tensor:
    """The labels' entries of each row, (R, m), or all entries where every class is a label."""
    return values if labels is None else values.gather(1, labels)


def margin_of_label(margin: float | Tensor, labels: Tensor | None) -> float | Tensor:
    """The labels' margins, (R, m), or all margins, (C); a number stays a number."""
    if not isinstance(margin, Tensor) or margin.dim() == 0 or labels is None:
        return margin
    return margin[labels]
