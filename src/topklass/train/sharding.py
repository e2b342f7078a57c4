"""Fully sharded training: weights, gradients and momentum divided among devices."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import FSDPStrategy, Strategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from topklass.train.files import find_checkpoint
from topklass.train.recipe import SHARDED, Recipe
from topklass.train.sharded_head import ShardedClasses

PIECE = 1_000_000
"""Parameters from which on a part of the network is gathered by itself."""


class Sharded(FSDPStrategy):
    """Fully sharded data parallel, also on the CPU, with checkpoints in a single file."""

    def __init__(self) -> None:
        super().__init__(state_dict_type="full")

    def _setup_model(self, model: nn.Module) -> nn.Module:
        """Shard the network here: Lightning would pass the index of a GPU."""
        divided = FullyShardedDataParallel(
            model.to(memory_format=torch.contiguous_format),  # else momentum is restored wrongly
            auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=PIECE),
            mixed_precision=self.mixed_precision_config,
            device_id=self.root_device,
            use_orig_params=True,
        )
        return super()._setup_model(divided)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, or its predecessor if it is broken; nothing in it is executed."""
        found, _ = find_checkpoint(Path(checkpoint_path))
        checkpoint: dict[str, Any] = super().load_checkpoint(found, weights_only)
        return checkpoint


def strategy(recipe: Recipe) -> str | Strategy:
    """Lightning's strategy of a recipe; for "fsdp" and for split classes ours."""
    if recipe.shard_classes and recipe.devices * recipe.nodes > 1:
        return ShardedClasses()
    return Sharded() if recipe.strategy == SHARDED else recipe.strategy
