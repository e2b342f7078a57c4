r"""The smooth gap with an analytic gradient, in place, in row blocks: for eager calls.

Same algorithm as :func:`topklass.reference.power_sums.smooth_gap`, which proves it, with

    k·∂/∂s_i = Σ_{j=1..k} (−1)^{j−1} u_i^j (S_{k−j}/S_k − S_{k−1−j}/S_{k−1})      (tail)
    k·∂/∂s_m = −v_m ∂/∂v_m (log S_k − log S_{k−1})                                (heads)
    k·∂/∂s_l = w_l ∂/∂w_l (log S_k − log S_{k−1})                                 (middle)
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
from topklass.reference import power_sums, tree
from topklass.reference.power_sums import working_dtype

LOG2_E = log2(e)
BLOCK_ELEMENTS = 2**16
"""256 KB of float32: a block and its powers stay in a core's cache."""
CONSTANTS_ELEMENTS = 2**22
"""Numbers of float64 that the products of some rows may have: 32 MB."""
CHUNK = 16
"""Scores of a chunk when the largest of a long row are searched."""


def smooth_gap(scores: Tensor, labels: Tensor, k: int, tau: float) -> Tensor:
    r"""``τ log σ_k(e\y) − τ log σ_{k−1}(e\y) − s_y/k`` of (R, n) scores, (R, m) labels, (R, m)."""
    wanted = scores if torch.is_grad_enabled() else scores.detach()
    result: Tensor = _SmoothGap.apply(wanted, labels, k, tau)
    return result


def plain_gap(scores: Tensor, labels: Tensor, k: int, tau: float) -> Tensor:
    """The same by plain operations, which compilers unroll: for long lists those of the tree."""
    if power_sums.is_accurate(k, scores.dtype, scores.device):
        return power_sums.smooth_gap(scores.to(working_dtype(scores.dtype)), labels, k, tau)
    return tree.smooth_gap(scores.to(power_sums.wide_dtype(scores)), labels, k, tau)


class _SmoothGap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor, k: int, tau: float) -> Tensor:
        states, tails = [], []
        step = block_rows(scores)
        powers = scores.new_empty(0, dtype=working_dtype(scores.dtype))  # one for all blocks
        for start in range(0, max(1, len(scores)), step):
            rows = slice(start, start + step)
            *state, tail = _block_state(scores[rows], labels[rows], k, k * tau, powers)
            states.append(state)
            if ctx.needs_input_grad[0]:
                tails.append(tail)
        all_top, places, all_sums = (torch.cat(each) for each in zip(*states, strict=True))
        wide = power_sums.wide_dtype(scores)
        label = scores.gather(1, labels).to(wide)
        rivals = power_sums.rivals_of_labels(all_top.to(wide), all_sums, label, labels, k * tau)
        top, sums = (each.flatten(0, 1).t().contiguous() for each in rivals[:2])  # one per label
        ratio, slopes = constants(top, sums, k * tau, ctx.needs_input_grad[0])
        gap = (top[k - 1] - label.flatten()).div_(k).add_(ratio.log_(), alpha=tau)
        if ctx.needs_input_grad[0]:
            absent = top <= power_sums.lowest_score(all_top)
            slopes[k:-1].masked_fill_(absent, 0.0)
            ctx.save_for_backward(scores, labels, places, slopes, *rivals[2:], *tails)
            ctx.k, ctx.tau = k, tau
        return gap.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        scores, labels, places, slopes, among, fall, *tails = ctx.saved_tensors
        k, tau = ctx.k, ctx.tau
        if needs_plain_backward(gradient):

            def plain(s: Tensor) -> Tensor:
                return plain_gap(s, labels, k, tau)

            return plain_backward(plain, scores, gradient), None, None, None
        dtype = working_dtype(scores.dtype)
        scaled = slopes.mul(gradient.flatten()).div_(k)
        if labels.shape[1] == 1:
            tail, top, of_label = scaled[:k, :, None], scaled[k:-1].t(), scaled[-1:].t()
        else:
            tail, top, of_label = _of_rows(scaled.unflatten(1, labels.shape), k, among, fall)
        # Coefficients grow as C(k, j) where the powers that they multiply vanish.
        most = torch.finfo(dtype).max / 4
        tail, top, of_label = tail.clamp(-most, most).to(dtype), top.to(dtype), of_label.to(dtype)
        result = torch.empty_like(scores, memory_format=torch.contiguous_format)
        step = block_rows(scores)
        for start, u in zip(range(0, max(1, len(scores)), step), tails, strict=True):
            rows = slice(start, start + step)
            out = result[rows]
            into = out if out.dtype == dtype else None
            value = polynomial(tail[:, rows], u[:, : out.shape[1]], into)
            # It is 0 at top scores and labels. Where classes are absent, slopes are 0.
            value.scatter_add_(1, places[rows], top[rows])
            value.scatter_add_(1, labels[rows], of_label[rows])
            if into is None:
                out.copy_(value)
        return result, None, None, None


