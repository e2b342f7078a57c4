r"""The smooth gap with an analytic gradient, in place, in row blocks; also traced by compilers.

Same algorithm as :func:`topklass.reference.power_sums.smooth_gap`, which proves it, with

    k·∂/∂s_i = Σ_{j=1..k} (−1)^{j−1} u_i^j (S_{k−j}/S_k − S_{k−1−j}/S_{k−1})      (tail)
    k·∂/∂s_m = −v_m ∂/∂v_m (log S_k − log S_{k−1})                                (heads)
    k·∂/∂s_y = −1                                                                 (label)

The forward pass reads the logits once and keeps the tail u, from which the backward pass writes the
gradient. Rows are taken in blocks that stay in cache, and the few numbers of each row are worked on
for all rows together, in float64. Higher derivatives go through the plain operations.
"""

from collections.abc import Iterator
from math import e, inf, log2
from typing import Any

import torch
from torch import Tensor

from topklass.reference import power_sums
from topklass.reference.limits import power_dtype, working_dtype
from topklass.reference.row_blocks import needs_plain_backward, plain_backward, row_blocks
from topklass.reference.selection import largest, padded
from topklass.reference.workspace import workspace_like

LOG2_E = log2(e)
BLOCK_ELEMENTS = 2**18
"""A megabyte of float32: a block and its workspace stay in the cores' caches."""


def smooth_gap(scores: Tensor, labels: Tensor, k: int, tau: float) -> Tensor:
    r"""``τ log σ_k(e\y) − τ log σ_{k−1}(e\y) − s_y/k`` of (R, n) scores, (R, 1) labels, (R, 1)."""
    result: Tensor = _SmoothGap.apply(scores, labels, k, tau)
    return result


class _SmoothGap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor, k: int, tau: float) -> Tensor:
        keep_tail = ctx.needs_input_grad[0]
        heads, index, sums, tails = _row_state(scores, labels, k, k * tau, keep_tail)
        wide = heads.to(sums.dtype)
        inverted = (wide[:, -1:] - wide).t().div_(k * tau).exp_()
        states = _head_states(_newton(sums), inverted)
        lower, upper = states[-1, k:].unbind(0)
        gap = (wide[:, -1:] - scores.gather(1, labels)).div_(k)
        gap.add_((upper / lower).log_().unsqueeze(1), alpha=tau)
        if keep_tail:
            slopes = _slopes(states, inverted, upper, lower)
            ctx.save_for_backward(scores, labels, index, slopes, *tails)
            ctx.k, ctx.tau = k, tau
        return gap

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        scores, labels, index, slopes, *tails = ctx.saved_tensors
        k, tau = ctx.k, ctx.tau
        working, dtype = working_dtype(scores.dtype), power_dtype(scores.dtype, k)
        if needs_plain_backward(gradient):

            def plain(s: Tensor) -> Tensor:
                return power_sums.smooth_gap(s.to(working), labels, k, tau)

            return plain_backward(plain, scores, gradient), None, None, None
        scaled = slopes.mul(gradient.t()).div_(k).to(dtype)
        tail, top, of_label = scaled[:k].unsqueeze(2), scaled[k : 2 * k].t(), scaled[2 * k :].t()
        result = torch.empty_like(scores, memory_format=torch.contiguous_format)
        for rows, u in zip(_blocks(scores), tails, strict=True):
            out = result[rows] if result.dtype == dtype else None
            value = _polynomial(tail[:, rows], u[:, : scores.shape[1]].to(dtype), out)
            value.scatter_(1, index[rows], top[rows])
            value.scatter_(1, labels[rows], of_label[rows])
            if out is None:
                result[rows] = value
        return result, None, None, None


