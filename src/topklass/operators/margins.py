"""Margins and weights for classes of unequal size."""

from collections.abc import Sequence
from math import inf, log

import torch
from torch import Tensor

from topklass._checks import check_number, is_number
from topklass._transforms import can_read_values


def class_margins(counts: Tensor | Sequence[float], largest: float = 0.2) -> Tensor:
    r"""A margin for each class, larger for rarer classes.

    .. math:: m_y = m_{\max} \Big( \frac{n_{\min}}{n_y} \Big)^{1/4}

    (Cao et al. 2019; Garcin et al. 2022, section 3.3), where n_min is the count of the rarest class
    that has samples. A class without samples gets the largest margin.

    Args:
        counts: number of training samples of each class, (C).
        largest: margin m_max of the rarest class; 0.2 in Garcin et al., section 4.5.

    Returns:
        (C), floating point, in (0, largest].

    Example:
        >>> import torch
        >>> class_margins(torch.tensor([1, 16, 0]))
        tensor([0.2000, 0.1000, 0.2000])
    """
    check_number("largest", largest, positive=False)
    seen = _seen(counts)
    return largest * (seen.amin() / seen).nan_to_num(1.0) ** 0.25


def class_weights(counts: Tensor | Sequence[float], beta: float = 0.9999) -> Tensor:
    r"""A weight for each class by its effective number of samples, larger for rarer classes.

    .. math:: w_c \propto \frac{1 - \beta}{1 - \beta^{n_c}}, \qquad \frac1C \sum_c w_c = 1

    (Cui et al. 2019, where the effective number is the inverse of this fraction). β = 0 gives every
    class the same weight, β → 1 weights inversely proportional to the counts. A class without
    samples gets the weight of the rarest that has some.

    Use them as the ``weight`` of a loss. Large weights from the start hurt the features that a
    network learns: :class:`topklass.DeferredReweighting` turns them on late.

    Args:
        counts: number of training samples of each class, (C).
        beta: β, from 0 to below 1: samples beyond about 1/(1 − β) hardly count.

    Returns:
        (C), floating point, positive, with mean 1.

    Example:
        >>> import torch
        >>> class_weights(torch.tensor([1, 10, 100]))
        tensor([2.7025, 0.2704, 0.0272])
    """
    if not is_number(beta) or not 0 <= beta < 1:
        raise ValueError(f"beta must be a number from 0 to below 1, got beta={beta!r}")
    log_beta = log(beta) if beta else -inf
    weights = 1 / -torch.expm1(_seen(counts) * log_beta)
    return weights / weights.mean()


def _seen(counts: Tensor | Sequence[float]) -> Tensor:
    """Counts as floating point, those that are 0 as the smallest that is not, or as +inf."""
    counts = torch.as_tensor(counts)
    if counts.dim() != 1 or counts.numel() == 0:
        raise ValueError(f"counts must be a vector, one per class, got shape {tuple(counts.shape)}")
    if can_read_values(counts) and not bool((counts >= 0).all()):
        raise ValueError(f"counts must not be negative, got {counts[~(counts >= 0)][0].item()}")
    counts = counts if counts.is_floating_point() else counts.to(torch.get_default_dtype())
    rarest = counts.masked_fill(counts == 0, inf).amin()
    return torch.where(counts == 0, rarest, counts)
