r"""The smooth gap with an analytic gradient, in place, in row blocks: for eager calls.

Same algorithm as :func:`topklass.reference.power_sums.smooth_gap`, which proves it, with

    k·∂/∂s_i = Σ_{j=1..k} (−1)^{j−1} u_i^j (S_{k−j}/S_k − S_{k−1−j}/S_{k−1})      (tail)
    k·∂/∂s_m = −v_m ∂/∂v_m (log S_k − log S_{k−1})                                (heads)
    k·∂/∂s_y = −1                                                                 (label)

The forward pass reads the logits once and keeps the tail u, from which the backward pass writes the
gradient. Rows are processed in blocks that stay in cache. The few constants of each row are
computed for all rows together, in float64. Higher derivatives go through the plain operations.
"""

from math import e, inf, log2
from typing import Any

import torch
from torch import Tensor

from topklass._transforms import needs_plain_backward, plain_backward
from topklass.reference import power_sums
from topklass.reference.power_sums import power_dtype, working_dtype

LOG2_E = log2(e)
BLOCK_ELEMENTS = 2**16
"""256 KB of float32: a block and its powers stay in a core's cache."""
CHUNK = 16
"""Scores of a chunk when the largest of a long row are searched."""
CONSTANTS = 2**24
"""Numbers that the constants of rows may take at a time: 128 MB of float64."""


def smooth_gap(scores: Tensor, labels: Tensor, k: int, tau: float) -> Tensor:
    r"""``τ log σ_k(e\y) − τ log σ_{k−1}(e\y) − s_y/k`` of (R, n) scores, (R, m) labels, (R, m)."""
    wanted = scores if torch.is_grad_enabled() else scores.detach()
    count = labels.shape[1]
    step = max(1, CONSTANTS // (count * (k + count) * (k + 2)))
    if len(scores) <= step:
        result: Tensor = _SmoothGap.apply(wanted, labels, k, tau)
        return result
    parts = zip(torch.split(wanted, step), torch.split(labels, step), strict=True)
    return torch.cat([_SmoothGap.apply(*part, k, tau) for part in parts])


class _SmoothGap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor, k: int, tau: float) -> Tensor:
        states, tails = [], []
        step = _block_rows(scores)
        powers = scores.new_empty(0, dtype=power_dtype(scores.dtype, k))  # one for all blocks
        for start in range(0, max(1, len(scores)), step):
            rows = slice(start, start + step)
            *state, tail = _block_state(scores[rows], labels[rows], k, k * tau, powers)
            states.append(state)
            if ctx.needs_input_grad[0]:
                tails.append(tail)
        all_heads, places, all_sums = (torch.cat(each) for each in zip(*states, strict=True))
        wide = power_sums.wide_dtype(scores)
        heads, label = all_heads.to(wide), scores.gather(1, labels).to(wide)
        rivals = power_sums.rivals_of_labels(heads, all_sums, label, labels, k * tau)
        heads, sums = (each.flatten(0, 1) for each in rivals[:2])  # a row for each label
        inverted = (heads[:, -1:] - heads).t().div_(k * tau).exp_()
        products = _head_products(_newton(sums.t().contiguous()), inverted)
        lower, upper = products[-1, k:].unbind(0)
        gap = (heads[:, -1:] - label.view(-1, 1)).div_(k)
        gap.add_((upper / lower).log_().unsqueeze(1), alpha=tau)
        if ctx.needs_input_grad[0]:
            slopes = _slopes(products, inverted, upper, lower)
            ctx.save_for_backward(scores, labels, places, slopes, *rivals[2:], *tails)
            ctx.k, ctx.tau = k, tau
        return gap.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        scores, labels, places, slopes, among, others, fall, *tails = ctx.saved_tensors
        k, tau = ctx.k, ctx.tau
        if needs_plain_backward(gradient):

            def plain(s: Tensor) -> Tensor:
                return power_sums.smooth_gap(s.to(working_dtype(s.dtype)), labels, k, tau)

            return plain_backward(plain, scores, gradient), None, None, None
        dtype = power_dtype(scores.dtype, k)
        scaled = slopes.mul(gradient.flatten()).div_(k)
        if labels.shape[1] == 1:
            scaled = scaled.to(dtype)
            tail, top, of_label = scaled[:k, :, None], scaled[k : 2 * k].t(), scaled[2 * k :].t()
        else:
            parts = _of_rows(scaled.unflatten(1, labels.shape), among, others, fall)
            tail, top, of_label = (part.to(dtype) for part in parts)
        result = torch.empty_like(scores, memory_format=torch.contiguous_format)
        step = _block_rows(scores)
        for start, u in zip(range(0, max(1, len(scores)), step), tails, strict=True):
            rows = slice(start, start + step)
            out = result[rows]
            into = out if out.dtype == dtype else None
            value = _polynomial(tail[:, rows], u[:, : out.shape[1]].to(dtype), into)
            # It is 0 at heads and labels. The places of absent heads mean nothing: slopes of 0.
            value.scatter_add_(1, places[rows], top[rows])
            value.scatter_add_(1, labels[rows], of_label[rows])
            if into is None:
                out.copy_(value)
        return result, None, None, None


