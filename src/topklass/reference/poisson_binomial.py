r"""How many of many independent events happen: the Poisson-binomial distribution.

**Problem.** Event i happens with probability ``p_i``. Find the probability that fewer than k do,
that is the sum of the first k coefficients of ``Π_i (1 − p_i + p_i X)``.

**Closed form.** These are elementary symmetric polynomials of the odds ``p_i / (1 − p_i)``, times
``Π_i (1 − p_i)``. The k most probable events are multiplied in one by one, all terms positive; the
others go through power sums of their odds relative to the k-th, and Newton's identities, see
:mod:`topklass.reference.power_sums`. For large k a tree of such products does it all.
"""

import torch
from torch import Tensor

from topklass.reference.power_sums import (
    columns,
    is_accurate,
    newton,
    power_dtype,
    power_sums,
    shift,
    wide_dtype,
)
from topklass.reference.tree import first_coefficients


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
    if not is_accurate(k, log_in.dtype, log_in.device):
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
