"""The smooth loss and its gradient in extended precision, rows side by side.

With ``d_i = (s_i − t)/(kτ)`` and t the k-th largest rival, class i contributes the factor
``min(1, e^−d) + min(1, e^d) X``; prefix and suffix products give all coefficients with and without
a class. All terms are positive and long doubles reach 1e±4932: no cancellation, no overflow.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.longdouble]


def smooth_loss(
    scores: Tensor, labels: Tensor, k: int, tau: float, margin: float = 1.0
) -> tuple[Array, Array]:
    """Loss (R,) and gradient (R, n) of scores (R, n) and labels (R,)."""
    s = scores.detach().cpu().numpy().astype(np.longdouble)
    rows, n = s.shape
    is_label = torch.arange(n) == labels.cpu()[:, None]
    rival = ~is_label.numpy()
    rivals = s[rival].reshape(rows, n - 1)
    threshold = np.sort(rivals)[:, -k]
    temperature = np.longdouble(k) * np.longdouble(tau)
    d = (rivals - threshold[:, None]) / temperature
    keep, take = np.exp(np.minimum(0, -d)), np.exp(np.minimum(0, d))
    before = products(keep, take, k)
    after = products(keep[:, ::-1], take[:, ::-1], k)[::-1]

    def marginals(j: int) -> Array:
        """Probability of each rival to be in a random j-subset."""
        if j == 0:
            return np.zeros_like(d)
        others = (before[:-1, :, :j] * after[1:, :, :j][..., ::-1]).sum(2).T
        result: Array = take * others / before[-1, :, j, None]
        return result

    ratio = np.log(before[-1, :, k]) - np.log(before[-1, :, k - 1])
    z = (k * np.longdouble(margin) + threshold - s[~rival]) / temperature + ratio
    pull = np.exp(np.minimum(0, z)) / (1 + np.exp(-np.abs(z)))
    gradient = np.full_like(s, -1)
    gradient[rival] = (marginals(k) - marginals(k - 1)).ravel()
    loss = np.longdouble(tau) * (np.maximum(z, 0) + np.log1p(np.exp(-np.abs(z))))
    return loss, gradient * (pull / k)[:, None]


def products(keep: Array, take: Array, k: int) -> Array:
    """Coefficients of the products of the first i factors, i = 0..n, (n + 1, R, k + 1)."""
    rows, n = keep.shape
    result = np.zeros((n + 1, rows, k + 1), np.longdouble)
    result[0, :, 0] = 1
    for i in range(n):
        result[i + 1] = keep[:, i, None] * result[i]
        result[i + 1, :, 1:] += take[:, i, None] * result[i, :, :-1]
    return result