def _of_rows(
    slopes: Tensor, among: Tensor, others: Tensor, fall: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients of the tail, (k, R, 1), slopes of heads, (R, k), and of labels, (R, m).

    Sums over the slopes for each label, (2k + 1, R, m); of what follows see ``power_sums.Rivals``.
    """
    k = among.shape[2]
    degree = torch.arange(1, k + 1, device=fall.device).view(k, 1, 1)
    tail = (slopes[:k] * fall.squeeze(2) ** degree).sum(2, keepdim=True)
    of_rivals = _polynomial(slopes[:k].unsqueeze(3), others, None).sum(1)
    of_rivals.scatter_add_(1, among.flatten(1), slopes[k : 2 * k].permute(1, 2, 0).flatten(1))
    return tail, of_rivals[:, :k], of_rivals[:, k:] + slopes[2 * k]


def _block_rows(scores: Tensor) -> int:
    """Rows of a block that stays in cache; all rows on other devices."""
    rows, columns = scores.shape
    return max(1, BLOCK_ELEMENTS // max(1, columns) if scores.device.type == "cpu" else rows)


def _block_state(
    scores: Tensor, labels: Tensor, k: int, temperature: float, powers: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Heads, their classes, and power sums of the tail, (R, k) each, and the tail.

    ``powers`` is scratch memory: fresh pages for every block would cost as much as the arithmetic.
    """
    work = _padded(scores, k, working_dtype(scores.dtype)).scatter_(1, labels, -inf)
    heads, places = _largest(work, k)
    heads.clamp_(min=power_sums.lowest_score(work))
    # An absent head may lie in the padding; the gradient of such a row is 0 anyway.
    places.clamp_(max=scores.shape[1] - 1)
    work.scatter_(1, places, -inf)
    # exp((s − t) / temperature), in base 2: more than twice as fast
    work.sub_(heads[:, -1:]).mul_(LOG2_E / temperature).exp2_()
    tail = work.to(power_dtype(scores.dtype, k))
    sums = [tail.sum(1)]
    if k > 1:
        torch.mul(tail, tail, out=powers.resize_(tail.shape))
        sums.append(powers.sum(1))
    for _ in range(k - 2):
        sums.append(powers.mul_(tail).sum(1))
    return heads, places, torch.stack(sums, 1).to(power_sums.wide_dtype(scores)), work


def _is_long(columns: int, k: int) -> bool:
    """Whether rows are so long that searching the maxima of chunks first is faster."""
    return columns >= 512 * k


def _padded(scores: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """A copy of (R, n) scores; long rows are padded with −inf to whole chunks."""
    rows, columns = scores.shape
    if not _is_long(columns, k):
        return scores.to(dtype, copy=True)
    whole = CHUNK * CHUNK
    copy = scores.new_full((rows, -(-columns // whole) * whole), -inf, dtype=dtype)
    copy[:, :columns] = scores
    return copy


def _largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``scores.topk(k, 1)`` of a padded copy: the k largest lie in the k chunks of largest maxima.

    The entries of a chunk are n / CHUNK apart, so that maxima are taken over whole vectors.
    """
    columns = scores.shape[1]
    if not _is_long(columns, k):
        heads, places = scores.topk(k, 1)
        return heads, places
    stride = columns // CHUNK
    chunks = scores.view(-1, CHUNK, stride)
    best = chunks.amax(1).topk(k, 1, sorted=False).indices
    candidates = chunks.gather(2, best.unsqueeze(1).expand(-1, CHUNK, -1)).flatten(1)
    heads, place = candidates.topk(k, 1)
    return heads, place // k * stride + best.gather(1, place % k)


def _newton(sums: Tensor) -> Tensor:
    """:func:`power_sums.newton` on (k, R)."""
    k, rows = sums.shape
    result = sums.new_zeros(k + 1, rows)
    p, q = sums.unbind(0), result.unbind(0)
    q[0].fill_(1.0)
    for j in range(1, k + 1):
        for i in range(1, j + 1):
            q[j].addcmul_(p[i - 1], q[j - i], value=(1 if i % 2 else -1) / j)
    return result


def _head_products(q: Tensor, inverted: Tensor) -> Tensor:
    """``Q(X)·Π_{i<m}(v_i + X)`` for m = 0..k, (k + 1, k + 2, R), each behind a leading 0."""
    k, rows = inverted.shape
    products = q.new_zeros(k + 1, k + 2, rows)
    shifted, plain = products[:, :-1].unbind(0), products[:, 1:].unbind(0)
    plain[0].copy_(q)
    for i, v in enumerate(inverted.unbind(0)):
        torch.addcmul(shifted[i], plain[i], v, out=plain[i + 1])
    return products


def _slopes(products: Tensor, inverted: Tensor, upper: Tensor, lower: Tensor) -> Tensor:
    """The gradient's row constants, (2k + 1, R): coefficients of the tail, heads, label."""
    k, rows = inverted.shape
    slopes = products.new_empty(2 * k + 1, rows)
    below = products[-1, :-1].flip(0)  # S_{k−1} … S_0, S_{−1} = 0
    torch.div(below[:k], upper, out=slopes[:k]).sub_(below[1:].div_(lower))
    slopes[1:k:2].neg_()

    adjoints = torch.zeros_like(products)  # reverse mode; each product before a trailing 0
    torch.reciprocal(lower, out=adjoints[k, k - 1])
    torch.reciprocal(upper, out=adjoints[k, k]).neg_()
    plain, shifted, v = adjoints[:, :-1].unbind(0), adjoints[:, 1:].unbind(0), inverted.unbind(0)
    for i in range(k - 1, 0, -1):
        torch.addcmul(shifted[i + 1], plain[i + 1], v[i], out=plain[i])
    torch.sum(adjoints[1:, :-1].mul_(products[:-1, 1:]), 1, out=slopes[k : 2 * k]).mul_(inverted)
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
