"""The two passes of :mod:`topklass.reference.every_label` over the scores of a block of rows.

A block stays in cache. Scratch memory is shared by all blocks, and written in place.
"""

from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from topklass._lists import Lists, leaders
from topklass.reference import fused
from topklass.reference.every_label_rows import Row
from topklass.reference.power_sums import lowest_score, wide_dtype, working_dtype

FACTORS = 16
"""So many numbers from 1/11 to 11 have a product in float32."""
NEGLIGIBLE = 2.0**-26
"""A relative error that is small beside the rounding of float32."""


class Block(NamedTuple):
    """What is known of some rows after the first pass over their scores."""

    top: Tensor
    """The leaders, (r, M)."""
    places: Tensor
    sums: Tensor
    """The first D power sums of the tail, (r, D)."""
    drops: Tensor
    """``Σ_c w_c log u_c`` of the tail, (r)."""
    u: Tensor
    """(r, n), 0 for leaders."""
    weights: float | Tensor
    """Of the tail: a number, or (r, n) with 0 for leaders and absent classes."""


def read(scores: Tensor, every: float | Tensor, lists: Lists, scratch: Tensor) -> Block:
    """First pass: leaders, tail and power sums."""
    classes, longest, temperature = scores.shape[1], max(lists.lengths), lists.temperature
    count = min(leaders(longest), classes)
    work = fused.padded(scores, count, working_dtype(scores.dtype))
    top, places = fused.largest(work, count)
    top.clamp_(min=lowest_score(work))
    places.clamp_(max=classes - 1)  # an absent class may lie in the padding
    u, least = work[:, :classes], top[:, -1:]
    u.scatter_(1, places, least.expand_as(top))
    u.sub_(least).mul_(fused.LOG2_E / temperature)
    weights: float | Tensor = every
    if isinstance(every, Tensor):
        weights = every.expand_as(u).scatter(1, places, 0.0)
    drops = _weighted_sum(u, weights, scratch)
    if not bool(drops.isfinite().all()):
        weights, drops = _without_absent(scores, u, weights, places)
    u.exp2_().scatter_(1, places, 0.0)
    wide = wide_dtype(scores)
    sums, power, scratch = [u.sum(1)], u, scratch.resize_(u.shape)
    for _ in range(1, terms(sums[0], longest, count)):
        power = torch.mul(power, u, out=scratch)
        sums.append(power.sum(1))
    return Block(
        top, places, torch.stack(sums, 1).to(wide), drops.to(wide) / fused.LOG2_E, u, weights
    )


def terms(total: Tensor, longest: int, count: int) -> int:
    """How many powers of u matter to float32, if u sums up to ``total`` over the tail, (r).

    Seen from the least leader, ``S_j / S_{j−1}`` is concave and increasing in all scores. So it is
    least if all leaders are 1, and if the tail is ``total`` scores of 1 instead: as if so many
    scores were equal. That bounds ``h_m``, and what the m-th power sum adds to ``log S_k``.
    """
    least, most = (float(each) for each in total.aminmax()) if len(total) else (0.0, 0.0)
    error, m = float(longest), 0
    while m < longest and not error <= NEGLIGIBLE:  # also NaN
        m += 1
        error *= min(1.0, most) * (longest - m) / (count - longest + 1 + least + m)
    return max(1, m)


def _weighted_sum(values: Tensor, weights: float | Tensor, scratch: Tensor) -> Tensor:
    if not isinstance(weights, Tensor):
        return values.sum(1).mul_(weights)
    return torch.mul(values, weights, out=scratch.resize_(values.shape)).sum(1)


def _without_absent(
    scores: Tensor, logs: Tensor, weights: float | Tensor, places: Tensor
) -> tuple[Tensor, Tensor]:
    """Weights without those of absent classes, and ``Σ_c w_c log u_c``, −inf if one had some."""
    absent = scores == -inf
    every = torch.as_tensor(weights, dtype=logs.dtype, device=logs.device).expand_as(logs)
    every = every.scatter(1, places, 0.0)
    spoilt = (absent & (every > 0)).any(1)
    kept = every.masked_fill(absent, 0.0)
    drops = (logs.masked_fill(absent, 0.0) * kept).sum(1)
    return kept, drops.masked_fill(spoilt, -inf)


