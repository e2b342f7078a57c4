"""Operators on scores: they know nothing of labels, weights, reductions or training."""

from topklass.operators.esp import log_esp, topk_marginals
from topklass.operators.expected import expected_topk
from topklass.operators.noised import noised_topk

__all__ = ["expected_topk", "log_esp", "noised_topk", "topk_marginals"]
