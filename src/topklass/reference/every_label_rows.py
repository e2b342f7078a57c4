r"""The few numbers of a row that losses of every label need: float64, rows in the last dimension.

See :mod:`topklass.reference.every_label`. A row is given by its leaders ``top``, (M, R) in
descending order, and by the power sums of its tail seen from the least of them, (K, R).
"""

from math import inf, log
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from topklass._lists import Lists
from topklass.reference import fused
from topklass.reference.leave_one_out import WithoutEach, without_each
from topklass.reference.power_sums import LINEAR_FROM, wide_dtype, working_dtype


class Weights(NamedTuple):
    """How much classes count as labels."""

    every: float | Tensor
    """Of all classes: a number, (1, n) or (R, n)."""
    labels: Tensor | None = None
    """(R, 1)."""
    own: float | Tensor = 0.0
    """What the labels have besides: a number or (R, 1)."""

    def dense(self, scores: Tensor) -> Tensor:
        """The weight of every class, (R, n)."""
        if isinstance(self.every, Tensor):
            every = self.every.expand(scores.shape)
        else:
            every = torch.full_like(scores, self.every, dtype=working_dtype(scores.dtype))
        if self.labels is None:
            return every
        return every.scatter(1, self.labels, every.gather(1, self.labels) + self.own)

    def apart(self) -> "tuple[Weights, tuple[Tensor | None, ...]]":
        """The numbers, and the tensors in their places, which autograd saves."""
        every, own = (0.0 if isinstance(each, Tensor) else each for each in (self.every, self.own))
        return Weights(every, None, own), tuple(
            each if isinstance(each, Tensor) else None for each in self
        )

    def joined(self, every: Tensor | None, labels: Tensor | None, own: Tensor | None) -> "Weights":
        """The inverse of :meth:`apart`."""
        return Weights(
            self.every if every is None else every, labels, self.own if own is None else own
        )

    def of_rows(self, rows: slice) -> "Weights":
        """Those in some rows."""
        every, labels, own = self
        return Weights(
            every[rows] if isinstance(every, Tensor) and len(every) > 1 else every,
            None if labels is None else labels[rows],
            own[rows] if isinstance(own, Tensor) else own,
        )

    def at(self, places: Tensor) -> Tensor:
        """Those of some classes, (R, m), in float64."""
        wide, every = wide_dtype(places), self.every
        if isinstance(every, Tensor):
            every = every.expand(len(places), -1).gather(1, places).to(wide)
        of_places = torch.as_tensor(every, dtype=wide, device=places.device).expand(places.shape)
        return of_places if self.labels is None else of_places + self.own * (places == self.labels)


class _Length(NamedTuple):
    """The leaders as labels of lists of one length k."""

    listed: WithoutEach
    """The k largest, seen from the score below them."""
    others: WithoutEach
    """Seen from the least of the k largest."""
    falls: tuple[Tensor, Tensor]
    """What powers 0..k of the tail are multiplied by in either view, (k + 1, R)."""
    share: Tensor
    """``P_k exp(m (θ − threshold) / T) / S_k`` for the longest list's threshold θ, m = 1..k."""

    @property
    def whole(self) -> Tensor:
        """``S_0 … S_k`` seen from the least of the k largest, (k + 1, R)."""
        return self.others.whole


class Row(NamedTuple):
    """Leaders, and the marginals of the tail, ``π = C_0 u Σ_m h_m (−u)^m``."""

    top: Tensor
    q: Tensor
    """Elementary symmetric polynomials of the tail, (K + 1, R)."""
    h: Tensor
    """(K, R), the first is 1."""
    first: Tensor
    """``C_0``, (R)."""
    log_first: Tensor
    """Its logarithm, also where it underflows, (R)."""
    above: Tensor
    """C_0 seen from the longest list's threshold instead, which never underflows, (R)."""
    fall: Tensor
    """``exp(−m (θ − t) / T)``, m = 0..K − 1, (K, R)."""
    lengths: list[_Length]


