"""Weights of which each process has some rows, as ``DTensor``, and checkpoints that have all rows.

Rows are divided as ``torch.chunk`` does it, which is also what ``fully_shard`` makes of a weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from topklass._collectives import naming_lost_ranks


def rows_of(rank: int, processes: int, rows: int) -> range:
    """The rows of a process, of so many; the last processes may have fewer, or none."""
    size = -(-rows // processes)
    return range(rows)[rank * size : (rank + 1) * size]


def divide(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """Keep the rows of this process, on its device."""
    whole = whole.detach().contiguous()
    own = rows_of(mesh.get_local_rank(), mesh.size(), len(whole))
    part = whole[own.start : own.stop].to(mesh.device_type, copy=True)
    return DTensor.from_local(
        part, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def join(divided: DTensor) -> Tensor:
    """In the first process all rows, on the CPU; in the others their own.

    One process after another sends its rows, so that no device has all of them.
    """
    mesh, part = divided.device_mesh, divided.to_local().detach().contiguous()
    with naming_lost_ranks(None):
        if mesh.get_local_rank() > 0:
            if len(part):
                dist.send(part, 0)
            return part
        result = torch.empty(divided.shape, dtype=divided.dtype)
        for rank in range(mesh.size()):
            rows = rows_of(rank, mesh.size(), len(result))
            received = part if rank == 0 else part.new_empty(len(rows), *part.shape[1:])
            if rank > 0 and len(rows):
                dist.recv(received, rank)
            result[rows.start : rows.stop] = received.cpu()
    return result


def local(tensor: Tensor) -> Tensor:
    """The tensor that this process has, without the others."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def divide_parameters(module: nn.Module, names: Iterable[str], mesh: DeviceMesh) -> None:
    """Keep the rows of this process of some parameters."""
    for name in names:
        layer, _, own = name.rpartition(".")
        whole = module.get_parameter(name)
        part = nn.Parameter(divide(whole, mesh), whole.requires_grad)
        setattr(module.get_submodule(layer), own, part)


def divide_like(module: nn.Module, example: nn.Module) -> None:
    """Divide a copy of a module as the module itself is divided."""
    parts = {n: p for n, p in example.named_parameters() if isinstance(p, DTensor)}
    for name, part in parts.items():
        divide_parameters(module, [name], part.device_mesh)


def join_when_saved(module: nn.Module) -> None:
    """Have whole weights in the module's state dict, which all processes take at the same time."""
    module.register_state_dict_post_hook(_join_all)  # type: ignore[no-untyped-call]


def _join_all(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    for name, value in state.items():
        if isinstance(value, DTensor):
            state[name] = join(value)