def _row_state(
    scores: Tensor, labels: Tensor, k: int, temperature: float, keep_tail: bool
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Heads and their classes, (R, k), power sums of the tail, (k, R), and the tail by blocks."""
    states, tails = [], []
    for rows in _blocks(scores):
        *state, tail = _block_state(scores[rows], labels[rows], k, temperature)
        states.append(state)
        if keep_tail:
            tails.append(tail)
    if len(states) == 1:
        heads, index, sums = states[0]
        return heads, index, sums, tails
    all_heads, all_index, all_sums = zip(*states, strict=True)
    return torch.cat(all_heads), torch.cat(all_index), torch.cat(all_sums, 1), tails


def _block_state(
    scores: Tensor, labels: Tensor, k: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    work = padded(scores, k, working_dtype(scores.dtype)).scatter_(1, labels, -inf)
    heads, index = largest(work, k)
    heads.clamp_(min=power_sums.lowest_score(work))
    # An absent head may lie in the padding; the gradient of such a row is 0 anyway.
    index.clamp_(max=scores.shape[1] - 1)
    work.scatter_(1, index, -inf)
    # exp((s − t) / temperature), in base 2: more than twice as fast
    work.sub_(heads[:, -1:]).mul_(LOG2_E / temperature).exp2_()
    tail = work.to(power_dtype(scores.dtype, k))
    sums = [tail.sum(1)]
    if k > 1:
        power = torch.mul(tail, tail, out=workspace_like(tail))
        sums.append(power.sum(1))
    for _ in range(k - 2):
        sums.append(power.mul_(tail).sum(1))
    return heads, index, torch.stack(sums).to(power_sums.wide_dtype(scores)), work


def _blocks(scores: Tensor) -> Iterator[slice]:
    """Blocks that stay in cache; all rows at once where another device or a compiler does that."""
    if scores.device.type != "cpu" or torch.compiler.is_compiling():
        return iter((slice(None),))
    return row_blocks(scores, BLOCK_ELEMENTS)


def _newton(sums: Tensor) -> Tensor:
    """:func:`power_sums.newton` on (k, R), in place."""
    k, rows = sums.shape
    result = sums.new_zeros(k + 1, rows)
    p, q = sums.unbind(0), result.unbind(0)
    q[0].fill_(1.0)
    for j in range(1, k + 1):
        for i in range(1, j + 1):
            q[j].addcmul_(p[i - 1], q[j - i], value=(1 if i % 2 else -1) / j)
    return result


def _head_states(q: Tensor, inverted: Tensor) -> Tensor:
    """``Q(X)·Π_{i<m}(v_i + X)`` for m = 0..k, (k + 1, k + 2, R), each behind a leading 0."""
    k, rows = inverted.shape
    states = q.new_zeros(k + 1, k + 2, rows)
    shifted, plain = states[:, :-1].unbind(0), states[:, 1:].unbind(0)
    plain[0].copy_(q)
    for i, v in enumerate(inverted.unbind(0)):
        torch.addcmul(shifted[i], plain[i], v, out=plain[i + 1])
    return states


def _slopes(states: Tensor, inverted: Tensor, upper: Tensor, lower: Tensor) -> Tensor:
    """The gradient's row constants, (2k + 1, R): coefficients of the tail, heads, label."""
    k, rows = inverted.shape
    slopes = states.new_empty(2 * k + 1, rows)
    below = states[-1, :-1].flip(0)  # S_{k−1} … S_0, S_{−1} = 0
    torch.div(below[:k], upper, out=slopes[:k]).sub_(below[1:].div_(lower))
    slopes[1:k:2].neg_()

    adjoints = torch.zeros_like(states)  # reverse mode; each state before a trailing 0
    torch.reciprocal(lower, out=adjoints[k, k - 1])
    torch.reciprocal(upper, out=adjoints[k, k]).neg_()
    plain, shifted, v = adjoints[:, :-1].unbind(0), adjoints[:, 1:].unbind(0), inverted.unbind(0)
    for i in range(k - 1, 0, -1):
        torch.addcmul(shifted[i + 1], plain[i + 1], v[i], out=plain[i])
    torch.sum(adjoints[1:, :-1].mul_(states[:-1, 1:]), 1, out=slopes[k : 2 * k]).mul_(inverted)
    slopes[2 * k].fill_(-1.0)
    return slopes


def _polynomial(coefficients: Tensor, u: Tensor, out: Tensor | None) -> Tensor:
    """``Σ_{j=1..k} c_j u^j`` by Horner's rule for u of (R, n) and coefficients of (k, R, 1)."""
    *others, last = coefficients.unbind(0)
    value = torch.mul(u, last, out=out)
    if others:
        value.add_(others[-1])  # addcmul with two broadcast operands is several times slower
        for c in reversed(others[:-1]):
            torch.addcmul(c, value, u, out=value)
        value.mul_(u)
    return value
