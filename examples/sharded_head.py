"""A last layer with a million classes, split over processes.

    torchrun --nproc-per-node 2 examples/sharded_head.py
    torchrun --nproc-per-node 2 examples/sharded_head.py --classes 5000 --features 32 --steps 100

Each process has the weights of its own classes, and their momentum: no process has the whole layer,
its gradient, or logits of all classes. All processes see the same samples, as after an all-gather
of the features of a data-parallel network. The samples are noisy views of their class's code, a
fixed random vector. The loss learns to put the class into the list of k; accuracy is measured on
new views.

On CPUs the processes speak through gloo, with GPUs through NCCL, one for each.
"""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from topklass.distributed import (
    ClassShards,
    sharded_linear_smooth_topk_loss,
    sharded_predict_topk,
    sharded_topk_accuracy,
)

K, TAU = 5, 0.2
NOISE = 0.5  # of a view; a code has length 1


def arguments() -> argparse.Namespace:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--classes", type=int, default=1_000_000)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--samples", type=int, default=256, help="of a step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rate", type=float, default=100.0, help="learning rate")
    parser.add_argument("--seen", type=int, default=500, help="classes that occur in the samples")
    return parser.parse_args()


def slice_of(classes: int, rank: int, ranks: int) -> range:
    """The classes of a rank."""
    return range(classes * rank // ranks, classes * (rank + 1) // ranks)


def batch(codes: Tensor, labels: Tensor, samples: int, generator: torch.Generator) -> list[Tensor]:
    """Views and their labels, the same on all ranks."""
    chosen = torch.randint(len(labels), (samples,), generator=generator)
    noise = torch.randn(samples, codes.shape[1], generator=generator) / math.sqrt(codes.shape[1])
    return [codes[chosen] + NOISE * noise, labels[chosen]]


def main() -> None:
    """Train the layer and print losses, accuracies and a prediction, on rank 0."""
    options = arguments()
    gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    own = slice_of(options.classes, dist.get_rank(), dist.get_world_size())
    shards = ClassShards(own)

    same = torch.Generator().manual_seed(0)  # on all ranks
    labels = torch.randperm(options.classes, generator=same)[: options.seen]
    codes = F.normalize(torch.randn(len(labels), options.features, generator=same))
    weight = nn.Parameter(torch.zeros(len(own), options.features, device=device))
    optimiser = torch.optim.SGD([weight], options.rate, momentum=0.9)

    def tell(*words: object) -> None:
        if dist.get_rank() == 0:
            print(*words, flush=True)

    tell(f"{options.classes:,} classes, {dist.get_world_size()} processes: {shards}")
    for step in range(1, options.steps + 1):
        views, target = (t.to(device) for t in batch(codes, labels, options.samples, same))
        loss = K * sharded_linear_smooth_topk_loss(views, weight, target, K, TAU, group=shards)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step == 1 or step % 10 == 0:
            tell(f"step {step:4d}: loss {loss.item():.4f}")

    views, target = (t.to(device) for t in batch(codes, labels, options.samples, same))
    logits = F.linear(views, weight.detach())
    first, listed = sharded_topk_accuracy(logits, target, (1, K), group=shards).tolist()
    tell(f"accuracy of new views: top-1 {first:.3f}, top-{K} {listed:.3f}")
    found = sharded_predict_topk(logits[0], K, group=shards, temperature=K * TAU)
    tell(f"label {int(target[0])}, predicted {found.labels.tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
