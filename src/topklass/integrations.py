"""Losses as arguments of other libraries, none of which is imported here."""

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def hf_loss(criterion: nn.Module, shift: bool = False) -> Callable[..., Tensor]:
    r"""A loss for ``compute_loss_func`` of Hugging Face's ``Trainer``.

    .. math:: \frac{1}{M} \sum_{t \text{ not ignored}} \ell(s_t, y_t)

    M is the Trainer's ``num_items_in_batch``, the number of labels in all batches of an optimizer
    step, so gradient accumulation gives the gradient of one large batch. Without it the
    criterion's own reduction is used. Sums are taken in float32.

    Args:
        criterion: a loss with the attributes ``reduction`` ("mean" or "sum") and ``ignore_index``,
            of topklass or :class:`torch.nn.CrossEntropyLoss`; or one of them inside
            :class:`topklass.LogitAdjustment` or :class:`topklass.DeferredReweighting`. Its
            ``ignore_index`` must be that of the labels, −100 in Hugging Face. If it has class
            weights or counts, move it to the model's device.
        shift: whether the logits at a position predict the label at the next, as in causal language
            models.

    Returns:
        A function of ``outputs`` (an object or mapping with ``logits``, a tuple whose first element
        they are, or the logits), ``labels`` and ``num_items_in_batch``, a number, tensor or None.
        Logits are (N, C) or (N, T, C), labels (N) or (N, T).

    Example:
        ``Trainer(…, compute_loss_func=hf_loss(topklass.SmoothTopKLoss(k=5), shift=True))``, or by
        hand:

        >>> compute_loss = hf_loss(nn.CrossEntropyLoss(), shift=True)
        >>> logits, labels = torch.zeros(1, 4, 10), torch.tensor([[1, 2, 3, -100]])
        >>> compute_loss({"logits": logits}, labels, num_items_in_batch=4)  # 2 log(10) / 4
        tensor(1.1513)
    """
    loss = _innermost(criterion)
    _check_criterion(loss)

    def compute_loss(
        outputs: Any, labels: Tensor, num_items_in_batch: Tensor | float | None = None
    ) -> Tensor:
        logits = _logits_of(outputs)
        _check_shapes(logits, labels, shift)
        labels = labels.to(logits.device)
        if shift:
            ignored: Any = loss.ignore_index
            labels = F.pad(labels, (0, 1), value=ignored)[..., 1:]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
        if num_items_in_batch is None:
            mean: Tensor = criterion(logits, labels.flatten())
            return mean
        total: Tensor = _summing(criterion)(logits, labels.flatten())
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch

    return compute_loss


def _innermost(criterion: nn.Module) -> nn.Module:
    """The loss inside of others that hold it as their ``criterion``."""
    inner = getattr(criterion, "criterion", None)
    return criterion if inner is None else _innermost(inner)


def _summing(criterion: nn.Module) -> nn.Module:
    """A copy that sums, with the same tensors."""
    twin, inner = copy(criterion), getattr(criterion, "criterion", None)
    if inner is None:
        twin.reduction = "sum"  # type: ignore[assignment]
    else:
        twin._modules = {**criterion._modules, "criterion": _summing(inner)}
    return twin


def _check_criterion(criterion: nn.Module) -> None:
    """Require a criterion that can sum over labels and ignore some."""
    missing = [name for name in ("reduction", "ignore_index") if not hasattr(criterion, name)]
    if not isinstance(criterion, nn.Module) or missing:
        raise TypeError(
            f"criterion must be a loss module with reduction and ignore_index, such as "
            f"nn.CrossEntropyLoss(), got {type(criterion).__name__}"
        )
    if criterion.reduction not in ("mean", "sum"):
        raise ValueError(
            f'criterion must reduce to one number: reduction must be "mean" or "sum", got '
            f"{criterion.reduction!r}"
        )


def _logits_of(outputs: Any) -> Tensor:
    """The logits of a model's outputs."""
    if isinstance(outputs, Mapping):
        logits = outputs.get("logits")
    elif isinstance(outputs, tuple) and not hasattr(outputs, "logits"):
        logits = outputs[0] if outputs else None
    else:
        logits = getattr(outputs, "logits", outputs)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"outputs must have logits, a tensor, as an attribute, under that key, or as the first "
            f"element of a tuple; got {type(outputs).__name__}"
        )
    return logits


def _check_shapes(logits: Tensor, labels: Tensor, shift: bool) -> None:
    """Require a label for each row of logits, and a sequence to shift along."""
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a tensor of class indices, got {type(labels).__name__}")
    if logits.dim() < 2 or labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"logits must have shape (N, C) or (N, T, C) and labels that shape without the "
            f"classes, which are last; got logits {tuple(logits.shape)} and labels "
            f"{tuple(labels.shape)}"
        )
    if shift and labels.dim() < 2:
        raise ValueError(
            f"shift=True needs sequences, logits (N, T, C), got logits {tuple(logits.shape)}"
        )
