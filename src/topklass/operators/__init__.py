"""Operators on scores: they know nothing of labels' weights, reductions or training."""

from topklass.operators.esp import log_esp, topk_marginals
from topklass.operators.expected import expected_topk
from topklass.operators.margins import class_margins, class_weights
from topklass.operators.noised import noised_topk

__all__ = [
    "class_margins",
    "class_weights",
    "expected_topk",
    "log_esp",
    "noised_topk",
    "topk_marginals",
]
