"""A last layer whose classes are split over processes, in a network that is data parallel.

Each process computes the features of its own images. The last layer takes those of all processes,
and returns the logits of its own classes as a ``DTensor`` that is sharded over classes, from which
every process computes the same loss. DDP averages gradients over processes, but not
those of the last layer, each of which is whole already.

Checkpoints do not depend on the number of processes: they have the whole layer, and its momentum,
so that any number of processes can continue from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from topklass._collectives import all_gather, copied, gathered, naming_lost_ranks
from topklass._targets import SparseTarget, Target
from topklass.distributed import sharded_target_rank
from topklass.train.heads import find_head, first_labels
from topklass.train.module import Classifier


class ShardedHead:
    """The slice of the classes that this process has of a last layer.

    Args:
        network: what :func:`check_can_split` takes. Its last layer keeps the weights of the slice,
            takes features of all processes and returns a DTensor from now on; its state dict is
            that of the whole layer.
        classes: number of classes.
        device: of this process.
    """

    _lengths: list[int]
    """How many samples of the batch that the layer had last each process has."""

    def __init__(self, network: nn.Module, classes: int, device: torch.device) -> None:
        self.processes, self.rank = dist.get_world_size(), dist.get_rank()
        self.classes = classes
        self.mesh = init_device_mesh(device.type, (self.processes,))
        self.name, head = find_head(network, classes)
        self.parameters = [name for name, _ in head.named_parameters(recurse=False)]
        for name in self.parameters:
            whole: nn.Parameter = getattr(head, name)
            part = nn.Parameter(self.part(whole.detach()).clone(), whole.requires_grad)
            setattr(head, name, part)
        head.out_features = len(self.bounds(self.rank))
        self._lengths = [0] * self.processes
        head.register_forward_pre_hook(self._take_all_features)
        head.register_forward_hook(self._return_sharded)
        save = partial(self._save_whole)  # a method could not have the attribute that it gets
        head.register_state_dict_post_hook(save)  # type: ignore[no-untyped-call]
        head.register_load_state_dict_pre_hook(self._load_part)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> ShardedHead:
        """The same for a moving average of the weights: this is about processes."""
        return self

    def bounds(self, rank: int) -> range:
        """The classes of a process, as DTensor and ``torch.chunk`` divide them."""
        size = -(-self.classes // self.processes)
        return range(self.classes)[rank * size : (rank + 1) * size]

    def part(self, whole: Tensor) -> Tensor:
        """The rows of this process."""
        own = self.bounds(self.rank)
        return whole[own.start : own.stop]

    def whole(self, part: Tensor) -> Tensor:
        """In the first process the rows of all, on the CPU; in the others their own.

        One process after another sends its rows, so that no device has all of them.
        """
        with naming_lost_ranks(None):
            if self.rank > 0:
                if len(part):
                    dist.send(part.detach().contiguous(), 0)
                return part
            result = torch.empty(self.classes, *part.shape[1:], dtype=part.dtype)
            for rank in range(self.processes):
                rows = self.bounds(rank)
                received = part if rank == 0 else part.new_empty(len(rows), *part.shape[1:])
                if rank > 0 and len(rows):
                    dist.recv(received, rank)
                result[rows.start : rows.stop] = received.cpu()
        return result

    def targets(self, target: Target) -> Target:
        """The targets of all processes, for the batch that the network had last."""
        rows = len(target if isinstance(target, Tensor) else target.indices)
        if rows != self._lengths[self.rank]:
            raise ValueError(
                f"target must have a row for each of the {self._lengths[self.rank]} samples that "
                f"the network had last, got {rows}: call the network on this batch first"
            )
        if isinstance(target, Tensor):
            return all_rows(target, self._lengths)
        message = torch.cat([each.double() for each in target], 1)
        indices, weights = all_rows(message, self._lengths).chunk(2, 1)
        return SparseTarget(indices.to(target.indices.dtype), weights.to(target.weights.dtype))

    def loss(self, criterion: nn.Module, output: object, targets: Target) -> Tensor:
        """The loss of the samples of all processes."""
        loss = criterion(output, targets)
        assert isinstance(loss, DTensor)
        return loss.to_local()

    def ranks(self, output: object, targets: Target) -> Tensor:
        """Ranks of the labels of this process."""
        assert isinstance(output, DTensor)
        found = sharded_target_rank(output.to_local().detach(), first_labels(targets))
        return torch.split(found, self._lengths)[self.rank]

    def in_order(self, ranks: Tensor) -> Tensor:
        """Ranks of all samples, which processes take in turn."""
        lengths = rows_of_processes(ranks)
        result = ranks.new_empty(sum(lengths))
        for rank, part in enumerate(torch.split(all_rows(ranks, lengths), lengths)):
            result[rank :: self.processes] = part
        return result

    def _take_all_features(self, head: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        (features,) = inputs
        if features.requires_grad:  # DDP divides by the number of processes
            features.register_hook(lambda gradient: gradient * self.processes)  # type: ignore[no-untyped-call]
        self._lengths = rows_of_processes(features)
        return (copied(all_rows(features, self._lengths), None),)

    def _return_sharded(self, head: nn.Module, inputs: object, logits: Tensor) -> Tensor:
        shape = torch.Size((len(logits), self.classes))
        return DTensor.from_local(
            logits, self.mesh, [Shard(1)], run_check=False, shape=shape, stride=(self.classes, 1)
        )

    def _save_whole(
        self, head: nn.Module, state: dict[str, Any], prefix: str, metadata: object
    ) -> None:
        for name in self.parameters:
            state[prefix + name] = self.whole(state[prefix + name])

    def _load_part(self, head: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        for name in self.parameters:
            state[prefix + name] = self.part(state[prefix + name])


def check_can_split(network: nn.Module, classes: int, processes: int) -> None:
    """Require a last layer, and at most as many processes as classes."""
    find_head(network, classes)
    if processes > classes:
        raise ValueError(
            f"shard_classes takes at most as many processes as classes, got {classes} classes for "
            f"{processes} processes: take fewer devices"
        )


def rows_of_processes(tensor: Tensor) -> list[int]:
    """The length of the tensor in each process; batches of validation may differ by one."""
    numbers = all_gather(torch.tensor(len(tensor), device=tensor.device), None)
    return [int(number) for number in numbers]


def all_rows(tensor: Tensor, lengths: list[int]) -> Tensor:
    """The rows of all processes, in their order; a gradient must be the same in all of them."""
    missing = max(lengths) - len(tensor)
    padded = F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing))
    parts = gathered(padded, None).unbind(0)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


class ShardedClasses(DDPStrategy):
    """Data parallel, but for the last layer, of which each process has a slice of the classes."""

    head: ShardedHead

    def setup_environment(self) -> None:
        """Connect the processes, and divide the last layer."""
        super().setup_environment()
        module = self.lightning_module
        assert isinstance(module, Classifier)
        self.head = ShardedHead(module.network, module.classes, self.root_device)
        module.head = self.head
        ignored = [f"network.{self.head.name}.{name}" for name in self.head.parameters]
        ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(module, ignored)  # type: ignore[no-untyped-call]

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Its state with that of the whole last layer, in the first process."""
        state: dict[str, Any] = super().optimizer_state(optimizer)
        return self._with_head(state, self.head.whole)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this process's part of the last layer's state."""
        states = [self._with_head(s, self.head.part) for s in checkpoint["optimizer_states"]]
        super().load_optimizer_state_dict({"optimizer_states": states})

    def _with_head(self, state: dict[str, Any], change: Any) -> dict[str, Any]:
        """A state with tensors of the last layer changed; its numbers stay."""
        module = self.lightning_module
        assert module is not None
        names = [f"network.{self.head.name}.{name}" for name in self.head.parameters]
        places = [i for i, (name, _) in enumerate(module.named_parameters()) if name in names]
        changed = {
            place: {
                name: change(value) if isinstance(value, Tensor) and value.dim() else value
                for name, value in values.items()
            }
            for place, values in state["state"].items()
            if place in places
        }
        return {**state, "state": {**state["state"], **changed}}
