"""Margins for classes of unequal size."""

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from topkit._checks import check_number
from topkit._transforms import can_look


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
    counts = torch.as_tensor(counts)
    if counts.dim() != 1 or counts.numel() == 0:
        raise ValueError(f"counts must be a vector, one per class, got shape {tuple(counts.shape)}")
    if can_look(counts) and not bool((counts >= 0).all()):
        raise ValueError(f"counts must not be negative, got {counts[~(counts >= 0)][0].item()}")
    counts = counts if counts.is_floating_point() else counts.to(torch.get_default_dtype())
    seen = counts.masked_fill(counts == 0, inf)
    rarest = seen.amin()
    return largest * (rarest / torch.where(counts == 0, rarest, counts)).nan_to_num(1.0) ** 0.25
