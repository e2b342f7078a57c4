"""Where each algorithm is trusted.

Newton's identities add with alternating signs: relative to σ_k the rounding of the power sums is
amplified by at most 2^k/(k + 1), reached with k ties and one score just below. Beyond these limits
the tree of positive products takes over. ``tests/test_accuracy.py`` measures both sides of each.
"""

import torch

LARGEST_K_IN_FLOAT32 = 10
"""Powers of the tail in float32 up to here (amplification 93), in float64 beyond."""

LARGEST_K_BY_POWER_SUMS = {torch.float32: 32, torch.float64: 12}
"""Power sums up to here for scores of this precision: errors near 1e-7 and 1e-13."""


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Scores of less than single precision are worked on in single precision."""
    return dtype if dtype == torch.float64 else torch.float32


def power_dtype(dtype: torch.dtype, k: int) -> torch.dtype:
    """The precision in which powers of the tail are taken and added."""
    return torch.float64 if k > LARGEST_K_IN_FLOAT32 else working_dtype(dtype)


def by_power_sums(k: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether power sums are accurate enough, for scores of this dtype, to be used."""
    return device.type != "mps" and k <= LARGEST_K_BY_POWER_SUMS[working_dtype(dtype)]
