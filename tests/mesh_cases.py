"""What every rank of a device mesh checks: a DTensor gives what an ordinary tensor gives."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import topklass
import topklass.functional as TF
from sharded_cases import raises
from topklass.distributed import sharded_smooth_topk_loss

ROWS, CLASSES = 5, 11
PLACEMENTS = {
    1: [(Shard(1),), (Shard(0),), (Replicate(),)],
    2: [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Shard(1)), (Shard(0), Shard(0))],
}


def meshes() -> list[Any]:
    """One of one dimension, and with four ranks one of two."""
    ranks = dist.get_world_size()
    shapes = [(ranks,), (2, 2)] if ranks == 4 else [(ranks,)]
    return [init_device_mesh("cpu", shape) for shape in shapes]


def of_rows(placements: tuple[Any, ...], at: int = 1) -> list[Any]:
    """How a target is placed."""
    return [p if p.is_shard() and not p.is_shard(at) else Replicate() for p in placements]


def placed(target: Any, mesh: Any, placements: Any) -> Any:
    """A target as it is, and as a DTensor with the placements that the logits' suggest."""
    yield target
    if isinstance(target, topklass.SparseTarget):
        rows = of_rows(placements)
        yield topklass.SparseTarget(*(distribute_tensor(each, mesh, rows) for each in target))
    else:
        dense = target.is_floating_point()
        yield distribute_tensor(target, mesh, placements if dense else of_rows(placements))


def check(criterion: Any, logits: Tensor, target: Any, mesh: Any, placements: Any) -> None:
    leaf = logits.clone().requires_grad_()
    expected = criterion(leaf, target)
    weights = torch.arange(1.0, 1 + expected.numel()).reshape(expected.shape)
    (expected * weights).sum().backward()
    for given in placed(target, mesh, placements):
        mine = distribute_tensor(logits, mesh, placements).requires_grad_()
        loss = criterion(mine, given)
        reduction = getattr(criterion, "criterion", criterion).reduction
        kept = of_rows(placements) if reduction == "none" else [Replicate()] * mesh.ndim
        assert list(loss.placements) == kept
        torch.testing.assert_close(loss.full_tensor(), expected)
        if expected.dim():
            (loss * distribute_tensor(weights, mesh, kept)).sum().backward()
        else:
            loss.backward(distribute_tensor(weights, mesh, kept))
        assert mine.grad.placements == placements
        torch.testing.assert_close(mine.grad.full_tensor(), leaf.grad)


def all_meshes() -> None:
    logits, target = torch.randn(ROWS, CLASSES), torch.randint(CLASSES, (ROWS,))
    target[1] = -100
    weight, margin = torch.rand(CLASSES), torch.rand(CLASSES)
    chances = torch.rand(ROWS, CLASSES)
    few = topklass.SparseTarget(torch.randint(CLASSES, (ROWS, 2)), torch.rand(ROWS, 2))
    counts = torch.arange(1, CLASSES + 1)
    for mesh in meshes():
        for placements in PLACEMENTS[mesh.ndim]:
            for criterion in (
                topklass.SmoothTopKLoss(3, margin=margin, weight=weight),
                topklass.SmoothTopKLoss(3, weight=weight, reduction="none"),
                topklass.ShortListLoss(3, reduction="sum"),
                topklass.NoisedTopKLoss(3, epsilon=0.0),
                topklass.LDAMLoss(margin, scale=3.0),
                topklass.LogitAdjustment(topklass.SmoothTopKLoss(3), counts),
                topklass.DeferredReweighting(topklass.SmoothTopKLoss(3), counts, start=0),
            ):
                check(criterion, logits, target, mesh, placements)
            criterion = topklass.TopKCrossEntropyLoss(2, weight=weight)
            for each in (chances, few):
                check(criterion, logits, each, mesh, placements)


