"""A last layer whose classes are split over processes, in a network that is data parallel.

Each process computes the features of its own images. The last layer takes those of all processes,
and returns the logits of its own classes as a ``DTensor`` that is sharded over classes, from which
every process computes the same loss. DDP, or FSDP, averages gradients over processes, but not
those of the last layer, each of which is whole already.
"""

from __future__ import annotations

from copy import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call

from topklass._collectives import ClassShards, all_gather, copied, gathered
from topklass._targets import SparseTarget, Target
from topklass.distributed import sharded_target_rank
from topklass.train.divided import divide_parameters, local, rows_of
from topklass.train.heads import Head, find_head, first_labels


class ShardedHead:
    """The slice of the classes that this process has of a last layer.

    Args:
        network: what :func:`check_can_split` takes. The weights of its last layer become DTensors
            with the rows of this process. The layer takes the features of this process, which in
            training are as many as those of every other, and returns the logits of all processes'
            images as a DTensor that is sharded over classes.
        classes: number of classes.
        mesh: all processes, in one dimension.
    """

    _lengths: list[int]
    """How many samples of the batch that the layer had last each process has."""

    def __init__(self, network: nn.Module, classes: int, mesh: DeviceMesh) -> None:
        self.processes, self.rank, self.mesh = mesh.size(), mesh.get_local_rank(), mesh
        own = rows_of(self.rank, self.processes, classes)
        self._shards = ClassShards(own, check_calls=False)  # the loss compares
        self._lengths = [0] * self.processes
        _, layer = find_head(network, classes)
        divide_parameters(layer, [name for name, _ in layer.named_parameters()], mesh)
        layer.forward = partial(self._forward, layer, copy(layer))  # type: ignore[method-assign]

    def with_network(self, network: nn.Module) -> Head:
        """Split the last layer of another network."""
        return ShardedHead(network, self._shards.classes, self.mesh)

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
        logits, labels = output.to_local().detach(), first_labels(targets)
        found = sharded_target_rank(logits, labels, group=self._shards)
        return torch.split(found, self._lengths)[self.rank]

    def in_order(self, ranks: Tensor) -> Tensor:
        """Ranks of all samples, which processes take in turn."""
        lengths = rows_of_processes(ranks)
        result = ranks.new_empty(sum(lengths))
        for rank, part in enumerate(torch.split(all_rows(ranks, lengths), lengths)):
            result[rank :: self.processes] = part
        return result

    def _forward(self, layer: nn.Module, original: nn.Module, features: Tensor) -> Tensor:
        """Logits from the layer's original forward, with the weights of this process."""
        if features.requires_grad:  # DDP and FSDP divide by the number of processes
            features.register_hook(lambda gradient: gradient * self.processes)  # type: ignore[no-untyped-call]
        same = [len(features)] * self.processes
        self._lengths = same if layer.training else rows_of_processes(features)
        everything = copied(all_rows(features, self._lengths), None)
        own = {name: local(parameter) for name, parameter in layer.named_parameters()}
        logits = functional_call(original, own, (everything,))
        shape = torch.Size((len(logits), self._shards.classes))
        return DTensor.from_local(
            logits, self.mesh, [Shard(1)], run_check=False, shape=shape, stride=(shape[1], 1)
        )


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
