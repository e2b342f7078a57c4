"""Training with weights, gradients and momentum divided among processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from topklass.train.divided import divide, join, join_when_saved
from topklass.train.module import Classifier
from topklass.train.recipe import SHARDED, Recipe
from topklass.train.sharded_head import ShardedHead

PIECE = 1_000_000
"""Parameters from which on a part of the network is gathered by itself."""


class Sharded(DDPStrategy):
    """Data parallel, with a network, or a last layer, that is divided among processes.

    Checkpoints do not depend on that, or on the number of processes: they have whole weights and
    momentum. A checkpoint is loaded before the network is divided. Lightning's
    ``ModelParallelStrategy`` divides a network, but has no place for a layer that is split by
    classes beside a network that DDP averages.

    Args:
        network: divide all weights by ``fully_shard`` (FSDP).
        classes: split the classes of the last layer instead.
    """

    def __init__(self, *, network: bool, classes: bool) -> None:
        super().__init__()
        self.divides_network, self.divides_classes = network, classes

    def setup_environment(self) -> None:
        """Connect the processes, if PyTorch can divide a network on their devices."""
        old = not hasattr(torch.cpu.Stream, "record_event")
        if self.divides_network and self.root_device.type == "cpu" and old:
            raise ValueError(
                "strategy fsdp on the CPU needs PyTorch 2.7 or later, got "
                f"{torch.__version__}: take strategy ddp"
            )
        super().setup_environment()

    @property
    def module(self) -> Classifier:
        """What is trained."""
        assert isinstance(self.lightning_module, Classifier)
        return self.lightning_module

    def model_to_device(self) -> None:
        """Divide the weights first, so that no device has all of them."""
        network = self.module.network
        mesh = init_device_mesh(self.root_device.type, (self.world_size,))
        if self.divides_classes:
            self.module.head = ShardedHead(network, self.module.classes, mesh)
        if self.divides_network:
            network.to(memory_format=torch.contiguous_format)  # fully_shard takes no other
            divide_network(network, mesh)
        join_when_saved(network)
        super().model_to_device()

    def configure_ddp(self) -> None:
        """Use DDP for what is not divided."""
        if not self.divides_network:
            divided = [n for n, p in self.module.named_parameters() if isinstance(p, DTensor)]
            ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
            ignore(self.module, divided)  # type: ignore[no-untyped-call]
            super().configure_ddp()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Take the first process's statistics of batch normalisation, as DDP does."""
        network = self.module.network
        if isinstance(network, FSDPModule) and batch_idx == 0:
            for buffer in network.buffers():
                dist.broadcast(buffer, 0)
        result = super().validation_step(batch, batch_idx)
        if isinstance(network, FSDPModule):  # without a backward pass it stays gathered
            network.reshard()
        return result

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Its state with whole tensors, in the first process."""
        state: dict[str, Any] = super().optimizer_state(optimizer)
        whole = {
            place: {n: join(v) if isinstance(v, DTensor) else v for n, v in values.items()}
            for place, values in state["state"].items()
        }
        return {**state, "state": whole}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this process's rows of a state."""
        parameters = list(self.module.parameters())

        def part(value: Any, parameter: nn.Parameter) -> Any:
            if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.dim():
                return divide(value, parameter.device_mesh)
            return value

        states = [
            {
                **state,
                "state": {
                    place: {name: part(value, parameters[place]) for name, value in values.items()}
                    for place, values in state["state"].items()
                },
            }
            for state in checkpoint["optimizer_states"]
        ]
        super().load_optimizer_state_dict({"optimizer_states": states})

    def teardown(self) -> None:
        """Leave the weights on their device: a DTensor in the graph of a lost step cannot move."""
        self.model = self.lightning_module
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator):
            assert part is not None
            part.teardown()


def divide_network(network: nn.Module, mesh: DeviceMesh) -> None:
    """Shard all that is not divided yet, in pieces that are gathered one after another."""
    kept = {
        (layer, name): parameter
        for layer in network.modules()
        for name, parameter in layer.named_parameters(recurse=False)
        if isinstance(parameter, DTensor)
    }
    for layer, name in kept:
        delattr(layer, name)
    for child in network.children():
        _divide_pieces(child, mesh)
    fully_shard(network, mesh=mesh)
    for (layer, name), parameter in kept.items():
        setattr(layer, name, parameter)


def _divide_pieces(module: nn.Module, mesh: DeviceMesh) -> int:
    """Shard parts with at least :data:`PIECE` parameters; return how many are left.

    A layer without parts is left to its parent, which may read its weights without calling it.
    """
    left = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    left += sum(_divide_pieces(child, mesh) for child in module.children())
    called = [*module.children()] and not isinstance(module, nn.ModuleList | nn.ModuleDict)
    if left < PIECE or not called:
        return left
    fully_shard(module, mesh=mesh)
    return 0


def strategy(recipe: Recipe) -> str | Strategy:
    """Lightning's strategy of a recipe; for "fsdp" and for split classes ours."""
    network = recipe.strategy == SHARDED
    classes = recipe.shard_classes and recipe.devices * recipe.nodes > 1
    return Sharded(network=network, classes=classes) if network or classes else recipe.strategy
