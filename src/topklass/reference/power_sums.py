r"""Elementary symmetric polynomials by threshold-scaled power sums: the default algorithm.

**Problem.** For ``x = scores / temperature`` and ``e = exp(x)``, find ratios of the elementary
symmetric polynomials ``σ_j(e)`` without overflow, log space or approximation.

**Closed form.** Split the row into its ``m`` largest scores ``h_1 ≥ … ≥ h_m``, the *heads*, and
the *tail* below the threshold ``t = h_m``. Nothing in

* ``u_i = exp(x_i − t) ≤ 1`` (tail), ``v_i = exp(t − h_i) ≤ 1`` (heads, inverted),
* ``p_j = Σ_tail u_i^j``, one pass over the row,
* ``q_j = σ_j(u)`` from the ``p_j`` by Newton's identities,
* ``S_j = [X^j] Q(X) · Π_i (v_i + X)``,

overflows in float64 as long as the number of sets, C(n, k), does not, and
``σ_j(e) = exp(j·t) · Π_i exp(h_i − t) · S_j``. The state ``(h, p)`` of a row has ``O(k)`` numbers.

**Limits.** Newton's identities add with alternating signs: relative to ``σ_k`` the rounding of the
power sums is amplified by at most 2^k/(k + 1), reached with k ties and one score just below. For
given labels, long lists take the 2k largest scores out of the tail. The threshold stays at the
k-th, and the k scores below it, the *middle*, join by ``Q(X) · Π_i (1 + w_i X)`` with
``w_i = exp(h_i − t) ≤ 1``. Then ``σ_k`` is so large that float32 serves every k. Elsewhere, and
where ``σ_k`` itself overflows, :mod:`topklass.reference.tree` takes over beyond the limits below.
``tests/test_accuracy.py`` measures both sides of each limit.

The functions here are plain differentiable operations: autograd, forward mode, ``vmap`` and
``torch.compile`` go through them to any order. The threshold is detached everywhere because the
results do not depend on it. A score of −inf is an *absent* class.
"""

from math import inf, lgamma
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST_K_IN_FLOAT32 = 10
"""Powers of the tail in float32 up to this k (amplification 93), in float64 beyond."""

LARGEST_K = {torch.float32: 32, torch.float64: 12}
"""Power sums up to this k for scores of this precision: errors near 1e-7 and 1e-13."""

LARGEST_K_OF_LABELS = 256
"""For given labels, the tree is faster beyond this k: the top scores take O(k²) operations."""

LARGEST_LOG = 690.0
"""Below the logarithm of the largest number of float64."""

LINEAR_FROM = 40.0
"""From here on softplus(z) equals z to the last digit of float64."""


class Split(NamedTuple):
    """A row as heads and tail, both scaled by the threshold."""

    heads: Tensor
    """The largest scores in descending order, (…, m), never below :func:`lowest_score`."""
    places: Tensor
    """Their classes, (…, m)."""
    threshold: Tensor
    """The smallest head, detached, (…, 1)."""
    tail: Tensor
    """``u = exp((s − threshold) / temperature)``, 0 at the heads, (…, n)."""
    inverted: Tensor
    """``v = exp((threshold − heads) / temperature)``, (…, m)."""


def split(scores: Tensor, count: int, temperature: float) -> Split:
    """Take the ``count`` largest scores out of each row."""
    heads, places = scores.topk(count, dim=-1)
    heads = heads.clamp(min=lowest_score(scores))
    threshold = heads[..., -1:].detach()
    tail = ((scores.scatter(-1, places, -inf) - threshold) / temperature).exp()
    inverted = ((threshold - heads) / temperature).exp()
    return Split(heads, places, threshold, tail, inverted)


def kept_out(k: int, classes: int) -> int:
    """How many of the largest scores are kept out of the power sums, for given labels."""
    return min(k if k <= LARGEST_K_IN_FLOAT32 else 2 * k, classes)


