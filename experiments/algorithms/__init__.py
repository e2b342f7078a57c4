"""The algorithms of Berrada et al. (2018), one per file, for comparison.

All of them evaluate elementary symmetric polynomials of ``e = exp(scores)``,

    σ_j(e) = Σ_{i_1 < ... < i_j} e_{i_1} ... e_{i_j},      σ_0 = 1,

over the last dimension, for j = 0..k. The losses of topklass use none of them but
:func:`log_esp_tree`, for large k.

====================================  ==========================  ===============================
Function                              Paper                       Gradient
====================================  ==========================  ===============================
:func:`log_esp_tree`                  Algorithm 1, in log space   autograd, any order
:func:`log_esp_recursive`             Algorithms 1 and 2          eq. 18 and 60, first order only
:func:`esp_summation`                 Algorithm 3                 autograd, any order
:func:`esp_summation_compensated`     Algorithm 3, compensated    autograd, any order
:func:`smooth_topk_loss_with`         eq. 10                      that of the algorithm given
:func:`smooth_topk_loss_uncentred`    eq. 10 by Algorithm 3       autograd, any order
====================================  ==========================  ===============================
"""

from experiments.algorithms.divide_and_conquer import log_esp_tree
from experiments.algorithms.recursive_backward import derivatives_recursive, log_esp_recursive
from experiments.algorithms.smooth_loss import smooth_topk_loss_uncentred, smooth_topk_loss_with
from experiments.algorithms.summation import esp_summation, esp_summation_compensated

__all__ = [
    "derivatives_recursive",
    "esp_summation",
    "esp_summation_compensated",
    "log_esp_recursive",
    "log_esp_tree",
    "smooth_topk_loss_uncentred",
    "smooth_topk_loss_with",
]
