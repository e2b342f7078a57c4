"""What ranks send, and faults: an error on every rank, after which the group still works."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import topklass.functional as TF
from sharded_cases import CLASSES, LISTS, ROWS, SIZES, compare, own, problem, raises
from topklass import SparseTarget
from topklass.distributed import (
    ClassShards,
    sharded_linear_smooth_topk_loss,
    sharded_noised_topk_loss,
    sharded_smooth_topk_loss,
    sharded_topk_accuracy,
    sharded_topk_cross_entropy,
)


@contextmanager
def counted(sent: list[tuple[str, int]]) -> Iterator[None]:
    """Note the names of exchanges and the bytes that this rank gives to each."""
    gather, reduce = dist.all_gather, dist.all_reduce

    def all_gather(outputs: list[Tensor], tensor: Tensor, **options: Any) -> None:
        sent.append(("gather", tensor.nbytes))
        gather(outputs, tensor, **options)

    def all_reduce(tensor: Tensor, **options: Any) -> None:
        sent.append(("reduce", tensor.nbytes))
        reduce(tensor, **options)

    dist.all_gather, dist.all_reduce = all_gather, all_reduce
    try:
        yield
    finally:
        dist.all_gather, dist.all_reduce = gather, reduce


def communication() -> None:
    """Equal to the model of docs/scale-sharded.md, whatever the number of classes."""
    row = 8 * ROWS  # bytes of a number for each
    for classes in (CLASSES, 40 * CLASSES):
        logits, labels = problem(torch.float32, classes)
        few = SparseTarget(torch.randint(classes, (ROWS, 3)), torch.rand(ROWS, 3))
        chances = torch.rand(ROWS, classes)[:, own(classes)]
        for k in (1, 3, 5):
            for target, smoothing, numbers in (
                (labels, 0.0, 2 * k + 4),
                (labels, 0.1, 2 * k + 6),
                (chances, 0.0, 2 * k + 2),
                (few, 0.0, 2 * k + 2 + 2 * 3),
            ):
                forward: list[tuple[str, int]] = []
                backward: list[tuple[str, int]] = []
                leaf = logits[:, own(classes)].clone().requires_grad_()
                with counted(forward):
                    loss = sharded_smooth_topk_loss(leaf, target, k, label_smoothing=smoothing)
                with counted(backward):
                    loss.backward()
                several = smoothing > 0 or target is not labels  # classes as labels
                assert forward[:2] == [("gather", 1024), ("gather", row * numbers)]
                assert forward[2:] == [("reduce", row)] * several
                assert backward == [("reduce", row * (2 * k + 2))] * several
    shards = ClassShards(own().stop - own().start, check_calls=False)
    logits, target = problem()
    sent: list[tuple[str, int]] = []
    with counted(sent):
        sharded_smooth_topk_loss(logits[:, own()], target, 3, group=shards)
        sharded_topk_accuracy(logits[:, own()], target, 3, group=shards)
        sharded_noised_topk_loss(logits[:, own()], target, 3, samples=2, group=shards)
    expected = [("gather", 10), ("gather", 2), ("reduce", 2), ("gather", 4 * 2 + 4)]
    assert sent == [(name, row * count) for name, count in expected]

    samples = torch.randn(ROWS, 6, requires_grad=True)
    weight = torch.randn(CLASSES, 6)[own()].requires_grad_()
    sent.clear()
    with counted(sent):
        sharded_linear_smooth_topk_loss(
            samples, weight, target, 3, group=shards, chunk_bytes=1500
        ).backward()
    *chunks, last = sent
    assert last == ("reduce", samples.nbytes)
    assert len(chunks) > 1
    assert {name for name, _ in chunks} == {"gather"}
    assert sum(size for _, size in chunks) == row * 10


# Faults: an error on every rank, and the group still works


def differences() -> None:
    logits, target = problem()
    mine, rank, last = logits[:, own()], dist.get_rank(), dist.get_world_size() - 1
    odd = rank == last

    def differs(message: str, **options: Any) -> None:
        with raises(ValueError, f"sharded_smooth_topk_loss: {message}"):
            sharded_smooth_topk_loss(mine, target, **{"k": 3} | options)

    got = "must be the same on all ranks, got"
    differs(f"k {got} '3' on rank 0 and '4' on rank {last}", k=4 if odd else 3)
    differs(f"tau {got} '1.0' on rank 0 and '2.0' on rank {last}", tau=2.0 if odd else 1.0)
    differs(f"reduction {got} 'mean' on rank 0", reduction="sum" if odd else "mean")
    given = mine[0].exp() if odd else None
    differs(f"whether weight is given {got} False on rank 0 and True", weight=given)
    differs(f"label_smoothing {got} 0.0 on rank 0", label_smoothing=0.1 if odd else 0.0)
    with raises(ValueError, f"the number of rows {got} 7 on rank 0 and 6 on rank {last}"):
        sharded_smooth_topk_loss(mine[odd:], target[odd:])
    with raises(ValueError, f"function {got} 'sharded_smooth_topk_loss' on rank 0"):
        (sharded_topk_cross_entropy if odd else sharded_smooth_topk_loss)(mine, target)
    with raises(ValueError, "target must be the same on all ranks, got [0, "):
        sharded_smooth_topk_loss(
            mine, target.where(torch.tensor(not odd), target + 1)[1:2].expand(7)
        )
    few = SparseTarget(target.unsqueeze(1).expand(-1, 2), torch.ones(ROWS, 2))
    with raises(ValueError, f"the target {got} 'SparseTarget of 2' on rank 0 and 'class indices' "):
        sharded_smooth_topk_loss(mine, target if odd else few)
    with raises(ValueError, f"target {got} [[0, 0], "):
        moved = few._replace(indices=(few.indices[1:2] + odd).expand(ROWS, -1))
        sharded_smooth_topk_loss(mine, moved)
    shares = torch.tensor([0.5, 0.75 if odd else 0.25]).expand(ROWS, -1)
    for smoothing in (0.0, 0.1):
        with raises(ValueError, f"target {got} [[0.5, 0.25], "):
            voted = few._replace(weights=shares)
            sharded_smooth_topk_loss(mine, voted, label_smoothing=smoothing)
    again = sharded_smooth_topk_loss(mine, target)
    torch.testing.assert_close(again, TF.smooth_topk_loss(logits, target))


def errors_of_one_rank() -> None:
    logits, target = problem()
    mine, last = logits[:, own()], dist.get_world_size() - 1
    odd = dist.get_rank() == last
    told = f"rank {last} of {last + 1} stopped in sharded_smooth_topk_loss, so rank "
    with raises(*((ValueError, "k must be at least 1") if odd else (RuntimeError, told))):
        sharded_smooth_topk_loss(mine, target, k=0 if odd else 3)
    with raises(RuntimeError, "weight must have one value for each of the"):
        sharded_smooth_topk_loss(mine, target, weight=torch.ones(99) if odd else mine[0].exp())
    long = "💥" * 1000  # more than a letter holds
    with raises(*((TypeError, "k must be an integer, got") if odd else (RuntimeError, told))):
        sharded_smooth_topk_loss(mine, target, k=long if odd else 3)


def labels_of_no_rank() -> None:
    logits, target = problem()
    for wrong in (CLASSES, -1):
        target[3] = wrong
        with raises(
            IndexError, f"class indices from 0 to {CLASSES - 1}, or ignore_index=-100, got"
        ):
            sharded_smooth_topk_loss(logits[:, own()], target)
        with raises(IndexError, f"got {wrong}"):
            sharded_topk_accuracy(logits[:, own()], target)
        with raises(IndexError, f"got {wrong}"):
            few = SparseTarget(target.unsqueeze(1), torch.ones(ROWS, 1))
            sharded_smooth_topk_loss(logits[:, own()], few)


def lists_as_long_as_the_classes() -> None:
    logits, target = problem()
    mine = logits[:, : own(5).stop - own(5).start]
    with raises(ValueError, "k must be from 1 to 4, one less than the 5 classes, got k=5"):
        sharded_smooth_topk_loss(mine, target.clamp(max=4), k=5)


def long_parameters() -> None:
    """Lists of many lengths, of which a letter has a digest."""
    logits, target = problem()
    weights, odd = [0.05] * 10, dist.get_rank() == 1
    compare(*LISTS, logits, target, k=weights, reduction="none")
    with raises(ValueError, "k must be the same on all ranks, got '{1: 0."):
        weights[5] += odd / 100
        sharded_topk_cross_entropy(logits[:, own()], target, k=weights)


def declared_slices() -> None:
    rank, classes = dist.get_rank(), own()
    here = range(classes.start, classes.stop)
    shards = ClassShards(here)
    assert (shards.start, shards.size, shards.classes) == (here.start, len(here), CLASSES)
    logits, target = problem()
    for group in (shards, ClassShards(here, check_calls=False)):
        ours = sharded_smooth_topk_loss(logits[:, own()], target, group=group)
        torch.testing.assert_close(ours, TF.smooth_topk_loss(logits, target))
    begin = f"the classes of rank 1 must begin at {SIZES[dist.get_world_size()][0]}"
    for shift in (-1, 1):  # overlapping, missing
        moved = range(here.start + shift, here.stop + shift) if rank else here
        with raises(ValueError, begin):
            ClassShards(moved)
    with raises(ValueError, "sharded_smooth_topk_loss: local logits must have ("):
        sharded_smooth_topk_loss(logits[:, own(10)], target, group=shards)
    with raises(ValueError, f"local logits must have the {len(here)} classes of this rank, as"):
        other = torch.zeros(ROWS, len(here) + 1)
        sharded_smooth_topk_loss(other, target, group=ClassShards(here, check_calls=False))
    with raises(TypeError if rank == 0 else RuntimeError, "classes must be a number of classes"):
        ClassShards("all" if rank == 0 else here)


def second_derivatives() -> None:
    logits, target = problem()
    mine = logits[:, own()].clone().requires_grad_()
    once = checkpoint(
        lambda scores: sharded_smooth_topk_loss(1 * scores, target, k=3), mine, use_reentrant=False
    )
    torch.autograd.grad(once, mine, create_graph=True)  # saved tensors can be read only once
    for loss in (sharded_smooth_topk_loss, sharded_noised_topk_loss):
        (gradient,) = torch.autograd.grad(loss(mine, target, k=3), mine, create_graph=True)
        with raises(RuntimeError, "no second derivative: take the loss of all classes"):
            gradient.sum().backward()


def compiled() -> None:
    logits, target = problem(torch.float32)
    for smoothing in (0.0, 0.1):

        def scaled(scores: Tensor, smoothing: float = smoothing) -> Tensor:
            return 3 * sharded_smooth_topk_loss(2 * scores, target, label_smoothing=smoothing)

        results = []
        for function in (scaled, torch.compile(scaled, backend="eager")):
            leaf = logits[:, own()].clone().requires_grad_()
            with warnings.catch_warnings():  # PyTorch's compiler looks at .grad of other tensors
                warnings.filterwarnings("ignore", "The .grad attribute")
                function(leaf).backward()
            results.append(leaf.grad)
        torch.testing.assert_close(*results)


def a_rank_that_is_late() -> None:
    """The others do not wait for longer than the timeout of the group."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    logits, target = problem()
    if dist.get_rank():
        with raises(dist.DistNetworkError, "did not answer within the group's timeout"):
            sharded_smooth_topk_loss(logits[:, own()], target, group=group)
    dist.barrier()


def a_rank_that_dies() -> None:
    """To be run last."""
    group = dist.new_group(timeout=timedelta(seconds=5))
    logits, target = problem()
    if dist.get_rank() == 0:
        os._exit(0)
    with raises(dist.DistNetworkError, "waits for another rank, which has ended or did not answer"):
        sharded_smooth_topk_loss(logits[:, own()], target, group=group)


CASES = [
    communication,
    differences,
    errors_of_one_rank,
    labels_of_no_rank,
    lists_as_long_as_the_classes,
    declared_slices,
    long_parameters,
    second_derivatives,
    compiled,
    a_rank_that_is_late,
]
LAST = a_rank_that_dies
