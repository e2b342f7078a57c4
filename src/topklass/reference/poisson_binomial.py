r"""How many of many independent events happen: the Poisson-binomial distribution.

**Problem.** Event i happens with probability ``p_i``. Find the probability that fewer than k do,
that is the sum of the first k coefficients of ``Π_i (1 − p_i + p_i X)``.

**Closed form.** These are elementary symmetric polynomials of the odds ``p_i / (1 − p_i)``, times
``Π_i (1 − p_i)``. The k most probable events are multiplied in one by one, all terms positive; the
others go through power sums of their odds relative to the k-th, and Newton's identities, see
:mod:`topklass.reference.power_sums`. For large k a tree of such products does it all.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from topklass.reference.limits import by_power_sums, power_dtype
from topklass.reference.power_sums import columns, newton, power_sums, shift, wide_dtype


def fewer_than(k: int, log_in: Tensor, log_out: Tensor) -> Tensor:
    """Probability that fewer than k of the events happen, (…, n) to (…), in float64.

    Args:
        k: 1 ≤ k ≤ n.
        log_in: logarithms of the events' probabilities, the k most probable events first.
        log_out: logarithms of the probabilities that they do not happen.
    """
    wide = wide_dtype(log_in)
    if k == 1:
        return log_out.sum(-1, dtype=wide).exp()
    if not by_power_sums(k, log_in.dtype, log_in.device):
        return first_coefficients(torch.stack([log_out, log_in], -1).to(wide).exp(), k).sum(-1)
    odds = log_in - log_out
    threshold = odds[..., k - 1 : k].detach()
    others = (odds[..., k:] - threshold).exp().to(power_dtype(odds.dtype, k))
    tilt = torch.arange(k, device=odds.device, dtype=wide) * threshold.to(wide)
    none = log_out[..., k:].sum(-1, keepdim=True, dtype=wide)
    counts = newton(power_sums(others, k - 1).to(wide)) * (tilt + none).exp()
    happen, do_not = (log[..., :k].to(wide).exp() for log in (log_in, log_out))
    for p, q in zip(columns(happen), columns(do_not), strict=True):
        counts = q * counts + p * shift(counts)
    return counts.sum(-1)


def first_coefficients(factors: Tensor, count: int) -> Tensor:
    """First coefficients of a product of polynomials, (…, n, m) to (…, count), pair by pair."""
    while factors.shape[-2] > 1:
        if factors.shape[-2] % 2:
            one = F.pad(torch.ones_like(factors[..., :1, :1]), (0, factors.shape[-1] - 1))
            factors = torch.cat([factors, one], -2)
        left, right = factors[..., 0::2, :], factors[..., 1::2, :]
        length = min(count, 2 * factors.shape[-1] - 1)
        terms = [F.pad(a * right, (i, length))[..., :length] for i, a in enumerate(columns(left))]
        factors = torch.stack(terms).sum(0)
    return factors[..., 0, :count]
