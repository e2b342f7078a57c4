"""Operators on scores: they know nothing of labels' weights, reductions or training."""

from topkit.operators.esp import log_esp, topk_marginals
from topkit.operators.margins import class_margins
from topkit.operators.noised import noised_topk

__all__ = ["class_margins", "log_esp", "noised_topk", "topk_marginals"]
