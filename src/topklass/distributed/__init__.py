"""Losses, accuracy and predictions for classes that are split over devices.

Each rank of a process group has the logits of a contiguous slice of the classes, for the same
samples, and all ranks get the same result. No logits are gathered: a rank reads its own once and
tells the others about 2k numbers of each row.
"""

from topklass._collectives import ClassShards
from topklass.distributed.linear import sharded_linear_smooth_topk_loss
from topklass.distributed.losses import (
    sharded_noised_topk_loss,
    sharded_smooth_topk_loss,
    sharded_topk_cross_entropy,
)
from topklass.distributed.ranking import sharded_predict_topk, sharded_topk_accuracy

__all__ = [
    "ClassShards",
    "sharded_linear_smooth_topk_loss",
    "sharded_noised_topk_loss",
    "sharded_predict_topk",
    "sharded_smooth_topk_loss",
    "sharded_topk_accuracy",
    "sharded_topk_cross_entropy",
]