def over_classes(
    block: Block,
    row: Row,
    rows: slice,
    lists: Lists,
    wanted: bool,
    scratch: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Second pass: losses of the tail but for ``log u``, moments, (r, D), and ``−T ∂ℓ/∂s``."""
    u, weights, count = block.u, block.weights, block.sums.shape[1]
    coefficients = row.h[:count, rows].to(u.dtype, copy=True).unsqueeze(2)
    coefficients[1::2].neg_()
    h = _horner(coefficients, u, scratch[0].resize_(u.shape))
    other = scratch[1].resize_(u.shape)
    first = row.first[rows].to(u.dtype).unsqueeze(1)
    ratio, r = _ratio_and_r(h, u, first, lists.margin, other)
    losses, total = _losses(block, ratio, other)
    losses += _margins(block, lists.margin, total) - row.log_first[rows] * total
    if isinstance(weights, Tensor):
        r.mul_(weights)
    own = u
    if wanted:
        degree = torch.arange(1, len(coefficients) + 1, device=u.device, dtype=u.dtype)
        own = _horner(coefficients * degree.view(-1, 1, 1), u, torch.empty_like(u)).mul_(r)
    return losses, _moments(block, r, len(coefficients)), own


def _ratio_and_r(
    h: Tensor, u: Tensor, first: Tensor, margin: float | Tensor, other: Tensor
) -> tuple[Tensor, Tensor]:
    """``(1 − b π) / h`` and ``r = 1 / (h (1 − b π))``, the latter in place of h."""
    if not isinstance(margin, Tensor) and margin == 0:
        r = h.reciprocal_()
        return r, r
    wide = torch.as_tensor(margin, dtype=wide_dtype(u), device=u.device)
    minus_b = torch.expm1(-wide).to(u.dtype)
    torch.mul(u, first, out=other).mul_(minus_b)
    ratio = torch.addcmul(torch.ones_like(first), other, h, out=other).div_(h)
    return ratio, h.square_().mul_(ratio).reciprocal_()


def _losses(block: Block, ratio: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """``Σ_c w_c log ratio_c`` and ``Σ_c w_c`` of the tail, (r); the ratio of a leader is 1."""
    weights, wide = block.weights, block.sums.dtype
    if isinstance(weights, Tensor):
        losses = torch.log(ratio, out=other).mul_(weights).sum(1)
        return losses.to(wide), weights.sum(1, dtype=wide)
    total = torch.full_like(block.drops, weights * (ratio.shape[1] - block.top.shape[1]))
    return _sum_of_logs(ratio, other).to(wide).mul_(weights), total


def _moments(block: Block, r: Tensor, count: int) -> Tensor:
    """``Σ_c w_c r_c (−u_c)^m`` of the tail, m = 0..count − 1, (r, count); overwrites r."""
    wide, weights = block.sums.dtype, block.weights
    moments = [r.sum(1).to(wide)]
    for _ in range(count - 1):
        moments.append(r.mul_(block.u).sum(1).to(wide))
    result = torch.stack(moments, 1)
    if not isinstance(weights, Tensor):
        result[:, 0].sub_(block.top.shape[1])  # leaders
        result.mul_(weights)
    result[:, 1::2].neg_()
    return result


def _margins(block: Block, margin: float | Tensor, total: Tensor) -> Tensor:
    """``Σ_c w_c α_c`` of the tail, (r)."""
    if not isinstance(margin, Tensor) or margin.dim() == 0:
        return total * margin
    each = margin.to(total.dtype)
    if isinstance(block.weights, Tensor):
        return block.weights.to(total.dtype) @ each
    return (each.sum() - each[block.places].sum(1)) * block.weights


def _horner(coefficients: Tensor, u: Tensor, out: Tensor) -> Tensor:
    """``Σ_m c_m u^m`` for u of (r, n) and coefficients of (K, r, 1)."""
    *others, last = coefficients.unbind(0)
    if not others:
        return out.copy_(last.expand_as(u))
    torch.mul(u, last, out=out).add_(others[-1])
    for c in reversed(others[:-1]):
        torch.addcmul(c, out, u, out=out)
    return out


def _sum_of_logs(x: Tensor, out: Tensor) -> Tensor:
    """``Σ log x`` of (r, n) as the logarithms of products: a logarithm costs 7 multiplications."""
    factors = 1
    while factors < FACTORS and x.shape[1] > 1:
        half, rest = x.shape[1] // 2, x.shape[1] - x.shape[1] // 2
        torch.mul(x[:, :half], x[:, rest:], out=out[:, :half])
        if rest > half:
            out[:, half:rest] = x[:, half:rest]
        x, factors = out[:, :rest], 2 * factors
    return x.log().sum(1)
