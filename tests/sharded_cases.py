"""What every rank of a group checks: a slice of the classes gives what all classes give.

Every rank makes the whole problem from a seed, and its own slice of it. The oracle is the loss of
all classes, in float64.
"""

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import topklass
import topklass.functional as TF
from topklass import SparseTarget
from topklass.distributed import (
    sharded_linear_smooth_topk_loss,
    sharded_linear_topk_cross_entropy,
    sharded_noised_topk_loss,
    sharded_predict_topk,
    sharded_smooth_topk_loss,
    sharded_target_rank,
    sharded_topk_accuracy,
    sharded_topk_cross_entropy,
)

ROWS, CLASSES = 7, 23
SIZES = {1: (23,), 2: (9, 14), 3: (2, 0, 21), 4: (1, 12, 0, 10)}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
Loss = Callable[..., Tensor]


def own(classes: int = CLASSES) -> slice:
    """The slice of this rank; other numbers of classes are divided likewise."""
    sizes = SIZES[dist.get_world_size()]
    bounds = [sum(sizes[:i]) * classes // CLASSES for i in range(len(sizes) + 1)]
    return slice(*bounds[dist.get_rank() : dist.get_rank() + 2])


def problem(dtype: torch.dtype = torch.float64, classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    """Logits with ties and absent classes, and class indices, one of them ignored."""
    logits = 4 * torch.randn(ROWS, classes, dtype=torch.float64)
    logits[0, 1:15] = logits[0, 1].clone()  # on several ranks
    logits[1, 2:19] = -math.inf
    logits[2, 2:] = -math.inf  # fewer than k
    target = torch.randint(classes, (ROWS,))
    target[1], target[2], target[4] = 0, 1, -100
    return logits.to(dtype), target


def raises(kind: type[Exception] | tuple[type[Exception], ...], message: str) -> Any:
    """Require an error of this type whose message has these words."""
    return pytest.raises(kind, match=re.escape(message))


def close(ours: Tensor, expected: Tensor, rtol: float) -> None:
    """Up to a share of each value, or of the largest of its row."""
    if not expected.numel():
        assert ours.shape == expected.shape
        return
    rows = expected.reshape(-1, expected.shape[-1]) if expected.dim() else expected.reshape(1, 1)
    largest = rows.nan_to_num(0, 0, 0).abs().amax(1, keepdim=True)
    mine = ours.reshape(rows.shape).double()
    assert torch.equal(mine.isnan(), rows.isnan()), (ours, expected)
    difference = (mine - rows).masked_fill(mine == rows, 0).nan_to_num(0, math.inf, math.inf)
    assert (difference.abs() <= rtol * largest).all(), (ours, expected)


def compare(
    sharded: Loss,
    whole: Loss,
    logits: Tensor,
    target: Tensor | SparseTarget,
    per_class: dict[str, Tensor] | None = None,
    rtol: float | None = None,
    dim: int = 1,
    **options: Any,
) -> None:
    """Losses and gradients: this rank's slice of those of all classes, the same on all ranks."""
    rtol = rtol or TOLERANCE[logits.dtype]
    per_class = per_class or {}
    classes = own(logits.shape[dim])
    leaf = logits.double().clone().requires_grad_()
    expected = whole(leaf, target, dim=dim, **per_class, **options)
    here = range(logits.shape[dim])[classes]
    mine = logits.narrow(dim, here.start, len(here)).clone().requires_grad_()
    local = {
        name: value[:, classes] if name == "noise" else value[classes]
        for name, value in per_class.items()
    }
    if isinstance(target, Tensor) and target.is_floating_point():
        target = target.narrow(dim, here.start, len(here))
    loss = sharded(mine, target, dim=dim, **local, **options)
    assert loss.dtype == logits.dtype
    close(loss.detach(), expected.detach(), rtol)
    everywhere = [torch.empty_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, loss.detach())
    assert all(torch.equal(each, loss.detach()) for each in everywhere if not loss.isnan().any())
    outgoing = torch.rand(expected.shape, dtype=torch.float64)
    expected.masked_fill(expected == math.inf, 0).backward(outgoing)
    loss.masked_fill(loss == math.inf, 0).backward(outgoing.to(loss.dtype))
    gradient = leaf.grad.movedim(dim, -1)
    scale = gradient.nan_to_num().abs().amax() if gradient.numel() else 0.0
    part = gradient[..., classes]
    assert torch.equal(mine.grad.movedim(dim, -1).isnan(), part.isnan())
    difference = (mine.grad.movedim(dim, -1) - part).nan_to_num()
    assert (difference.abs() <= rtol * scale).all(), difference.abs().max() / scale


SMOOTH = (sharded_smooth_topk_loss, TF.smooth_topk_loss)
LISTS = (sharded_topk_cross_entropy, TF.topk_cross_entropy)
NOISED = (sharded_noised_topk_loss, TF.noised_topk_loss)


def smooth_losses() -> None:
    for dtype in TOLERANCE:
        for smoothing in (0.0, 0.2):
            for k, tau in ((1, 1.0), (4, 0.3)):
                options = {"k": k, "tau": tau, "label_smoothing": smoothing}
                logits, target = problem(dtype)
                compare(*SMOOTH, logits, target, **options, reduction="none")
                weight = {"weight": torch.rand(CLASSES, dtype=dtype)}
                margin = {"margin": torch.rand(CLASSES, dtype=dtype)}
                compare(*SMOOTH, logits, target, weight | margin, **options, reduction="sum")
                present = logits.nan_to_num(neginf=-3.0)
                compare(*SMOOTH, present, target, weight, **options, margin=0.5)


def the_longest_lists() -> None:
    for dtype, k in ((torch.float32, 32), (torch.float64, 12)):
        logits, target = torch.randn(ROWS, 90, dtype=dtype), torch.randint(90, (ROWS,))
        for smoothing in (0.0, 0.1):
            compare(*SMOOTH, logits, target, k=k, tau=0.3, label_smoothing=smoothing, rtol=2e-6)
        with raises(ValueError, f"k must be from 1 to {k}, for {dtype} and classes split"):
            sharded_smooth_topk_loss(logits[:, own(90)], target, k=k + 1)


def long_rows() -> None:
    logits, target = problem(torch.float32, 4000)
    compare(*SMOOTH, logits, target, k=3, reduction="none")


def half_precision() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        logits, target = problem(dtype)
        compare(*SMOOTH, logits, target, rtol=torch.finfo(dtype).eps, reduction="none")


def large_scores() -> None:
    logits, target = problem(torch.float64)
    for scale in (1e-3, 300.0):
        compare(*SMOOTH, scale * logits, target, k=4, reduction="none")
        compare(*SMOOTH, scale * logits, target, k=4, label_smoothing=0.3, reduction="none")


def blocks_of_rows() -> None:
    from topklass.functional import _sharded

    before = _sharded.GRAPH_ELEMENTS
    _sharded.GRAPH_ELEMENTS = dict.fromkeys(before, 1500)
    try:
        logits, target = problem()
        compare(*SMOOTH, logits, target, k=3, label_smoothing=0.2, reduction="none")
    finally:
        _sharded.GRAPH_ELEMENTS = before


def lists() -> None:
    for k in (2, {1: 0.3, 4: 0.7}, {1: 0.2, 2: 0.3, 5: 0.5}):
        for smoothing in (0.0, 0.1):
            for temperature in (1.0, 5.0):
                logits, target = problem()
                options = {"k": k, "temperature": temperature, "label_smoothing": smoothing}
                compare(*LISTS, logits, target, **options, reduction="none")
                margin = {"margin": torch.rand(CLASSES, dtype=torch.float64)}
                compare(*LISTS, logits.nan_to_num(neginf=-3.0), target, margin, **options)


def the_short_list_loss() -> None:
    def whole(logits: Tensor, target: Tensor, dim: int) -> Tensor:
        return topklass.ShortListLoss(k=5)(logits, target)

    def sharded(logits: Tensor, target: Tensor, dim: int) -> Tensor:
        arguments = {"k": {1: 0.5, 5: 0.5}, "temperature": 5.0, "label_smoothing": 0.1}
        return sharded_topk_cross_entropy(logits, target, dim=dim, **arguments)

    logits, target = problem(torch.float32)
    compare(sharded, whole, logits.nan_to_num(neginf=-9.0), target)


def cross_entropy() -> None:
    """PyTorch's own, with label smoothing and weights."""

    def whole(logits: Tensor, target: Tensor, dim: int, **options: Any) -> Tensor:
        return F.cross_entropy(logits, target, **options)

    logits, target = problem()
    weight = {"weight": torch.rand(CLASSES, dtype=torch.float64)}
    for smoothing in (0.0, 0.1):
        for reduction in ("mean", "sum", "none"):
            options = {"label_smoothing": smoothing, "reduction": reduction}

            def sharded(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
                return sharded_topk_cross_entropy(logits, target, 1, **options)

            compare(sharded, whole, logits.nan_to_num(neginf=-9.0), target, weight, **options)


def probabilities() -> None:
    logits, _ = problem()
    target = torch.rand(ROWS, CLASSES, dtype=torch.float64).masked_fill(logits == -math.inf, 0.0)
    for smoothing in (0.0, 0.3):
        given = logits if smoothing == 0 else logits.nan_to_num(neginf=-9.0)
        for pair in (SMOOTH, LISTS):
            compare(*pair, given, target, k=3, label_smoothing=smoothing, reduction="none")
            compare(*pair, given, target, k=3, label_smoothing=smoothing)
    with raises(RuntimeError, "ignore_index is not supported for a target of class probabilities"):
        sharded_smooth_topk_loss(logits[:, own()], target[:, own()], ignore_index=0)


def few_classes() -> None:
    """Of a row on several ranks, listed twice, padded, and among the heads or not."""
    logits, target = problem()
    logits = logits.nan_to_num(neginf=-9.0)
    indices = torch.cat([target.unsqueeze(1), torch.randint(CLASSES, (ROWS, 3))], 1)
    indices[0], indices[5] = torch.tensor([1, 14, 1, 22]), -100
    weights = torch.rand(ROWS, 4, dtype=torch.float64)
    few = SparseTarget(indices, weights)
    per_class = {
        "weight": torch.rand(CLASSES, dtype=torch.float64),
        "margin": torch.rand(CLASSES, dtype=torch.float64),
    }
    noise = {"noise": torch.randn(ROWS, CLASSES, 3, dtype=torch.float64)}
    for smoothing in (0.0, 0.2):
        options = {"label_smoothing": smoothing, "reduction": "none"}
        compare(*SMOOTH, logits, few, k=3, **options)
        compare(*SMOOTH, logits.float(), few, k=3, tau=0.3, **options)
        compare(*LISTS, logits, few, per_class, k={1: 0.3, 4: 0.7}, label_smoothing=smoothing)
        compare(*NOISED, logits, few, per_class | noise, k=3, **options)
        every = few.to_dense(CLASSES)[:, own()]
        ours = sharded_smooth_topk_loss(logits[:, own()], few, label_smoothing=smoothing)
        dense = sharded_smooth_topk_loss(logits[:, own()], every, label_smoothing=smoothing)
        torch.testing.assert_close(ours, dense)
        gradients = []
        for loss, given in (SMOOTH[0], logits[:, own()]), (SMOOTH[1], logits):
            leaf = weights.clone().requires_grad_()
            loss(given, few._replace(weights=leaf), label_smoothing=smoothing).backward()
            gradients.append(leaf.grad)
        torch.testing.assert_close(*gradients)
    logits[(3, 5), CLASSES - 1] = math.nan
    logits[2] = -math.inf
    compare(*SMOOTH, logits, few, k=3, reduction="none")
    cube, wide = logits.t()[None], SparseTarget(*(each.t()[None] for each in few))
    compare(*SMOOTH, cube, wide, k=3, reduction="none")
    compare(*SMOOTH, logits, SparseTarget(indices[:, :0], weights[:, :0]), k=3)


def nan_everywhere() -> None:
    """A NaN on one rank makes the loss and the gradient of its row NaN on all ranks."""
    logits, target = problem()
    logits[3, CLASSES - 1] = math.nan  # a rival
    logits[5, target[5]] = math.nan
    logits[2, CLASSES - 1] = math.nan  # the others have few classes
    noise = torch.randn(ROWS, CLASSES, 3, dtype=torch.float64)
    for smoothing in (0.0, 0.2):
        for pair in (SMOOTH, LISTS):
            compare(*pair, logits, target, k=4, label_smoothing=smoothing, reduction="none")
        options = {"k": 4, "label_smoothing": smoothing, "reduction": "none"}
        compare(*NOISED, logits, target, {"noise": noise}, **options)


def shapes() -> None:
    logits, target = problem()
    compare(*SMOOTH, logits[0], target[0], k=3, dim=0)
    target = target.reshape(1, 7).repeat(2, 1)
    logits = logits.t().reshape(1, CLASSES, 7).repeat(2, 1, 1)
    compare(*SMOOTH, logits, target, k=3, reduction="none")
    logits = logits.transpose(1, 2)
    compare(*SMOOTH, logits, target, k=3, reduction="none", dim=-1, label_smoothing=0.1)
    for smoothing in (0.0, 0.1):
        options = {"k": 3, "label_smoothing": smoothing}
        compare(*SMOOTH, logits[:0], target[:0], dim=2, reduction="none", **options)
        compare(*SMOOTH, logits[:0], target[:0], dim=2, reduction="mean", **options)


def noised() -> None:
    logits, target = problem()
    given = {"noise": torch.randn(ROWS, CLASSES, 4, dtype=torch.float64)}
    weight = {"weight": torch.rand(CLASSES, dtype=torch.float64)}
    none = {"noise": given["noise"][:0]}
    compare(*NOISED, logits[:0], target[:0], none, k=3, reduction="none")
    for smoothing in (0.0, 0.2):
        options = {"k": 3, "scale": 2.0, "epsilon": 0.7, "label_smoothing": smoothing}
        compare(*NOISED, logits, target, given, reduction="none", **options)
        present = logits.nan_to_num(neginf=-9.0)
        compare(*NOISED, present, target, given | weight, **options)


def drawn_noise() -> None:
    """Every rank draws its own, from generators in the same state, too."""
    rows, classes = 2000, 10  # of each rank
    logits, target = torch.zeros(rows, classes), torch.zeros(rows, dtype=torch.long)

    def loss(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        options = {"k": 1, "samples": 1, "margin": 10.0, "reduction": "none"}
        return sharded_noised_topk_loss(logits, target, generator=generator, **options) - 10

    assert torch.equal(loss(1), loss(1))
    assert not torch.equal(loss(1), loss(2))
    second = torch.randn(20_000, classes * dist.get_world_size()).topk(2).values[:, 1]
    assert abs(loss(3).mean() - second.mean()) < 4 * second.std() / math.sqrt(rows)


def learned_margins() -> None:
    logits, target = problem()
    logits = logits.nan_to_num(neginf=-9.0)
    margins = torch.rand(CLASSES, dtype=torch.float64)
    for smoothing in (0.0, 0.2):
        for margin in (margins, margins[0]):
            whole = margin.clone().requires_grad_()
            TF.smooth_topk_loss(logits, target, 3, 1.0, whole, label_smoothing=smoothing).backward()
            mine = (margin[own()] if margin.dim() else margin).clone().requires_grad_()
            sharded_smooth_topk_loss(
                logits[:, own()], target, 3, 1.0, mine, label_smoothing=smoothing
            ).backward()
            expected = whole.grad[own()] if margin.dim() else whole.grad
            torch.testing.assert_close(mine.grad, expected)


def accuracy() -> None:
    logits, target = problem(torch.float32)
    logits[3, 20] = math.nan
    target[1] = 5  # absent
    for k in (2, [1, 3, CLASSES]):
        for average in ("micro", "macro", "none"):
            ours = sharded_topk_accuracy(logits[:, own()], target, k, average)
            expected = TF.topk_accuracy(logits, target, k, average)
            torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
    ranks = sharded_target_rank(logits[:, own()], target)
    assert torch.equal(ranks, TF.target_rank(logits, target))
    with raises(ValueError, f"k must be from 1 to {CLASSES}, the number of classes"):
        sharded_topk_accuracy(logits[:, own()], target, CLASSES + 1)


def predictions() -> None:
    logits, _ = problem()
    logits[5] = -math.inf
    logits[5, 9] = 0.0  # where the classes of the second rank begin, if there are two
    for k in (1, 4, 11):
        for method in ("marginals", "softmax"):
            for temperature in (1.0, 3.0):
                options = {"k": k, "method": method, "temperature": temperature}
                ours = sharded_predict_topk(logits[:, own()], **options)
                torch.testing.assert_close(ours, topklass.predict_topk(logits, **options))
    whole = sharded_predict_topk(logits[:, own()], CLASSES, method="softmax")
    assert torch.equal(whole.labels.sort().values, torch.arange(CLASSES).expand(ROWS, -1))
    cube = logits.t().reshape(1, CLASSES, ROWS).float()
    ours = sharded_predict_topk(cube[:, own()], 3, dim=1)
    torch.testing.assert_close(ours, topklass.predict_topk(cube, 3, dim=1))
    logits[0, 0] = math.nan
    ours = sharded_predict_topk(logits[:, own()], 3)
    assert ours.probabilities.isnan().all(1).tolist() == [True] + [False] * (ROWS - 1)


def linear_layer() -> None:
    lists = sharded_linear_topk_cross_entropy, TF.topk_cross_entropy
    for dtype, rtol in ((torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        samples = torch.randn(ROWS, 6, dtype=torch.float64).to(dtype)
        layer = (samples, torch.randn(CLASSES, 6).to(dtype), torch.randn(CLASSES).to(dtype))
        for sharded, whole, k in (
            (sharded_linear_smooth_topk_loss, TF.smooth_topk_loss, 3),
            (*lists, 1),
            (*lists, {1: 0.5, 4: 0.5}),
        ):
            compare_layers(sharded, whole, layer, k, rtol)
    with raises(RuntimeError, "the last dimension of input must be that of linear_weight, 5, got"):
        sharded_linear_smooth_topk_loss(samples, layer[1][own(), 1:], problem()[1])


def behind_a_network() -> None:
    """The program of docs/scale-sharded.md gives a network the gradient of the whole batch."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    images, labels = torch.randn(3 * ranks, 10), torch.randint(CLASSES, (3 * ranks,))
    layer, weight = torch.nn.Linear(10, 6), torch.randn(CLASSES, 6)
    network = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(layer))
    features = network(images.chunk(ranks)[rank])
    parts = [torch.empty_like(features) for _ in range(ranks)]
    dist.all_gather(parts, features.detach())
    whole = torch.cat(parts).requires_grad_()
    sharded_linear_smooth_topk_loss(whole, weight[own()], labels, k=3).backward()
    features.backward(ranks * whole.grad.chunk(ranks)[rank])
    TF.smooth_topk_loss(layer(images) @ weight.T, labels, k=3).backward()
    for ours, theirs in zip(network.module.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def compare_layers(
    sharded: Loss, whole: Loss, layer: tuple[Tensor, ...], k: object, rtol: float
) -> None:
    """The loss of a layer in one with it, and the loss of its logits."""
    labels, weight = problem()[1], torch.rand(CLASSES, dtype=torch.float64)
    few = SparseTarget(torch.randint(CLASSES, (ROWS, 2)), torch.rand(ROWS, 2))
    samples, rows, bias = layer
    for target, reduction, smoothing, chunk in (
        (labels, "mean", 0.0, 1500),
        (labels, "sum", 0.2, None),
        (labels, "none", 0.1, 10_000),
        (few, "mean", 0.0, 3000),
    ):
        options = {"reduction": reduction, "label_smoothing": smoothing, "k": k}
        full = [t.double().clone().requires_grad_() for t in layer]
        expected = whole(F.linear(*full), target, weight=weight, **options)
        mine = [t.clone().requires_grad_() for t in (samples, rows[own()], bias[own()])]
        options |= {"linear_bias": mine[2], "weight": weight[own()], "chunk_bytes": chunk}
        loss = sharded(*mine[:2], target, **options)
        assert loss.dtype == samples.dtype
        close(loss.detach(), expected.detach(), rtol)
        outgoing = torch.rand(expected.shape, dtype=torch.float64).to(samples.dtype)
        expected.backward(outgoing.double())
        loss.backward(outgoing)
        for ours, theirs, part in zip(mine, full, (slice(None), own(), own()), strict=True):
            assert ours.grad.dtype == samples.dtype
            difference = (ours.grad - theirs.grad[part]).abs()
            assert (difference <= rtol * theirs.grad.abs().max()).all()


CASES = [
    smooth_losses,
    the_longest_lists,
    long_rows,
    half_precision,
    large_scores,
    blocks_of_rows,
    lists,
    the_short_list_loss,
    cross_entropy,
    probabilities,
    few_classes,
    nan_everywhere,
    shapes,
    noised,
    drawn_noise,
    learned_margins,
    accuracy,
    predictions,
    behind_a_network,
    linear_layer,
]
