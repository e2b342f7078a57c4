r"""A product of linear factors without each of some of them, and its derivatives, in O(mk).

Factors are ``v + X`` for scores above a threshold, *heads*, and ``1 + w X`` for those below it, with
v and w from 0 to 1. All terms are positive, so no digits are lost. Rows are the last dimension.

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
        of_upper, of_lower = of_ratios / self.upper, of_ratios.neg() / self.lower
        injected = list(zip(of_upper.unbind(0), of_lower.unbind(0), strict=True))
        adjoints = torch.empty_like(self.earlier)  # each before a trailing 0
        adjoints[:, -1] = 0.0
        adjoints[-1, :-1] = of_whole
        plain, shifted = adjoints[:, :-1].unbind(0), adjoints[:, 1:].unbind(0)
        after, behind = self.later[:, :-1].unbind(0), self.later[:, 1:].unbind(0)
        factors, count = (*first.unbind(0), *last.unbind(0)), len(first)
        for i in range(len(factors) - 1, -1, -1):
            stays, grows = (shifted, plain) if self._is_head(i) else (plain, shifted)
            torch.addcmul(stays[i + 1], grows[i + 1], factors[i], out=plain[i])
            if i >= count:
                a, b = injected[i - count]
                plain[i].addcmul_(after[i - count], a).addcmul_(behind[i - count], b)
        of_q = plain[0]
        past, products = adjoints[1:, :-1], self.earlier[:-1]
        kept, grown = products[:, 1:], products[:, :-1]
        of_first = _sums(past[:count], (grown if self.heads else kept)[:count])
        of_last = _sums(past[count:], (kept if self.heads else grown)[count:])

        ahead = torch.empty_like(self.later[1:])  # each behind a leading 0
        ahead[:, 0] = 0.0
        plain, shifted = ahead[:, 1:].unbind(0), ahead[:, :-1].unbind(0)
        before, beside = kept[count:-1].unbind(0), grown[count:-1].unbind(0)
        for i, ((a, b), p, x) in enumerate(zip(injected[:-1], before, beside, strict=True)):
            torch.mul(p, a, out=plain[i]).addcmul_(x, b)
            if i:
                stays, grows = (shifted, plain) if self.heads else (plain, shifted)
                plain[i].add_(stays[i - 1]).addcmul_(grows[i - 1], last[i])
        next_ones = self.later[1:, :-1] if self.heads else self.later[1:, 1:]
        of_last[1:].add_(_sums(ahead[:, 1:], next_ones))
        of_first.mul_(first)
        of_last.mul_(last)
        (of_last if self.heads else of_first).neg_()
        return of_first, of_last, of_q

    def _is_head(self, i: int) -> bool:
        return self.heads == (i >= len(self.factors[0]))


def without_each(q: Tensor, first: Tensor, last: Tensor, heads: bool) -> WithoutEach:
    """Multiply Q, (k + 1, R), by factors that stay, then by those to be left out each."""
    count, left_out = len(first), len(last)
    earlier = q.new_empty(count + left_out + 1, len(q) + 1, q.shape[1])
    earlier[:, 0] = 0.0
    shifted, plain = earlier[:, :-1].unbind(0), earlier[:, 1:].unbind(0)
    plain[0].copy_(q)
    factors = (*first.unbind(0), *last.unbind(0))
    for i, factor in enumerate(factors):
        stays, grows = (shifted, plain) if heads == (i >= count) else (plain, shifted)
        torch.addcmul(stays[i], grows[i], factor, out=plain[i + 1])
    later = torch.empty_like(earlier[:left_out])
    later[-1] = 0.0
    later[-1, -2] = 1.0
    later[:, -1] = 0.0
    plain, shifted = later[:, :-1].unbind(0), later[:, 1:].unbind(0)
    stays, grows = (shifted, plain) if heads else (plain, shifted)
    for i in range(left_out - 1, 0, -1):
        torch.addcmul(stays[i], grows[i], factors[count + i], out=plain[i - 1])
    before = earlier[count:-1, 1:]
    upper, lower = _sums(before, later[:, :-1]), _sums(before, later[:, 1:])
    return WithoutEach(earlier, later, (first, last), heads, upper, lower)


def _sums(a: Tensor, b: Tensor) -> Tensor:
    """``Σ_j a_ij b_ij`` of (m, k, R), (m, R)."""
    step = max(1, SUMMED_ELEMENTS // max(1, a.shape[1] * a.shape[2]))
    parts = [(x * y).sum(1) for x, y in zip(a.split(step), b.split(step), strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
