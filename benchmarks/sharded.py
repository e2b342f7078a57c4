"""What a loss of classes split over ranks costs beyond that of a rank's own logits.

    torchrun --nproc-per-node 8 -m benchmarks.sharded            # one GPU for each rank
    torchrun --nproc-per-node 1 -m benchmarks.sharded            # without what is sent
    torchrun --nproc-per-node 2 -m benchmarks.sharded --device cpu --quick

Values and gradients are compared with those of all classes in float64 first. Then forward and
backward passes are timed on a rank's share of the classes: the sharded loss, with and without the
comparison of calls, and as a measure losses that take the share for all classes.
"""

import argparse
import os
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.environment import default_device
from benchmarks.timing import ITERATIONS, forward_backward, seconds
from topklass.distributed import ClassShards, sharded_smooth_topk_loss
from topklass.functional import smooth_topk_loss

K = 5
SHAPES = [(8192, 128_256), (8192, 1_000_000), (1024, 10_000_000)]
"""Rows and classes of language models, and of retrieval."""
QUICK = [(64, 20_000)]
MEASUREMENTS = 9
LARGEST_SHARE = 2**34
"""Bytes of logits that a rank may hold."""


def check(shards: ClassShards, device: torch.device) -> None:
    """Require the loss and the gradient of all classes, in float64, on a small problem."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(64, shards.classes, generator=generator)
    target = torch.randint(shards.classes, (64,), generator=generator)
    whole = logits.double().requires_grad_()
    expected = smooth_topk_loss(whole, target, K)
    expected.backward()
    own = slice(shards.start, shards.start + shards.size)
    mine = logits[:, own].to(device).requires_grad_()
    loss = sharded_smooth_topk_loss(mine, target.to(device), K, group=shards)
    loss.backward()
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-5, atol=0)
    scale = whole.grad.abs().max().item()
    torch.testing.assert_close(
        mine.grad.cpu().double(), whole.grad[:, own], rtol=1e-5, atol=1e-5 * scale
    )


def measure(rows: int, classes: int, device: torch.device) -> None:
    """Print a row of the table: milliseconds of forward and backward passes, on rank 0."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = range(classes * rank // ranks, classes * (rank + 1) // ranks)
    if 2 * rows * len(own) > LARGEST_SHARE:
        return
    logits = torch.randn(rows, len(own), device=device, dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(0)).to(device)
    losses = {
        "sharded": partial(sharded_smooth_topk_loss, k=K, group=ClassShards(own)),
        "not compared": partial(
            sharded_smooth_topk_loss, k=K, group=ClassShards(own, check_calls=False)
        ),
    }
    if rank == 0:  # its classes are the first
        losses["own logits"] = partial(smooth_topk_loss, k=K)
        losses["cross-entropy"] = F.cross_entropy
    times = {}
    for name, loss in losses.items():
        labels: Tensor = target if name in ("sharded", "not compared") else target % len(own)
        step = forward_backward(loss, logits, labels)
        step(), step()
        found = [seconds(step, device, ITERATIONS) for _ in range(MEASUREMENTS)]
        times[name] = f"{1000 * sorted(found)[MEASUREMENTS // 2]:.3f}"
    dist.barrier()
    if rank == 0:
        sent = 8 * rows * (2 * K + 4) / 1e6
        print(f"| {rows:,} × {classes:,} | {' | '.join(times.values())} | {sent:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="torchrun -m benchmarks.sharded")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device())
    parser.add_argument("--quick", action="store_true", help="a small part, to try it out")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    check(ClassShards(1000 * (rank + 1)), device)
    if rank == 0:
        print(f"bf16, k = {K}, {ranks} rank(s): milliseconds, and MB that a rank sends\n")
        print("| rows × classes | sharded | not compared | own logits | cross-entropy | MB |")
        print("|---|---|---|---|---|---|", flush=True)
    for rows, classes in QUICK if arguments.quick else SHAPES:
        measure(rows, classes, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
