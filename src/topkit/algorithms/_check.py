"""The argument check that every algorithm shares."""

from torch import Tensor


def check_scores_and_k(scores: Tensor, k: int) -> None:
    """Raise a ValueError unless ``scores`` is (..., n), of floating point, and 1 <= k <= n."""
    if scores.ndim == 0 or not scores.is_floating_point():
        raise ValueError(
            "scores must be a floating-point tensor of shape (..., n), "
            f"got {scores.dtype} of shape {tuple(scores.shape)}"
        )
    n = scores.shape[-1]
    if not 1 <= k <= n:
        raise ValueError(
            f"k must satisfy 1 <= k <= n, got k = {k} and n = {n} "
            f"(scores of shape {tuple(scores.shape)})"
        )