def read_rows(top: Tensor, sums: Tensor, lists: Lists) -> Row:
    """The polynomials of rows for all lengths of lists."""
    longest, temperature = max(lists.lengths), lists.temperature
    q = fused.newton(sums, longest)
    threshold = top[longest - 1]
    coefficients, each = torch.zeros_like(q[1:]), []
    for k, chance in zip(lists.lengths, lists.chances, strict=True):
        views = []
        for seen_from, listed in ((top[k], True), (top[k - 1], False)):
            fall = _powers((top[-1] - seen_from) / temperature, k)
            heads = (seen_from - top[:k]).div_(temperature).exp_()
            middle = (top[k:] - seen_from).div_(temperature).exp_()
            first, last = (middle, heads) if listed else (heads, middle)
            views.append((fall, without_each(q[: k + 1] * fall, first, last, listed)))
        (fall_of_listed, of_listed), (fall_of_others, of_others) = views
        s = of_others.whole
        share = _powers((threshold - top[k - 1]) / temperature, k)[1:] * (chance / s[k])
        coefficients[:k].addcmul_(s[:k].flip(0), share)
        each.append(_Length(of_listed, of_others, (fall_of_listed, fall_of_others), share))
    above, depth = coefficients[0], (top[-1] - threshold) / temperature
    powers = _powers(depth, longest - 1)
    h, log_first = coefficients / above * powers, depth + above.log()
    return Row(top, q, h, above * depth.exp(), log_first, above, powers, each)


