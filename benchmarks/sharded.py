"""What ranks exchange for a loss of classes split over them: bytes and time, and the cost model's.

Ranks are processes with gloo, or GPUs with NCCL. Loss and gradient are compared with those of all
classes in float64 first. Latency and bandwidth are those of plain messages between the same ranks.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from benchmarks.environment import describe, place, write
from benchmarks.markdown import hardware, number, table
from benchmarks.others import Others
from benchmarks.rows import Row, digits, say
from benchmarks.timing import Step, forward_backward, seconds, synchronize
from topklass._collectives import LETTER_BYTES, all_gather
from topklass.distributed import ClassShards, sharded_smooth_topk_loss
from topklass.functional import smooth_topk_loss


class Case(NamedTuple):
    """Logits that are split, and the loss."""

    rows: int
    classes: int
    k: int


CPU = (Case(256, 4_000, 5), Case(2_048, 4_000, 5), Case(2_048, 4_000, 20), Case(16_384, 4_000, 5))
GPU = (Case(8_192, 128_256, 5), Case(8_192, 1_000_000, 5), Case(1_024, 10_000_000, 5))
SMOKE = (Case(16, 100, 3),)
LARGEST_SHARE = 2**34
"""Bytes of logits that a rank may hold."""
MESSAGE = 2**24
"""Bytes of the message that measures the bandwidth."""
REPEATS = 25


class Link(NamedTuple):
    """A collective of b bytes from each of W ranks takes latency + (W − 1) · b / bandwidth."""

    latency: float
    bandwidth: float

    def seconds(self, ranks: int, sizes: list[int]) -> float:
        """Of collectives of so many bytes."""
        return sum(self.latency + (ranks - 1) * size / self.bandwidth for size in sizes)


def main(device: torch.device, smoke: bool) -> None:
    """Measure with so many ranks as there may be, and keep the record."""
    torch.set_num_threads(1)  # as every rank
    others = Others()
    most = torch.cuda.device_count() if device.type == "cuda" else 4
    rows = [row for ranks in (2, 4, 8) if ranks <= most for row in measured(ranks, device, smoke)]
    load = {"cores_used_by_others": others.cores()}
    write(f"sharded-{place(device)}", {**describe(device), **load, "rows": rows}, smoke)


def measured(ranks: int, device: torch.device, smoke: bool) -> list[Row]:
    """The rows that rank 0 of so many processes finds."""
    with tempfile.TemporaryDirectory() as folder:
        found = multiprocessing.get_context("spawn").SimpleQueue()
        arguments = (ranks, device.type, Path(folder) / "ranks", smoke, found)
        multiprocessing.start_processes(work, arguments, nprocs=ranks)  # type: ignore[attr-defined]
        return list(found.get())


def work(
    rank: int, ranks: int, kind: str, meeting: Path, smoke: bool, found: "SimpleQueue[list[Row]]"
) -> None:
    """What a process does."""
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    try:
        verify(ClassShards(1_000 * (rank + 1)), device)
        link = new_link(device, smoke)
        cases = SMOKE if smoke else GPU if kind == "cuda" else CPU
        rows = [compare(case, link, device) for case in cases if share(case, ranks)]
        if rank == 0:
            for row in rows:
                say(row)
            found.put(rows)
    finally:
        dist.destroy_process_group()


def share(case: Case, ranks: int) -> bool:
    """Whether a rank's logits are not too many."""
    return 2 * case.rows * case.classes // ranks <= LARGEST_SHARE