def lowest_score(scores: Tensor) -> float:
    """A finite stand-in for the −inf of an absent class.

    A threshold this low makes the log ratio so negative that loss and gradient are exactly 0. That
    is right for a label with fewer than k rivals, and needs no mask. Also in float64 it is a number
    of float32: ONNX export rounds constants to that, and would make −inf of a smaller one.
    """
    return max(torch.finfo(scores.dtype).min, torch.finfo(torch.float32).min)


def power_sums(tail: Tensor, count: int) -> Tensor:
    """``p_j = Σ_i u_i^j`` for j = 1..count, (…, count)."""
    power, sums = tail, [tail.sum(-1)]
    for _ in range(count - 1):
        power = power * tail
        sums.append(power.sum(-1))
    return torch.stack(sums, -1)


def newton(sums: Tensor) -> Tensor:
    """``q_j = (1/j) Σ_{i=1..j} (−1)^{i−1} q_{j−i} p_i``, (…, k) to (…, k + 1) from degree 0."""
    k = sums.shape[-1]
    sign = torch.ones(k, dtype=sums.dtype, device=sums.device)
    sign[1::2] = -1
    signed = sums * sign
    descending = torch.ones_like(sums[..., :1])
    for j in range(1, k + 1):
        total = (signed[..., :j] * descending).sum(-1, keepdim=True)
        descending = torch.cat([total / j, descending], -1)
    return descending.flip(-1)


def shift(polynomial: Tensor) -> Tensor:
    """Multiply by X, dropping the highest coefficient."""
    return F.pad(polynomial[..., :-1], (1, 0))


def with_heads(q: Tensor, inverted: Tensor) -> Tensor:
    """``S = Q(X) · Π_i (v_i + X)``, truncated to the length of ``q``."""
    for v in columns(inverted):
        q = v * q + shift(q)
    return q


def with_middle(q: Tensor, middle: Tensor) -> Tensor:
    """``Q(X) · Π_i (1 + w_i X)``, truncated to the length of ``q``."""
    for w in columns(middle):
        q = q + w * shift(q)
    return q


def without_each_head(q: Tensor, inverted: Tensor, count: int) -> Tensor:
    """``Q(X) · Π_{i≠m} (v_i + X)`` for the first ``count`` heads m, (…, count, len(q))."""
    product = q.unsqueeze(-2).expand(*q.shape[:-1], count, q.shape[-1])
    member = torch.arange(count, device=q.device).unsqueeze(-1)
    for i, v in enumerate(inverted.unsqueeze(-1).unbind(-2)):
        grown = v.unsqueeze(-1) * product + shift(product)
        product = torch.where(member == i, product, grown)
    return product


def horner(coefficients: Tensor, u: Tensor) -> Tensor:
    """``Σ_m c_m (−u)^m`` for each element of a row, coefficients (…, k), u (…, n)."""
    *others, last = columns(coefficients)
    value = last.expand_as(u)
    for c in reversed(others):
        value = c - u * value
    return value


def columns(matrix: Tensor) -> tuple[Tensor, ...]:
    """The entries along the last dimension, (…, 1) each."""
    return matrix.unsqueeze(-2).unbind(-1)


def smooth_gap(scores: Tensor, labels: Tensor, k: int, tau: float) -> Tensor:
    r"""``τ log σ_k(e\y) − τ log σ_{k−1}(e\y) − s_y/k`` for each of m labels y, (…, m), in float64.

    Here and below ``e = exp(s / (kτ))``. Very negative where fewer than k classes are present
    besides the label, +inf where the label itself is absent.
    """
    wide, temperature = wide_dtype(scores), k * tau
    label = scores.gather(-1, labels).to(wide)
    rest = scores.scatter(-1, labels, -inf)
    top, places = rest.topk(kept_out(k, scores.shape[-1]), dim=-1)
    top = top.clamp(min=lowest_score(scores))
    tail = ((rest.scatter(-1, places, -inf) - top[..., k - 1 : k].detach()) / temperature).exp()
    sums = power_sums(tail, k).to(wide)
    rivals = rivals_of_labels(top.to(wide), sums, label, labels, temperature)
    threshold = rivals.top[..., k - 1 : k].detach()
    middle = ((rivals.top[..., k:] - threshold) / temperature).exp()
    inverted = ((threshold - rivals.top[..., :k]) / temperature).exp()
    s = with_heads(with_middle(newton(rivals.sums), middle), inverted)
    return (threshold.squeeze(-1) - label) / k + tau * (s[..., k] / s[..., k - 1]).log()


