"""Losses, accuracy and predictions for classes that are split over devices.

Each rank of a process group has the logits of a contiguous slice of the classes, for the same
samples, and all ranks get the same result. No logits are gathered: a rank reads its own once and
tells the others about 2k numbers of each row. ``torch.compile`` breaks the graph here.

One rank with all classes; see ``examples/sharded_head.py`` for several:

>>> import torch, torch.distributed as dist
>>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
>>> logits = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
>>> sharded_smooth_topk_loss(logits, torch.tensor([0, 0]), k=2, reduction="none")
tensor([0.6931, 2.1269])
>>> dist.destroy_process_group()
"""

from topklass._collectives import ClassShards
from topklass.distributed.linear import (
    sharded_linear_smooth_topk_loss,
    sharded_linear_topk_cross_entropy,
)
from topklass.distributed.losses import (
    sharded_noised_topk_loss,
    sharded_smooth_topk_loss,
    sharded_topk_cross_entropy,
)
from topklass.distributed.ranking import (
    sharded_predict_topk,
    sharded_target_rank,
    sharded_topk_accuracy,
)

__all__ = [
    "ClassShards",
    "sharded_linear_smooth_topk_loss",
    "sharded_linear_topk_cross_entropy",
    "sharded_noised_topk_loss",
    "sharded_predict_topk",
    "sharded_smooth_topk_loss",
    "sharded_target_rank",
    "sharded_topk_accuracy",
    "sharded_topk_cross_entropy",
]
