"""The smooth loss and its gradient in extended precision, straight from the product of factors.

With ``d_i = (s_i − t)/(kτ)`` and t the k-th largest rival, class i contributes the factor
``min(1, e^−d) + min(1, e^d) X``: the σ_j of all rivals are the coefficients of the product, up to
a common constant. Prefix and suffix products give every leave-one-out coefficient. All terms are
positive and NumPy's long double has the range of 1e±4932: no cancellation, no overflow.
"""

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.longdouble]


def smooth_loss(
    scores: NDArray[np.floating], label: int, k: int, tau: float, margin: float = 1.0
) -> tuple[np.longdouble, Row]:
    """Loss and gradient of one row of scores."""
    s = scores.astype(np.longdouble)
    temperature = np.longdouble(k) * np.longdouble(tau)
    rivals = np.delete(s, label)
    threshold = np.sort(rivals)[-k]
    d = (rivals - threshold) / temperature
    keep, take = np.exp(np.minimum(0, -d)), np.exp(np.minimum(0, d))

    before = np.zeros((len(d) + 1, k + 1), np.longdouble)
    after = np.zeros((len(d) + 1, k + 1), np.longdouble)
    before[0, 0] = after[-1, 0] = 1
    for i in range(len(d)):
        before[i + 1] = keep[i] * before[i]
        before[i + 1, 1:] += take[i] * before[i, :-1]
    for i in reversed(range(len(d))):
        after[i] = keep[i] * after[i + 1]
        after[i, 1:] += take[i] * after[i + 1, :-1]

    def marginals(j: int) -> Row:
        """Probability of each rival to be in a random j-subset."""
        if j == 0:
            return np.zeros(len(d), np.longdouble)
        others = (before[:-1, :j] * after[1:, :j][:, ::-1]).sum(1)
        return take * others / before[-1, j]

    ratio = np.log(before[-1, k]) - np.log(before[-1, k - 1])
    z = (k * np.longdouble(margin) + threshold - s[label]) / temperature + ratio
    pull = np.exp(np.minimum(0, z)) / (1 + np.exp(-np.abs(z)))
    gradient = np.insert(marginals(k) - marginals(k - 1), label, -1) * pull / k
    return np.longdouble(tau) * (np.maximum(z, 0) + np.log1p(np.exp(-np.abs(z)))), gradient
