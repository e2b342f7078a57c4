"""The k-th largest of many short rows on a CPU, several times as fast as ``topk`` for small k."""

import torch
from torch import Tensor

ROUNDS = 16
"""The largest k for which it is faster."""
LARGEST = 2**31 - 1


def kth_largest(values: Tensor, k: int) -> Tensor:
    """The place of the k-th largest of each row, (R, n) to (R, 1).

    Example:
        >>> kth_largest(torch.tensor([[3.0, 1.0, 2.0], [0.5, 0.5, 0.5]]), 2)[0]
        tensor([2])
    """
    places = _by_rounds(values, k) if k <= ROUNDS and values.dtype == torch.float32 else None
    return values.topk(k).indices[:, -1:] if places is None else places


def _by_rounds(values: Tensor, k: int) -> Tensor | None:
    """By k rounds of one maximum each, of numbers below the last; None if some are equal."""
    bits = values.view(torch.int32)
    order = (bits >> 31).bitwise_and_(LARGEST).bitwise_xor_(bits)  # integers in the same order
    kth, below = order.amax(1, keepdim=True), torch.empty_like(order)
    for _ in range(k - 1):
        # How far below it, less one, from the least integer on: others wrap around to the largest.
        torch.sub(kth.add_(LARGEST), order, out=below)
        kth.sub_(below.amin(1, keepdim=True))
    row, place = (order >= kth).nonzero().unbind(1)
    rows = torch.arange(len(values), device=row.device)
    if len(row) != k * len(rows) or not torch.equal(row, rows.repeat_interleave(k)):
        return None
    place = place.view(-1, k)
    return place.gather(1, values.gather(1, place).argmin(1, keepdim=True))
