r"""Losses of every label with an analytic gradient, in row blocks: for eager calls.

The expectation ``E = Σ_c w_c ℓ_c`` over all classes c as the label, with

    ℓ_c = −log Σ_k P_k π_c^(k)        or        ℓ_c = softplus(α_c − logit π_c^(k))

for lists of several lengths, or of one length and with a margin. As in
:mod:`topklass.reference.power_sums`, the largest scores of a row are taken out of it, here more
than the longest list has. They are the *leaders*, and each is left out of the row by positive
products (``leave_one_out.py``). Of any other class

    π_c = u_c Σ_m C_m (−u_c)^m,    C_m = Σ_k P_k S_{k−1−m} / S_k,    u_c = exp((s_c − t) / T)

with the least leader t is one polynomial for all lengths. ``h = π / (u C_0)`` is between 1/k and 1.
The more scores there are beside the leaders, the faster C_m falls: few powers of u matter, some 3
to 10 of them for long rows, whatever k is (``every_label_blocks.terms``).

The gradient comes by reverse mode: with ``r = 1 / (h (1 − b π))``, ``b = 1 − e^{−α}``,

    ∂ℓ/∂C_m = −r (−u)^m / C_0,        T ∂ℓ/∂s = −r Σ_m (m + 1) (C_m / C_0) (−u)^m

and from the sums of the former over the row come derivatives by the S_j, and by all scores.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from topklass._lists import Lists, leaders
from topklass._transforms import can_read_values, needs_plain_backward, plain_backward
from topklass.reference import fused
from topklass.reference.every_label_blocks import over_classes, read
from topklass.reference.every_label_rows import (
    Weights,
    read_rows,
    slopes_of_rows,
    weighted_loss_of_label,
    weighted_losses_of_leaders,
)
from topklass.reference.power_sums import serves_labels, wide_dtype, working_dtype

Plain = Callable[[Tensor, Weights], Tensor]
CONSTANTS_ELEMENTS = 2**19
"""Numbers of float64 that the largest constants of some rows may have: 4 MB."""


def serves(scores: Tensor, lists: Lists) -> bool:
    """Whether power sums of float32 are accurate enough, and one polynomial is enough."""
    margin = lists.margin
    return (
        can_read_values(scores)
        and scores.dtype != torch.float64
        and serves_labels(max(lists.lengths), scores.shape[1], scores.device)
        and (len(lists.lengths) == 1 or (not isinstance(margin, Tensor) and margin == 0))
    )


def gradient_bytes(scores: Tensor, weighted: bool) -> int:
    """How much memory a score takes at most, itself included, if a block is one long row.

    Its power u, ``∂ℓ/∂s`` or the gradient, and two of scratch memory. Weights of classes take four
    more: those given, those of the tail, and a copy in float64.
    """
    return scores.element_size() + working_dtype(scores.dtype).itemsize * (8 if weighted else 4)


def expected_loss(scores: Tensor, weights: Weights, lists: Lists, plain: Plain) -> Tensor:
    """``Σ_c w_c ℓ_c`` of (R, n) scores, (R, 1); ``plain`` is the same by plain operations."""
    wanted = scores if torch.is_grad_enabled() else scores.detach()
    result: Tensor = _ExpectedLoss.apply(wanted, weights, lists, plain)
    return result


class _Kept(NamedTuple):
    """What the backward pass needs of the tail in some rows."""

    u: Tensor
    own: Tensor
    """``−T ∂ℓ/∂s`` of a class's own loss, (r, n)."""
    weight: float
    """What ``own`` is to be multiplied by."""


class _Group(NamedTuple):
    """Rows whose constants are made together."""

    losses: Tensor
    """(r)."""
    places: Tensor
    """Classes of the leaders, (r, M)."""
    of_top: Tensor
    """Derivatives by the leaders over T, (r, M)."""
    of_label: Tensor
    """What the label in the tail has besides, (r)."""
    tail: Tensor
    """Coefficients of derivatives by the tail, (K, r)."""
    blocks: list[_Kept]