def _of_rows(slopes: Tensor, k: int, among: Tensor, fall: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients of the tail, (k, R, 1), slopes of top scores, (R, l), and of labels, (R, m).

    Sums over the slopes for each label, (…, R, m); of what follows see ``power_sums.Rivals``.
    """
    rows, count, size = among.shape
    degree = torch.arange(1, k + 1, device=fall.device).view(k, 1, 1)
    tail = (slopes[:k] * fall.squeeze(2) ** degree).sum(2, keepdim=True)
    of_all = slopes.new_zeros(rows, size + 1)
    of_all.scatter_add_(1, among.flatten(1), slopes[k:-1].permute(1, 2, 0).flatten(1))
    return tail, of_all[:, :-count], of_all[:, -count:] + slopes[-1]


def block_rows(scores: Tensor) -> int:
    """Rows of a block that stays in cache; all rows on other devices."""
    rows, columns = scores.shape
    return max(1, BLOCK_ELEMENTS // max(1, columns) if scores.device.type == "cpu" else rows)


def _block_state(
    scores: Tensor, labels: Tensor, k: int, temperature: float, powers: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The largest scores, their classes, power sums of the tail, (R, k), and the tail.

    ``powers`` is scratch memory: fresh pages for every block would cost as much as the arithmetic.
    """
    kept = power_sums.kept_out(k, scores.shape[1])
    work = padded(scores, kept, working_dtype(scores.dtype)).scatter_(1, labels, -inf)
    top, places = largest(work, kept)
    top.clamp_(min=power_sums.lowest_score(work))
    # An absent class may lie in the padding; it has no gradient.
    places.clamp_(max=scores.shape[1] - 1)
    work.scatter_(1, places, -inf)
    # exp((s − t) / temperature), in base 2: more than twice as fast
    work.sub_(top[:, k - 1 : k]).mul_(LOG2_E / temperature).exp2_()
    sums = sums_of_powers(work, k, powers).to(power_sums.wide_dtype(scores))
    return top, places, sums, work


def sums_of_powers(u: Tensor, count: int, scratch: Tensor) -> Tensor:
    """``Σ_i u_i^j`` for j = 1..count, (R, count)."""
    sums = [u.sum(1)]
    if count > 1:
        torch.mul(u, u, out=scratch.resize_(u.shape))
        sums.append(scratch.sum(1))
    for _ in range(count - 2):
        sums.append(scratch.mul_(u).sum(1))
    return torch.stack(sums, 1)


def _is_long(columns: int, k: int) -> bool:
    """Whether rows are so long that searching the maxima of chunks first is faster."""
    return columns >= 512 * k


def padded(scores: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """A copy of (R, n) scores; long rows are padded with −inf to whole chunks."""
    rows, columns = scores.shape
    if not _is_long(columns, k):
        return scores.to(dtype, copy=True)
    whole = CHUNK * CHUNK
    copy = scores.new_full((rows, -(-columns // whole) * whole), -inf, dtype=dtype)
    copy[:, :columns] = scores
    return copy


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
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


def newton(sums: Tensor, k: int) -> Tensor:
    """:func:`power_sums.newton` from (d, R) to (k + 1, R); power sums beyond d are negligible."""
    result = sums.new_zeros(k + 1, sums.shape[1])
    p, q = sums.unbind(0), result.unbind(0)
    q[0].fill_(1.0)
    for j in range(1, k + 1):
        for i in range(1, min(j, len(p)) + 1):
            q[j].addcmul_(p[i - 1], q[j - i], value=(1 if i % 2 else -1) / j)
    return result


def constants(top: Tensor, sums: Tensor, temperature: float, wanted: bool) -> tuple[Tensor, Tensor]:
    """``S_k / S_{k−1}`` of the rows, (R), and if wanted the gradient's constants, see _slopes.

    Args:
        top: the largest scores of each row, descending, (m, R).
        sums: power sums of the others, (k, R).
        temperature: kτ.
        wanted: whether the gradient is.
    """
    (kept, rows), k = top.shape, len(sums)
    step = max(1, CONSTANTS_ELEMENTS // ((kept + 1) * (k + 2)))
    ratios, slopes = [], []
    for start in range(0, max(1, rows), step):
        some, p = top[:, start : start + step], sums[:, start : start + step]
        threshold = some[k - 1]
        inverted = (threshold - some[:k]).div_(temperature).exp_()
        middle = (some[k:] - threshold).div_(temperature).exp_()
        products = products_of(newton(p, k), middle, inverted)
        lower, upper = products[-1, k:].unbind(0)
        ratios.append(upper / lower)
        if wanted:
            slopes.append(_slopes(products, middle, inverted))
    return torch.cat(ratios), torch.cat(slopes, 1) if wanted else top


def products_of(q: Tensor, middle: Tensor, inverted: Tensor) -> Tensor:
    """``Q(X)``, then with every further factor ``1 + w_l X`` and ``v_i + X``, (m + 1, k + 2, R).

    Each stands behind a leading 0.
    """
    products = q.new_zeros(len(middle) + len(inverted) + 1, len(q) + 1, q.shape[1])
    shifted, plain = products[:, :-1].unbind(0), products[:, 1:].unbind(0)
    plain[0].copy_(q)
    for i, w in enumerate(middle.unbind(0)):
        torch.addcmul(plain[i], shifted[i], w, out=plain[i + 1])
    for i, v in enumerate(inverted.unbind(0), len(middle)):
        torch.addcmul(shifted[i], plain[i], v, out=plain[i + 1])
    return products


def _slopes(products: Tensor, middle: Tensor, inverted: Tensor) -> Tensor:
    """The gradient's row constants, (k + m + 1, R): coefficients of the tail, top scores, label."""
    (k, rows), others = inverted.shape, len(middle)
    lower, upper = products[-1, k:].unbind(0)
    slopes = products.new_empty(2 * k + others + 1, rows)
    below = products[-1, :-1].flip(0)  # S_{k−1} … S_0, S_{−1} = 0
    torch.div(below[:k], upper, out=slopes[:k]).sub_(below[1:].div_(lower))
    slopes[1:k:2].neg_()
    adjoint = torch.zeros_like(products[-1, 1:])
    torch.reciprocal(upper, out=adjoint[k])
    torch.reciprocal(lower, out=adjoint[k - 1]).neg_()
    slopes_of_top(products, middle, inverted, adjoint, slopes[k:-1])
    slopes[-1].fill_(-1.0)
    return slopes


def slopes_of_top(
    products: Tensor, middle: Tensor, inverted: Tensor, adjoint: Tensor, out: Tensor
) -> None:
    """Derivatives by the top scores, (m, R), from those by S, (k + 1, R), in reverse mode.

    Of something that depends on ratios of the ``S_j`` alone.
    """
    others = len(middle)
    adjoints = torch.zeros_like(products)  # each before a trailing 0
    adjoints[-1, :-1] = adjoint
    plain, shifted = adjoints[:, :-1].unbind(0), adjoints[:, 1:].unbind(0)
    factors = (*middle.unbind(0), *inverted.unbind(0))
    for i in range(len(factors) - 1, 0, -1):
        of_head = i >= others
        kept, moved = (shifted, plain) if of_head else (plain, shifted)
        torch.addcmul(kept[i + 1], moved[i + 1], factors[i], out=plain[i])
    of_heads, of_middle = out[: len(inverted)], out[len(inverted) :]
    past, before = adjoints[1:, :-1], products[:-1]
    torch.sum(past[others:].mul_(before[others:, 1:]), 1, out=of_heads).mul_(inverted).neg_()
    torch.sum(past[:others].mul_(before[:others, :-1]), 1, out=of_middle).mul_(middle)


def polynomial(coefficients: Tensor, u: Tensor, out: Tensor | None) -> Tensor:
    """``Σ_{j=1..k} c_j u^j`` by Horner's rule for u of (R, n) and coefficients of (k, R, 1)."""
    *others, last = coefficients.unbind(0)
    value = torch.mul(u, last, out=out)
    if others:
        value.add_(others[-1])  # addcmul with two broadcast operands is several times slower
        for c in reversed(others[:-1]):
            torch.addcmul(c, value, u, out=value)
        value.mul_(u)
    return value
