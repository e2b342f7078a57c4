r"""A product of linear factors without each of some of them, and its derivatives, in O(mk).

Factors are ``v + X`` for scores above a threshold, *heads*, and ``1 + w X`` for those below it, with
v and w from 0 to 1. All terms are positive, so no digits are lost. Rows are the last dimension.

Without factor i, the product of the earlier factors times that of the later ones is left, and a
coefficient of it is a sum of k terms. Derivatives come by reverse mode through both products.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class WithoutEach(NamedTuple):
    """``Q(X)`` times all m factors but one, for each of the last L factors."""

    earlier: Tensor
    """Q, then with every further factor, each behind a leading 0, (m + 1, k + 2, R)."""
    later: Tensor
    """1, then the last factor, the last two, …, each behind a leading 0, (L, k + 2, R)."""
    kept: Tensor
    """v or w of the first factors, (m − L, R)."""
    left_out: Tensor
    """v or w of the last factors, (L, R)."""
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
        """Derivatives by scores over T, first those of kept factors, and by Q, (k + 1, R).

        Args:
            of_ratios: derivatives by ``log(upper / lower)``, (L, R).
            of_whole: derivatives by the product of all factors, which depend on ratios of its
                coefficients alone.
        """
        count = len(self.kept)
        of_upper, of_lower = of_ratios / self.upper, of_ratios.neg() / self.lower
        adjoints = torch.empty_like(self.earlier)
        adjoints[-1, :-1] = of_whole
        _of_partners(self.later.flip(0, 1), of_upper, of_lower, adjoints[count:-1])
        scores = _pull_back(self.earlier, adjoints, self.kept, self.left_out, self.heads)
        of_q = adjoints[0, :-1]
        adjoints = torch.empty_like(self.later)
        partners = self.earlier[count:-1].flip(0, 1)
        _of_partners(partners, of_upper.flip(0), of_lower.flip(0), adjoints)
        late = self.left_out[1:].flip(0)
        more = _pull_back(self.later, adjoints, late[:0], late, self.heads)
        scores[count + 1 :].add_(more.flip(0))
        return scores[:count], scores[count:], of_q


def without_each(q: Tensor, kept: Tensor, left_out: Tensor, heads: bool) -> WithoutEach:
    """Multiply Q, (k + 1, R), by factors that stay, then by those to be left out each."""
    earlier = _products(q, kept, left_out, heads)
    one = torch.zeros_like(q)
    one[0] = 1.0
    late = left_out[1:].flip(0)
    later = _products(one, late[:0], late, heads)
    before, after = earlier[len(kept) : -1, 1:], later.flip(0, 1)
    upper, lower = ((before * part).sum(1) for part in (after[:, :-1], after[:, 1:]))
    return WithoutEach(earlier, later, kept, left_out, heads, upper, lower)


def _products(q: Tensor, first: Tensor, last: Tensor, heads: bool) -> Tensor:
    """Q, then with every further factor, each behind a leading 0."""
    products = q.new_empty(len(first) + len(last) + 1, len(q) + 1, q.shape[1])
    products[:, 0] = 0.0
    shifted, plain = products[:, :-1].unbind(0), products[:, 1:].unbind(0)
    plain[0].copy_(q)
    for i, factor in enumerate((*first.unbind(0), *last.unbind(0))):
        is_head = heads == (i >= len(first))
        stays, grows = (shifted, plain) if is_head else (plain, shifted)
        torch.addcmul(stays[i], grows[i], factor, out=plain[i + 1])
    return products


def _of_partners(partners: Tensor, of_upper: Tensor, of_lower: Tensor, out: Tensor) -> None:
    """Derivatives by products from those by two coefficients of what they are multiplied to.

    Partners are in descending order of degree, before a trailing 0.
    """
    plain = torch.mul(partners[:, :-1], of_upper.unsqueeze(1), out=out[:, :-1])
    plain.addcmul_(partners[:, 1:], of_lower.unsqueeze(1))


def _pull_back(
    products: Tensor, adjoints: Tensor, first: Tensor, last: Tensor, heads: bool
) -> Tensor:
    """Derivatives by scores, (m, R), from direct ones by the products of last factors.

    Adjoints, each before a trailing 0, are completed down to that of Q; the others are overwritten.
    """
    adjoints[:, -1] = 0.0
    plain, shifted = adjoints[:, :-1].unbind(0), adjoints[:, 1:].unbind(0)
    factors = (*first.unbind(0), *last.unbind(0))
    for i in range(len(factors) - 1, -1, -1):
        is_head = heads == (i >= len(first))
        stays, grows = (shifted, plain) if is_head else (plain, shifted)
        if i >= len(first):
            plain[i].add_(stays[i + 1]).addcmul_(grows[i + 1], factors[i])
        else:
            torch.addcmul(stays[i + 1], grows[i + 1], factors[i], out=plain[i])
    result = torch.empty_like(torch.cat([first, last]))
    past, before, count = adjoints[1:, :-1], products[:-1], len(first)
    for part, factor, is_head in (
        (slice(count), first, not heads),
        (slice(count, None), last, heads),
    ):
        grows = before[part, 1:] if is_head else before[part, :-1]
        slopes = torch.sum(past[part].mul_(grows), 1, out=result[part]).mul_(factor)
        if is_head:
            slopes.neg_()
    return result