def verify(shards: ClassShards, device: torch.device) -> None:
    """Require the loss and the gradient of all classes, in float64, on a small problem."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(64, shards.classes, generator=generator)
    target = torch.randint(shards.classes, (64,), generator=generator)
    whole = logits.double().requires_grad_()
    expected = smooth_topk_loss(whole, target)
    expected.backward()  # type: ignore[no-untyped-call]
    assert whole.grad is not None
    own = slice(shards.start, shards.start + shards.size)
    mine = logits[:, own].to(device).requires_grad_()
    loss = sharded_smooth_topk_loss(mine, target.to(device), group=shards)
    loss.backward()  # type: ignore[no-untyped-call]
    assert mine.grad is not None
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        mine.grad.cpu().double(),
        whole.grad[:, own],
        rtol=1e-5,
        atol=1e-5 * whole.grad.abs().max().item(),
    )


def new_link(device: torch.device, smoke: bool) -> Link:
    """Latency by the message that precedes a call, bandwidth by a large one."""
    large = MESSAGE // 256 if smoke else MESSAGE
    times = []
    for size in (LETTER_BYTES, large):
        message = torch.zeros(size, dtype=torch.uint8, device=device)
        times.append(in_collectives(partial(all_gather, message, None), device)[1])
    others = dist.get_world_size() - 1
    return Link(times[0], others * large / max(times[1] - times[0], 1e-9))


def compare(case: Case, link: Link, device: torch.device) -> Row:
    """A forward and a backward pass of the loss, beside that of this rank's classes alone."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = range(case.classes * rank // ranks, case.classes * (rank + 1) // ranks)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    target = torch.randint(case.classes, (case.rows,)).to(device)
    logits = torch.randn(case.rows, len(own), device=device, dtype=dtype).requires_grad_()
    shards = ClassShards(own)
    split = forward_backward(
        lambda given, labels: sharded_smooth_topk_loss(given, labels, case.k, group=shards),
        logits,
        target,
    )
    alone = forward_backward(
        lambda given, labels: smooth_topk_loss(given, labels, case.k), logits, target % len(own)
    )
    sizes, exchange = in_collectives(split, device)
    return {
        "ranks": ranks,
        **case._asdict(),
        "latency": digits(link.latency, 3),
        "bandwidth": digits(link.bandwidth, 3),
        "bytes": sum(sizes),
        "model_bytes": LETTER_BYTES + 8 * case.rows * (2 * case.k + 4),
        "exchange": digits(exchange, 3),
        "model_exchange": digits(link.seconds(ranks, sizes), 3),
        "step": digits(together(split, device), 3),
        "own": digits(together(alone, device), 3),
    }


def together(step: Step, device: torch.device) -> float:
    """Median seconds of a step that all ranks begin at the same time."""
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        times.append(seconds(step, device))
    return median(times)


def in_collectives(step: Step, device: torch.device) -> tuple[list[int], float]:
    """Bytes that this rank gives to each collective of a step, and median seconds of all."""
    rounds: list[list[tuple[int, float]]] = []
    for _ in range(REPEATS):
        rounds.append([])
        with watched(rounds[-1], device):
            step()
    sizes = [size for size, _ in rounds[0]]
    return sizes, median(sum(spent for _, spent in calls) for calls in rounds)


@contextmanager
def watched(calls: list[tuple[int, float]], device: torch.device) -> Iterator[None]:
    """Note bytes and seconds of each ``all_gather``, after all ranks have come to it.

    The loss uses no other collective.
    """
    gather = dist.all_gather

    def all_gather(outputs: list[Tensor], tensor: Tensor, **options: Any) -> None:
        synchronize(device)
        dist.barrier()
        start = time.perf_counter()
        gather(outputs, tensor, **options)
        synchronize(device)
        calls.append((tensor.nbytes, time.perf_counter() - start))

    dist.all_gather = all_gather
    try:
        yield
    finally:
        dist.all_gather = gather


def exchanges(record: dict[str, Any]) -> str:
    """One line a case: bytes and milliseconds, measured and by the model."""
    rows = []
    for row in record["rows"]:
        link = f"{1e3 * row['latency']:.2g} ms, {row['bandwidth'] / 1e9:.2g} GB/s"
        sent = (number(row["bytes"] / 1e6), number(row["model_bytes"] / 1e6))
        names = ("exchange", "model_exchange", "step", "own")
        times = (number(1e3 * row[name]) for name in names)
        shape = f"{row['rows']:,} × {row['classes']:,}, k = {row['k']}"
        rows.append((row["ranks"], link, shape, *sent, *times))
    head = (
        "ranks",
        "α, β",
        "N × C",
        "MB given by a rank",
        "model, MB",
        "exchange, ms",
        "model, ms",
        "whole step, ms",
        "loss of own classes alone, ms",
    )
    return f"Forward + backward ({hardware(record)}):\n\n" + table(head, rows)
