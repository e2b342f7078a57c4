r"""A product of linear factors without each of some of them, and its derivatives, in O(mk).

Factors are ``v + X`` for scores above a threshold, *heads*, and ``1 + w X`` for those below it,
with v and w from 0 to 1. All terms are positive, so no digits are lost. Rows come last.

The coefficient of degree k without factor i is a linear function of the product of the earlier
factors: multiplied by the later ones, it has a coefficient of degree k. Both are made factor by
factor, and so are their derivatives, in the opposite direction.
"""

from typing import NamedTuple

import torch
from torch import Tensor

SUMMED_ELEMENTS = 2**15
"""Numbers of float64 that are multiplied before they are summed: 256 KB, which stay in cache."""


class WithoutEach(NamedTuple):
    """``Q(X)`` times all m factors but one, for each of the last L factors."""

    earlier: Tensor
    """Q, then with every further factor, each behind a leading 0, (m + 1, k + 2, R)."""
    later: Tensor
    """What the factors behind each of the last make of a coefficient, (L, k + 2, R).

    Entry j is that of degree k − j, and the last is 0.
    """
    factors: tuple[Tensor, Tensor]
    """v or w of the first m − L factors and of the last L, rows behind."""
    heads: bool
    """Whether the last factors are heads; the first are of the other kind."""
    upper: Tensor
    """The coefficients of degree k without each of the last factors, (L, R)."""
    lower: Tensor
    """Those of degree k − 1."""

    @property
    def whole(self) -> Tensor:
        """The product of all factors, (k + 1, R)."""
        return self.earlier[-1, 1:]

    def slopes(
        self, of_ratios: Tensor, of_whole: float | Tensor = 0.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Derivatives by the scores of first and last factors over T, and by Q, (k + 1, R).

        Args:
            of_ratios: derivatives by ``log(upper / lower)``, (L, R).
            of_whole: derivatives by the product of all factors, of something that depends on
                ratios of its coefficients alone.
        """
        first, last = self.factors
        count, heads = len(first), self.heads
        of_upper, of_lower = of_ratios / self.upper, of_ratios.neg() / self.lower
        below, products = self.earlier[:-1, :-1], self.earlier[:-1, 1:]

        of_products = torch.empty_like(self.earlier)  # each before a trailing 0
        of_products[:, -1] = 0.0
        of_products[-1, :-1] = of_whole
        _combine(
            self.later[:, :-1], of_upper, self.later[:, 1:], of_lower, of_products[count:-1, :-1]
        )
        plain, shifted = of_products[:, :-1].unbind(0), of_products[:, 1:].unbind(0)
        stays, grows = (shifted, plain) if heads else (plain, shifted)
        for i, factor in reversed(list(enumerate(last.unbind(0), count))):
            plain[i].add_(stays[i + 1]).addcmul_(grows[i + 1], factor)
        for i, factor in reversed(list(enumerate(first.unbind(0)))):
            torch.addcmul(grows[i + 1], stays[i + 1], factor, out=plain[i])
        past = of_products[1:, :-1]
        of_first = _sums(past[:count], (below if heads else products)[:count])
        of_last = _sums(past[count:], (products if heads else below)[count:])
        if len(last) > 1:
            of_later = torch.empty_like(self.later[1:])  # each behind a leading 0
            of_later[:, 0] = 0.0
            _combine(
                products[count:-1], of_upper[:-1], below[count:-1], of_lower[:-1], of_later[:, 1:]
            )
            plain, shifted = of_later[:, 1:].unbind(0), of_later[:, :-1].unbind(0)
            stays, grows = (shifted, plain) if heads else (plain, shifted)
            for i, factor in enumerate(last[1:-1].unbind(0)):
                plain[i + 1].add_(stays[i]).addcmul_(grows[i], factor)
            behind = self.later[1:, :-1] if heads else self.later[1:, 1:]
            of_last[1:].add_(_sums(of_later[:, 1:], behind))
        of_first.mul_(first)
        of_last.mul_(last)
        (of_last if heads else of_first).neg_()
        return of_first, of_last, of_products[0, :-1]


def without_each(q: Tensor, first: Tensor, last: Tensor, heads: bool) -> WithoutEach:
    """Multiply Q, (k + 1, R), by factors that stay, then by those to be left out each."""
    count, left_out = len(first), len(last)
    earlier = q.new_empty(count + left_out + 1, len(q) + 1, q.shape[1])
    earlier[:, 0] = 0.0
    earlier[0, 1:] = q
    shifted, plain = earlier[:, :-1].unbind(0), earlier[:, 1:].unbind(0)
    stays, grows = (shifted, plain) if heads else (plain, shifted)
    for i, factor in enumerate(first.unbind(0)):
        torch.addcmul(grows[i], stays[i], factor, out=plain[i + 1])
    for i, factor in enumerate(last.unbind(0), count):
        torch.addcmul(stays[i], grows[i], factor, out=plain[i + 1])
    later = torch.empty_like(earlier[:left_out])
    later[-1] = 0.0
    later[-1, -2] = 1.0
    later[:, -1] = 0.0
    plain, shifted = later[:, :-1].unbind(0), later[:, 1:].unbind(0)
    stays, grows = (shifted, plain) if heads else (plain, shifted)
    for i, factor in reversed(list(enumerate(last[1:].unbind(0)))):
        torch.addcmul(stays[i + 1], grows[i + 1], factor, out=plain[i])
    before = earlier[count:-1, 1:]
    upper, lower = _sums(before, later[:, :-1]), _sums(before, later[:, 1:])
    return WithoutEach(earlier, later, (first, last), heads, upper, lower)


def _combine(a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor, out: Tensor) -> None:
    """``a_ij x_i + b_ij y_i`` of (m, k, R) and (m, R)."""
    torch.mul(a, of_a.unsqueeze(1), out=out).addcmul_(b, of_b.unsqueeze(1))


def _sums(a: Tensor, b: Tensor) -> Tensor:
    """``Σ_j a_ij b_ij`` of (m, k, R), (m, R)."""
    if a.numel() <= SUMMED_ELEMENTS:
        return (a * b).sum(1)
    step = max(1, SUMMED_ELEMENTS // (a.shape[1] * a.shape[2]))
    parts = zip(torch.split(a, step), torch.split(b, step), strict=True)
    return torch.cat([(x * y).sum(1) for x, y in parts])
