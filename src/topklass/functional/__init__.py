"""Losses and accuracy as functions; the modules of :mod:`topklass` are one line over these."""

from topklass.functional.accuracy import target_rank, topk_accuracy
from topklass.functional.hinge import (
    calibrated_topk_hinge_loss,
    convex_topk_hinge_loss,
    topk_hinge_loss,
)
from topklass.functional.likelihood import focal_loss, ldam_loss
from topklass.functional.linear import linear_smooth_topk_loss, linear_topk_cross_entropy
from topklass.functional.linear_prediction import linear_predict_topk
from topklass.functional.multilabel import multilabel_smooth_topk_loss
from topklass.functional.noised import noised_topk_loss
from topklass.functional.smooth import smooth_topk_loss
from topklass.functional.topk_cross_entropy import topk_cross_entropy

__all__ = [
    "calibrated_topk_hinge_loss",
    "convex_topk_hinge_loss",
    "focal_loss",
    "ldam_loss",
    "linear_predict_topk",
    "linear_smooth_topk_loss",
    "linear_topk_cross_entropy",
    "multilabel_smooth_topk_loss",
    "noised_topk_loss",
    "smooth_topk_loss",
    "target_rank",
    "topk_accuracy",
    "topk_cross_entropy",
    "topk_hinge_loss",
]