class _ExpectedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, weights: Weights, lists: Lists, plain: Plain) -> Tensor:
        wanted, dtype = ctx.needs_input_grad[0], working_dtype(scores.dtype)
        scratch = scores.new_empty(0, dtype=dtype), scores.new_empty(0, dtype=dtype)
        groups = [
            _of_rows(scores[rows], weights.of_rows(rows), lists, wanted, scratch)
            for rows in _slices(len(scores), _rows_at_once(scores, lists))
        ]
        total, *saved = _joined([group[:4] for group in groups])
        if wanted:
            tail = _joined_columns([group.tail.t() for group in groups])
            kept = [block for group in groups for block in group.blocks]
            numbers, tensors = weights.apart()
            blocks = (*(block.u for block in kept), *(block.own for block in kept))
            ctx.save_for_backward(scores, *tensors, *saved, tail, *blocks)
            ctx.call = numbers, lists, plain, [block.weight for block in kept]
        return (total * lists.scale).unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        scores, every, labels, more, places, top, of_label, tail, *blocks = ctx.saved_tensors
        numbers, lists, plain, tail_weights = ctx.call
        if needs_plain_backward(gradient):
            weights = numbers.joined(every, labels, more)
            result = plain_backward(lambda s: plain(s, weights), scores, gradient)
            return result, None, None, None
        dtype = working_dtype(scores.dtype)
        factor = gradient.squeeze(1) * (lists.scale / lists.temperature)
        most = torch.finfo(dtype).max / 4  # for coefficients of powers that vanish
        coefficients = (tail * factor).clamp_(-most, most).to(dtype).unsqueeze(2)
        of_label = (of_label * factor).to(dtype).unsqueeze(1)
        factor = factor.unsqueeze(1)
        of_top, minus = (top * factor).to(dtype), factor.neg().to(dtype)
        result = torch.empty_like(scores, memory_format=torch.contiguous_format)
        half, end = len(blocks) // 2, 0
        for u, own, w in zip(blocks[:half], blocks[half:], tail_weights, strict=True):
            rows = slice(end, end := end + len(u))
            out = result[rows]
            into = out if out.dtype == dtype else None
            value = fused.polynomial(coefficients[:, rows], u, into)
            value.addcmul_(own, minus[rows] * w)
            value.scatter_(1, places[rows], of_top[rows])
            if labels is not None:
                value.scatter_add_(1, labels[rows], of_label[rows])
            if into is None:
                out.copy_(value)
        return result, None, None, None


def _slices(rows: int, step: int) -> list[slice]:
    return [slice(start, start + step) for start in range(0, max(1, rows), step)]


def _joined(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def _rows_at_once(scores: Tensor, lists: Lists) -> int:
    """Rows of a group: several blocks, as small operations cost the more the fewer rows there are.

    The largest of its constants are the products that leave out each leader.
    """
    longest = max(lists.lengths)
    most = CONSTANTS_ELEMENTS // (leaders(longest) * (longest + 2))
    block = fused.block_rows(scores)
    return max(1, most // block * block if most > block else most)


def _of_rows(
    scores: Tensor, weights: Weights, lists: Lists, wanted: bool, scratch: tuple[Tensor, Tensor]
) -> _Group:
    """Losses of some rows, and what their gradient needs."""
    rows = _slices(len(scores), fused.block_rows(scores))
    blocks = [read(scores[each], weights.of_rows(each).every, lists, scratch[0]) for each in rows]
    top, places, drops = _joined([(each.top, each.places, each.drops) for each in blocks])
    sums = _joined_columns([each.sums for each in blocks])
    row = read_rows(top.t().to(wide_dtype(scores)), sums, lists)
    passes = [
        over_classes(block, row, each, lists, wanted, scratch)
        for each, block in zip(rows, blocks, strict=True)
    ]
    (losses,) = _joined([each[:1] for each in passes])
    moments = _joined_columns([each[1] for each in passes])
    total, shares = weighted_losses_of_leaders(scores, row, places, weights, lists)
    total += losses - drops
    of_label = torch.zeros_like(total)
    if weights.labels is not None:
        loss, of_label = weighted_loss_of_label(scores, row, places, weights, lists, moments.t())
        total += loss
    if not wanted:
        return _Group(total, places, total, of_label, sums, [])
    of_top, tail = slopes_of_rows(row, moments, shares)
    kept = []
    for block, (_, _, own) in zip(blocks, passes, strict=True):
        weight = 1.0 if isinstance(block.weights, Tensor) else block.weights
        kept.append(_Kept(block.u, own, weight))
    return _Group(total, places, of_top.t(), of_label, tail, kept)


def _joined_columns(parts: list[Tensor]) -> Tensor:
    """Tensors of (r, D) side by side, (most D, R), filled with zeros."""
    counts = [part.shape[1] for part in parts]
    if len(set(counts)) > 1:
        parts = [F.pad(each, (0, max(counts) - each.shape[1])) for each in parts]
    return torch.cat(parts).t().contiguous()
