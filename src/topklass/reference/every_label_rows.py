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


class Slopes(NamedTuple):
    """Derivatives by the scores over T."""

    tail: Tensor
    """Coefficients of ``Σ_j d_j u^j``, j = 1..K, (K, R)."""
    top: Tensor
    """Of the leaders, (M, R)."""


class _Length(NamedTuple):
    """The polynomials of a row seen from the threshold of one length k."""

    products: Tensor
    middle: Tensor
    inverted: Tensor
    fall: Tensor
    """``exp((t − threshold) / T)`` for the least leader t, (R)."""
    share: Tensor
    """``P_k exp(m (θ − threshold) / T) / S_k`` for the longest list's threshold θ, m = 1..k."""

    @property
    def polynomial(self) -> Tensor:
        """``S_0 … S_k``, (k + 1, R)."""
        return self.products[-1, 1:]


class Tail(NamedTuple):
    """The marginals of the tail, ``π = C_0 u Σ_m h_m (−u)^m``."""

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
    lists: list[_Length]


def marginals_of_tail(top: Tensor, sums: Tensor, lists: Lists) -> Tail:
    """The polynomial that gives the marginal of every class in the tail."""
    longest, temperature = len(sums), lists.temperature
    threshold = top[longest - 1]
    coefficients, each = torch.zeros_like(sums), []
    for k, chance in zip(lists.lengths, lists.chances, strict=True):
        own = top[k - 1]
        inverted = (own - top[:k]).div_(temperature).exp_()
        middle = (top[k:] - own).div_(temperature).exp_()
        fall = ((top[-1] - own) / temperature).exp()
        products = fused.products_of(fused.newton(sums[:k] * _powers(fall, k)), middle, inverted)
        share = _powers(((threshold - own) / temperature).exp(), k) * (chance / products[-1, -1])
        coefficients[:k].addcmul_(products[-1, 1:-1].flip(0), share)
        each.append(_Length(products, middle, inverted, fall, share))
    above, depth = coefficients[0], (top[-1] - threshold) / temperature
    fall = depth.exp()
    powers = torch.cat([torch.ones_like(fall).unsqueeze(0), _powers(fall, longest - 1)])
    log_first = depth + above.log()
    return Tail(coefficients / above * powers, above * fall, log_first, above, powers, each)


def slopes_through_tail(tail: Tail, moments: Tensor) -> Slopes:
    """Slopes of the losses in the tail through ``C_m``; by ``C_m`` they are ``−moments / C_0``."""
    by_coefficient = (moments * tail.fall).div_(tail.above).neg_()
    top = moments.new_zeros(len(tail.lists[0].products) - 1, moments.shape[1])
    slopes = Slopes(torch.zeros_like(tail.h), top)
    for products, middle, inverted, fall, share in tail.lists:
        k, s = len(share), products[-1, 1:]
        adjoint = torch.empty_like(s)
        torch.mul(by_coefficient[:k].flip(0), share.flip(0), out=adjoint[:k])
        adjoint[k] = (adjoint[:k] * s[:k]).sum(0).div_(s[k]).neg_()
        of_top = torch.empty_like(slopes.top)
        fused.slopes_of_top(products, middle, inverted, adjoint, of_top)
        slopes.top.add_(of_top)
        power = torch.ones_like(fall).neg_()
        for j in range(1, k + 1):
            power = power * -fall
            slopes.tail[j - 1].addcmul_((adjoint[j:] * s[: k + 1 - j]).sum(0), power)
    return slopes


def losses_of_leaders(
    top: Tensor, sums: Tensor, lists: Lists, margin: float | Tensor, weights: Tensor
) -> tuple[Tensor, Slopes]:
    """Losses (M, R) of the leaders as labels, and slopes of their weighted sum.

    Each of them is the label of a row of its own, in which the others are the top scores.
    """
    (count, rows), temperature = top.shape, lists.temperature
    others = torch.arange(count - 1, device=top.device).repeat(count, 1)
    others += others >= torch.arange(count, device=top.device).unsqueeze(1)
    rivals = top[others.t()].flatten(1)  # (M − 1, M·R)
    gaps, each = [], []
    for k in lists.lengths:
        threshold = rivals[k - 1].view(count, rows)
        fall = _powers(((top[-1] - threshold) / temperature).exp(), k)
        seen = (sums[:k].unsqueeze(1) * fall).flatten(1)
        ratio, slopes = fused.constants(rivals, seen, temperature, True)
        gaps.append((threshold - top) / temperature + ratio.view(count, rows).log_() + margin)
        each.append((fall, slopes.view(len(slopes), count, rows)))
    losses = [F.softplus(gap, threshold=LINEAR_FROM) for gap in gaps]
    mixed_losses = mixed(losses, lists.chances)
    result = Slopes(torch.zeros_like(sums), torch.zeros_like(top))
    for k, chance, gap, loss, (fall, slopes) in zip(
        lists.lengths, lists.chances, gaps, losses, each, strict=True
    ):
        share = gap.sigmoid() * (mixed_losses - loss).exp_() * chance
        share = torch.where(weights == 0, 0.0, share * weights)
        result.tail[:k].add_((slopes[:k] * fall).mul_(share).sum(1))
        result.top.sub_(share).index_add_(
            0, others.t().flatten(), (slopes[k:-1] * share).flatten(0, 1)
        )
    return mixed_losses, result


def weighted_losses_of_leaders(
    scores: Tensor, top: Tensor, sums: Tensor, places: Tensor, weights: Weights, lists: Lists
) -> tuple[Tensor, Slopes]:
    """Weighted losses of the leaders, (R), and their slopes."""
    margin, absent = lists.margin, scores.gather(1, places).t() == -inf
    if isinstance(margin, Tensor) and margin.dim():
        margin = margin.to(top.dtype)[places].t()
    w = weights.at(places).t()
    losses, slopes = losses_of_leaders(top, sums, lists, margin, w.masked_fill(absent, 0.0))
    losses = losses.masked_fill(absent, inf) * w
    return losses.masked_fill_(w == 0, 0.0).sum(0), slopes


def weighted_loss_of_label(
    scores: Tensor,
    least: Tensor,
    places: Tensor,
    weights: Weights,
    lists: Lists,
    tail: Tail,
    moments: Tensor,
) -> tuple[Tensor, Tensor]:
    """The weighted loss of labels in the tail, (R), and T times its direct derivative by them.

    Their part of the moments is added to these.
    """
    labels, margin = weights.labels, lists.margin
    assert labels is not None
    if isinstance(margin, Tensor) and margin.dim():
        margin = margin.to(least.dtype)[labels].squeeze(1)
    w = torch.as_tensor(weights.own, dtype=least.dtype, device=least.device)
    w = w.expand(labels.shape).masked_fill((places == labels).any(1, keepdim=True), 0.0).squeeze(1)
    depth = (scores.gather(1, labels).squeeze(1) - least) / lists.temperature
    depth = depth.masked_fill(w == 0, 0.0)
    u, count = depth.exp(), len(tail.h)
    powers = (-u).unsqueeze(1) ** torch.arange(count, device=u.device)
    terms = tail.h.t() * powers
    h = terms.sum(1)
    reach = torch.expm1(-torch.as_tensor(margin, dtype=u.dtype, device=u.device))
    missing = 1 + reach * tail.first * u * h
    loss = (missing / h).log() + margin - depth - tail.log_first
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


def _powers(x: Tensor, count: int) -> Tensor:
    """``x^1 … x^count`` along a new first dimension."""
    degree = torch.arange(1, count + 1, device=x.device, dtype=x.dtype)
    return x ** degree.view(-1, *(1,) * x.dim())