def other_shapes() -> None:
    mesh = meshes()[0]
    logits, target = torch.randn(2, CLASSES, 3), torch.randint(CLASSES, (2, 3))
    for placement in (Shard(1), Shard(2), Shard(0)):
        smooth = topklass.SmoothTopKLoss(3, reduction="none")
        leaf = logits.clone().requires_grad_()
        smooth(leaf, target).sum().backward()
        mine = distribute_tensor(logits, mesh, [placement]).requires_grad_()
        loss = smooth(mine, target)
        torch.testing.assert_close(loss.full_tensor(), smooth(logits, target))
        loss.sum().backward()
        torch.testing.assert_close(mine.grad.full_tensor(), leaf.grad)
    part = torch.randn(ROWS, CLASSES)
    whole = part.clone()
    dist.all_reduce(whole)
    partial = DTensor.from_local(part, mesh, [Partial()])
    target = torch.randint(CLASSES, (ROWS,))
    expected = TF.smooth_topk_loss(whole, target, 3)
    torch.testing.assert_close(TF.smooth_topk_loss(partial, target, 3).full_tensor(), expected)


def differences() -> None:
    """Another argument on any rank of the mesh is an error on all ranks."""
    logits, target = torch.randn(ROWS, CLASSES), torch.randint(CLASSES, (ROWS,))
    last = dist.get_rank() == dist.get_world_size() - 1
    for mesh in meshes():
        for placements in PLACEMENTS[mesh.ndim]:
            if Shard(1) not in placements:
                continue
            mine = distribute_tensor(logits, mesh, placements)
            margins = {"margin": torch.tensor(2.0)}, {"margin": torch.ones(CLASSES)}
            for wrong in ({"k": 2}, {"tau": 2.0}, {"reduction": "sum"}, *margins):
                each = wrong if last else {}
                with raises((ValueError, RuntimeError), "must be the same on all ranks"):
                    TF.smooth_topk_loss(mine, target, **{"k": 3} | each)
            few = target[:-1] if last else target
            with raises((ValueError, RuntimeError), "must have shape"):
                TF.smooth_topk_loss(mine, few, 3)
            with raises((IndexError, RuntimeError), f"class indices from 0 to {CLASSES - 1}, or"):
                TF.smooth_topk_loss(mine, target.index_fill(0, torch.tensor([0]), CLASSES), 3)
            torch.testing.assert_close(
                TF.smooth_topk_loss(mine, target, 3).full_tensor(),
                TF.smooth_topk_loss(logits, target, 3),
            )


def what_is_not_served() -> None:
    mesh = meshes()[-1]
    logits, target = torch.randn(ROWS, CLASSES), torch.randint(CLASSES, (ROWS,))
    sharded = distribute_tensor(logits, mesh, [Shard(1)] * mesh.ndim)
    if mesh.ndim > 1:
        with raises(ValueError, "logits may be sharded over classes by one dimension of the mesh"):
            TF.smooth_topk_loss(sharded, target)
        return
    with raises(NotImplementedError, "LDAM and the noised loss with samples, not this loss"):
        TF.topk_hinge_loss(sharded, target)
    with raises(NotImplementedError, "noise cannot be given"):
        TF.noised_topk_loss(sharded, target, noise=torch.randn(ROWS, CLASSES, 2))
    distributed = DTensor.from_local(target, mesh, [Replicate()])
    for name, function, *arguments in (
        ("logits", topklass.predict_topk, sharded, 3),
        ("logits", topklass.topk_accuracy, sharded, target),
        ("input", TF.linear_predict_topk, sharded, logits, 3),
        ("target", TF.smooth_topk_loss, logits, distributed),
        ("local_logits", sharded_smooth_topk_loss, sharded, target),
    ):
        with raises(TypeError, f"{name} must be an ordinary tensor here, got a DTensor"):
            function(*arguments)
    odd = dist.get_rank() == 1
    with raises(ValueError, "SmoothHinge: k must be the same on all ranks, got '3' on rank 0"):
        TF.smooth_topk_loss(sharded, target, k=4 if odd else 3)
    torch.testing.assert_close(
        TF.smooth_topk_loss(sharded, target).full_tensor(), TF.smooth_topk_loss(logits, target)
    )


CASES = [all_meshes, other_shapes, differences, what_is_not_served]