def losses_of_leaders(
    row: Row, lists: Lists, margin: float | Tensor, weights: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Losses (M, R) of the leaders as labels, and weighted derivatives by their gaps."""
    top, gaps = row.top, []
    for k, (listed, others, _, _) in zip(lists.lengths, row.lengths, strict=True):
        ratios = torch.cat([listed.upper / listed.lower, others.upper / others.lower])
        falls = torch.cat([top[k] - top[:k], top[k - 1] - top[k:]])
        gaps.append(falls.div_(lists.temperature).add_(ratios.log_()).add_(margin))
    losses = [F.softplus(gap, threshold=LINEAR_FROM) for gap in gaps]
    mixed_losses, shares = mixed(losses, lists.chances), []
    for chance, gap, loss in zip(lists.chances, gaps, losses, strict=True):
        share = gap.sigmoid() * (mixed_losses - loss).exp_() * chance
        shares.append(torch.where(weights == 0, 0.0, share * weights))
    return mixed_losses, shares


def slopes_of_rows(row: Row, moments: Tensor, shares: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Derivatives by leaders over T, (M, R), and of the tail ``Σ_j d_j u^j``, j = 1..D, (D, R).

    Args:
        row: of D power sums.
        moments: of the tail, (D, R); derivatives by ``C_m`` are ``−moments / C_0``.
        shares: derivatives by the gaps of the leaders as labels, for each length.
    """
    count = len(moments)
    by_coefficient = (moments * row.fall[:count]).div_(row.above).neg_()
    of_top, of_q = torch.zeros_like(row.top), torch.zeros_like(row.q)
    for length, share in zip(row.lengths, shares, strict=True):
        s, k = length.whole, len(length.share)
        by_whole, m = torch.zeros_like(s), min(count, k)
        by_whole[k - m : k] = (by_coefficient[:m] * length.share[:m]).flip(0)
        by_whole[k] = (by_whole[:k] * s[:k]).sum(0).div_(s[k]).neg_()
        below, above, of_listed = length.listed.slopes(share[:k])
        more_above, more_below, of_others = length.others.slopes(share[k:], by_whole)
        of_top[:k].add_(above).add_(more_above)
        of_top[k:].add_(below).add_(more_below)
        of_top.sub_(share)
        of_q[: k + 1].addcmul_(of_listed, length.falls[0]).addcmul_(of_others, length.falls[1])
    tail = [(of_q[j:] * row.q[:-j]).sum(0) for j in range(1, count + 1)]
    tail[1::2] = [each.neg_() for each in tail[1::2]]
    return of_top, torch.stack(tail)


def weighted_losses_of_leaders(
    scores: Tensor, row: Row, places: Tensor, weights: Weights, lists: Lists
) -> tuple[Tensor, list[Tensor]]:
    """Weighted losses of the leaders, (R), and derivatives by their gaps."""
    margin, absent = lists.margin, scores.gather(1, places).t() == -inf
    if isinstance(margin, Tensor) and margin.dim():
        margin = margin.to(row.top.dtype)[places].t()
    w = weights.at(places).t()
    losses, shares = losses_of_leaders(row, lists, margin, w.masked_fill(absent, 0.0))
    losses = losses.masked_fill(absent, inf) * w
    return losses.masked_fill_(w == 0, 0.0).sum(0), shares


def weighted_loss_of_label(
    scores: Tensor, row: Row, places: Tensor, weights: Weights, lists: Lists, moments: Tensor
) -> tuple[Tensor, Tensor]:
    """The weighted loss of labels in the tail, (R), and T times its direct derivative by them.

    Their part of the moments, (R, D), is added to these.
    """
    labels, margin, least, count = weights.labels, lists.margin, row.top[-1], moments.shape[1]
    assert labels is not None
    if isinstance(margin, Tensor) and margin.dim():
        margin = margin.to(least.dtype)[labels].squeeze(1)
    w = torch.as_tensor(weights.own, dtype=least.dtype, device=least.device)
    w = w.expand(labels.shape).masked_fill((places == labels).any(1, keepdim=True), 0.0).squeeze(1)
    depth = (scores.gather(1, labels).squeeze(1) - least) / lists.temperature
    depth = depth.masked_fill(w == 0, 0.0)
    u = depth.exp()
    powers = (-u).unsqueeze(1) ** torch.arange(count, device=u.device)
    terms = row.h[:count].t() * powers
    h = terms.sum(1)
    reach = torch.expm1(-torch.as_tensor(margin, dtype=u.dtype, device=u.device))
    missing = 1 + reach * row.first * u * h
    loss = (missing / h).log() + margin - depth - row.log_first
    inverse = w.masked_fill(depth == -inf, 0.0) / (h * missing)
    moments += inverse.unsqueeze(1) * powers
    degree = torch.arange(1, count + 1, device=u.device)
    return (loss * w).masked_fill(w == 0, 0.0), -inverse * (terms * degree).sum(1)


def mixed(losses: list[Tensor], chances: tuple[float, ...]) -> Tensor:
    """``−log Σ_k P_k e^{−ℓ_k}``, to the last digits of losses near 0 and of small chances.

    The least loss is taken out of the sum, and what is left is at most 1. For an absent label every
    loss is +inf: so is the result, with gradient 0.
    """
    if len(losses) == 1:
        return losses[0] - log(chances[0])
    least = torch.stack(losses).amin(0).detach()
    absent = least == inf
    falls = [(least - loss).masked_fill(absent, 0.0) for loss in losses]
    pairs = list(zip(chances, falls, strict=True))
    kept = torch.stack([p * fall.exp() for p, fall in pairs]).sum(0)
    change = torch.stack([p * torch.expm1(fall) for p, fall in pairs]).sum(0)
    near = change > -0.5
    log_kept = torch.where(near, change.masked_fill(~near, 0.0).log1p(), kept.log())
    return least - log_kept


def _powers(log: Tensor, count: int) -> Tensor:
    """``x^0 … x^count`` of a logarithm along a new first dimension."""
    degree = torch.arange(count + 1, device=log.device, dtype=log.dtype)
    return (degree.unsqueeze(1) * log).exp_()