class Rivals(NamedTuple):
    """A row without each of its m labels, the other labels among its top scores."""

    top: Tensor
    """The row's l largest scores and its other labels, descending, (…, m, l + m − 1)."""
    sums: Tensor
    """Power sums of the tail, seen from the k-th of them, (…, m, k)."""
    places: Tensor
    """Where the top scores stand among the row's l largest and its m labels."""
    fall: Tensor
    """``exp(−x / T)`` for a threshold that is x above that of the row without labels, (…, m, 1)."""


def rivals_of_labels(
    top: Tensor, sums: Tensor, label: Tensor, labels: Tensor, temperature: float
) -> Rivals:
    """Put the other labels back into a row that was read without any of its labels.

    Args:
        top: the largest scores of the row without its labels, descending, (…, l), l ≥ k.
        sums: power sums of its tail of degree 1 to k, (…, k).
        label: the labels' scores, (…, m).
        labels: (…, m); one that is listed twice is no rival of itself, and one rival of others.
        temperature: T.
    """
    k, m, size = sums.shape[-1], labels.shape[-1], top.shape[-1] + labels.shape[-1] - 1
    slots = torch.arange(size, device=labels.device).expand(*labels.shape, size)
    if m == 1:
        one = torch.ones_like(label).unsqueeze(-1)
        return Rivals(top.unsqueeze(-2), sums.unsqueeze(-2), slots, one)
    same = labels.unsqueeze(-1) == labels.unsqueeze(-2)
    first = same.long().argmax(-1, keepdim=True) + top.shape[-1]
    once = label.masked_fill(same.tril(-1).any(-1), -inf)
    every = torch.cat([top, once], -1)
    order = every.argsort(-1, descending=True).unsqueeze(-2).expand(*labels.shape, size + 1)
    behind = (order == first).cumsum(-1)[..., :size]  # 1 for those that the label stands before
    places = order.gather(-1, slots + behind)
    each = every.unsqueeze(-2).expand(*labels.shape, size + 1)
    rivals = each.gather(-1, places).clamp(min=lowest_score(top))
    threshold = rivals[..., k - 1 : k].detach()
    fall = ((top[..., k - 1 : k].detach().unsqueeze(-2) - threshold) / temperature).exp()
    degree = torch.arange(1, k + 1, device=labels.device)
    return Rivals(rivals, sums.unsqueeze(-2) * fall**degree, places, fall)


def smooth_gap_every_label(scores: Tensor, k: int, tau: float) -> Tensor:
    r"""``τ log σ_k(e\c) − τ log σ_{k−1}(e\c) − s_c/k`` for every class c, (…, n), in O(nk)."""
    row = split(scores, k + 1, k * tau)
    return gap_of_classes(scores, row.heads, power_sums(row.tail, k), row.places[..., :k], k, tau)


def gap_of_classes(
    scores: Tensor, heads: Tensor, sums: Tensor, places: Tensor, k: int, tau: float
) -> Tensor:
    """The same from k + 1 heads, the power sums of the tail below them, and the leaders' places.

    The k largest classes, the leaders, are left out one by one from k + 1 heads by positive
    products. For any other class the k heads stay, and ``T_j = σ_j`` without it follows from
    ``T_j = S_j − u_c T_{j−1}``, one Horner evaluation.
    """
    temperature = k * tau
    below, leaders = heads[..., -1:].detach(), heads[..., :k]
    tail = newton(sums)
    inverted = ((below - heads) / temperature).exp()
    without = without_each_head(tail, inverted, k)
    of_leaders = (below - leaders) / k + tau * (without[..., k] / without[..., k - 1]).log()

    # Seen from the k-th score, with the (k + 1)-th in the tail: q_j = δ^j (q'_j + q'_{j−1}).
    threshold = leaders[..., -1:].detach()
    degree = torch.arange(k + 1, device=scores.device, dtype=scores.dtype)
    drop = ((below - threshold) / temperature).exp() ** degree
    joined = (tail + shift(tail) / inverted[..., k:]) * drop
    s = with_heads(joined, ((threshold - leaders) / temperature).exp())
    ratio = s[..., k:] / s[..., k - 1 : k]
    excess = scores - threshold
    u = (excess / temperature).scatter(-1, places, -inf).exp()
    kept = horner(s[..., :k].flip(-1) / s[..., k - 1 : k], u)
    of_others = tau * ((ratio - u * kept) / kept).log() - excess / k
    gaps = of_others.scatter(-1, places, of_leaders)
    return gaps.masked_fill(scores == -inf, inf)


def log_esp(scores: Tensor, k: int) -> Tensor:
    """``log σ_0 … log σ_k`` of ``exp(scores)``, (…, k + 1).

    The heads join in log space: σ_j for small j lies far below σ_k when the spread is large.
    """
    row = split(scores, k, 1.0)
    here = ~(row.heads <= lowest_score(scores))  # also NaN
    lowest = row.heads.masked_fill(~here, inf).amin(-1, keepdim=True).detach()
    lowest = lowest.masked_fill(lowest == inf, 0.0)
    rise = (row.heads - lowest).masked_fill(~here, 0.0)
    log_s = log(newton(power_sums(row.tail, k)).clamp(min=0))
    for present, r in zip(columns(here), columns(rise), strict=True):
        carried = F.pad(log_s[..., :-1], (1, 0), value=-inf)
        log_s = torch.where(present, log_add(log_s - r, carried), log_s)
    degree = torch.arange(k + 1, device=scores.device, dtype=scores.dtype)
    result = degree * lowest + rise.sum(-1, keepdim=True) + log_s
    return result.masked_fill(log_s == -inf, -inf)


def marginals(scores: Tensor, k: int) -> Tensor:
    r"""``π_i = e_i σ_{k−1}(e\i) / σ_k(e)``, (…, n); 1 for all present classes if fewer than k."""
    row = split(scores, k, 1.0)
    tail = newton(power_sums(row.tail, k))
    s = with_heads(tail, row.inverted)
    of_others = row.tail * horner(s[..., :k].flip(-1) / s[..., k:], row.tail)
    of_heads = without_each_head(tail, row.inverted, k)[..., k - 1] / s[..., k:]
    result = of_others.scatter(-1, row.places, of_heads)
    return result.masked_fill(scores == -inf, 0.0)


def log(x: Tensor) -> Tensor:
    """Log with log 0 = −inf and gradient 0 there."""
    zero = x == 0
    return x.masked_fill(zero, 1.0).log().masked_fill(zero, -inf)


def log_add(a: Tensor, b: Tensor) -> Tensor:
    """Log of the sum of exponentials, smooth to any order, with gradient 0 where both are −inf."""
    first = a >= b
    high, low = torch.where(first, a, b), torch.where(first, b, a)
    high = high.masked_fill(high == -inf, 0.0)
    total = high + F.softplus(low - high)
    return total.masked_fill((a == -inf) & (b == -inf), -inf)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Scores of less than single precision are worked on in single precision."""
    return dtype if dtype == torch.float64 else torch.float32


def power_dtype(dtype: torch.dtype, k: int) -> torch.dtype:
    """The precision in which powers of the tail are computed and summed."""
    return torch.float64 if k > LARGEST_K_IN_FLOAT32 else working_dtype(dtype)


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Float64 where the device has it: row constants are few, and their digits matter."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def serves_labels(k: int, classes: int, device: torch.device) -> bool:
    """Whether :func:`smooth_gap` is fast, and ``S_k``, at most C(n, k), does not overflow."""
    subsets = lgamma(classes + 1) - lgamma(k + 1) - lgamma(classes - k + 1)
    return device.type != "mps" and k <= LARGEST_K_OF_LABELS and subsets < LARGEST_LOG


def is_accurate(k: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether power sums are accurate enough for scores of this dtype."""
    return device.type != "mps" and k <= LARGEST_K[working_dtype(dtype)]
