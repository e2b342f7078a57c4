"""A target of a few classes is the same as the dense row that it stands for."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import topklass
from contract_cases import (
    INF,
    C,
    all_pairs,
    every_loss,
    every_reduction,
    every_smooth_loss,
    value_and_gradient,
)
from losses_table import LOSSES, class_dim, problem
from topklass import SparseTarget
from topklass.operators.esp import smooth_gap
from topklass.reference import tree

# PyTorch's own forward mode still uses what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

SMOOTH = LOSSES[0]
SHAPES = [(C,), (4, C), (3, C, 2)]


def few(shape, m: int, dtype: torch.dtype = torch.float64, pads: bool = True) -> SparseTarget:
    """Random classes and weights for logits of this shape, with repeats and with padding."""
    dim = 0 if len(shape) == 1 else 1
    size = (*shape[:dim], m, *shape[dim + 1 :])
    indices, weights = torch.randint(shape[dim], size), torch.rand(size, dtype=dtype)
    if pads:
        indices = indices.masked_fill(torch.rand(size) < 0.2, -100)
    return SparseTarget(indices, weights)


def assert_is_dense(loss, logits: Tensor, target: SparseTarget, tolerance=1e-12, **options):
    """Value and gradients, by the logits and by the weights, are those of the dense target."""
    indices, weights = target
    dim = options.get("dim", class_dim(logits))
    fixed = loss.fixed(logits.shape)

    def sparse(x: Tensor, w: Tensor) -> Tensor:
        return loss(x, SparseTarget(indices, w), **options, **fixed)

    def dense(x: Tensor, w: Tensor) -> Tensor:
        classes = SparseTarget(indices, w).to_dense(logits.shape[dim], dim=dim)
        return loss(x, classes, **options, **fixed)

    results = [value_and_gradient(function, logits, weights) for function in (sparse, dense)]
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)
    if weights.numel():  # their gradient takes another way
        leaf = weights.requires_grad_()
        results = [
            (function(logits, leaf), *torch.autograd.grad(function(logits, leaf).sum(), leaf))
            for function in (sparse, dense)
        ]
        torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


# The options of the losses


@every_loss
@pytest.mark.parametrize(
    ("shape", "m", "reduction", "label_smoothing", "weighted"),
    all_pairs(SHAPES, [0, 1, 2, 5], ["none", "mean", "sum"], [0.0, 0.2], [False, True]),
    ids=str,
)
def test_options(loss, shape, m, reduction, label_smoothing, weighted):
    logits, _ = problem(shape)
    options = loss.arguments(per_class=weighted)
    options |= {"reduction": reduction, "label_smoothing": label_smoothing}
    if weighted:
        options["weight"] = torch.rand(C, dtype=torch.float64)
    assert_is_dense(loss, logits, few(shape, m), **options)


@every_loss
@pytest.mark.parametrize("k", [1, 4, 13, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_k(loss, k, dtype):
    """Also as many labels as classes, and lists of all classes but one."""
    for classes, m in ((k + 1, k + 1), (k + 3, 4), (60, 16)):
        logits, _ = problem((3, classes), dtype=dtype)
        k_here = min(k, classes - 1)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-6
        arguments = loss.arguments(classes, k_here, per_class=True) | {"reduction": "none"}
        assert_is_dense(loss, logits, few((3, classes), m, dtype), tolerance, **arguments)


@every_loss
@pytest.mark.parametrize(("shape", "dim"), [((3, 2, C), -1), ((C, 4), 0)], ids=str)
def test_dim(loss, shape, dim):
    logits = torch.randn(shape, dtype=torch.float64)
    target = SparseTarget(*(x.movedim(1, dim) for x in few(logits.movedim(dim, 1).shape, 3)))
    assert_is_dense(loss, logits, target, **loss.arguments(), dim=dim)


@every_loss
def test_one_class_of_weight_one_is_a_class_index(loss):
    logits, labels = problem((4, C))
    target = SparseTarget(labels.unsqueeze(1), torch.ones(4, 1, dtype=torch.float64))
    arguments = loss.arguments()
    actual = value_and_gradient(loss, logits, target, **arguments)
    torch.testing.assert_close(actual, value_and_gradient(loss, logits, labels, **arguments))


@every_loss
def test_padding_is_ignore_index(loss):
    """Whatever its weight, also where that is not −100 but a class."""
    logits, _ = problem((2, C))
    indices, weights = torch.tensor([[0, 3], [3, 3]]), torch.rand(2, 2, dtype=torch.float64)
    kept = SparseTarget(indices, weights.masked_fill(indices == 3, 0.0))
    arguments = loss.arguments() | {"reduction": "none"}
    padded = SparseTarget(indices, weights.masked_fill(indices == 3, math.nan))
    actual = value_and_gradient(loss, logits, padded, ignore_index=3, **arguments)
    torch.testing.assert_close(actual, value_and_gradient(loss, logits, kept, **arguments))


# Numbers


@every_loss
@every_reduction
def test_empty_batch(loss, reduction):
    logits, dense = problem((0, C), "probabilities")
    arguments = loss.arguments() | {"reduction": reduction}
    actual = loss(logits.requires_grad_(), few((0, C), 2), **arguments)
    torch.testing.assert_close(actual, loss(logits, dense, **arguments), equal_nan=True)
    assert torch.autograd.grad(actual.sum(), logits)[0].shape == (0, C)


@every_loss
@pytest.mark.parametrize("where", [0, 1, 4])
def test_nan(loss, where):
    logits, _ = problem((2, C))
    logits[0, where] = math.nan
    target = SparseTarget(torch.tensor([[0, 1], [2, 3]]), torch.full((2, 2), 0.5).double())
    arguments = loss.arguments() | {"reduction": "none"}
    value, gradient = value_and_gradient(loss, logits, target, **arguments)
    assert value.isnan().tolist() == [True, False]
    assert gradient.isnan().all(1).tolist() == [True, False]
    assert gradient[1].isfinite().all()


@every_loss
@pytest.mark.parametrize("k", [1, 3])
def test_absent_classes(loss, k):
    """As for dense rows: +inf for an absent class, unless its weight is 0."""
    logits, _ = problem((4, C))
    logits[0, 0] = -INF  # a label with weight
    logits[1, 0] = -INF  # a label without
    logits[2, 4:] = -INF  # classes that are no labels
    logits[3, 2:] = -INF  # more than k
    target = SparseTarget(
        torch.tensor([[0, 1], [0, 1], [2, 3], [0, 1]]),
        torch.tensor([[0.5, 0.5], [0.0, 1.0], [0.5, 0.5], [0.3, 0.7]]).double(),
    )
    arguments = loss.arguments(k=k) | {"reduction": "none"} | loss.fixed(logits.shape)
    actual = value_and_gradient(loss, logits, target, **arguments)
    expected = value_and_gradient(loss, logits, target.to_dense(C), **arguments)
    assert actual[0][0] == INF
    assert actual[0][1:].isfinite().all()
    torch.testing.assert_close(actual[0], expected[0])
    torch.testing.assert_close(actual[1][1:], expected[1][1:])


@every_loss
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_half_precision_computes_in_float32(loss, dtype, label_smoothing):
    logits, _ = problem((4, C), dtype=dtype)
    target = few((4, C), 3, dtype)
    options = loss.arguments() | {"label_smoothing": label_smoothing}
    value, gradient = value_and_gradient(loss, logits, target, **options)
    wide = SparseTarget(target.indices, target.weights.float())
    expected, slope = value_and_gradient(loss, logits.float(), wide, **options)
    assert value.dtype == gradient.dtype == dtype
    torch.testing.assert_close(value, expected.to(dtype))
    torch.testing.assert_close(gradient, slope.to(dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert loss(logits, target, **options).dtype == torch.float32


@pytest.mark.parametrize("k", [1, 5, 10, 32])
@pytest.mark.parametrize("tau", [1.0, 0.01])
def test_hard_rows(k, tau):
    """Ties at the threshold, labels far above all others, far below, all equal, large spreads."""
    n, m = 60, 6
    rows = torch.stack(
        [
            torch.zeros(n),
            torch.linspace(0, 1e-4, n),
            torch.linspace(0, 500, n),
            torch.randn(n) * 20,
            (torch.arange(n) < m).float() * 1e3,
            (torch.arange(n) >= m).float() * 1e3,
            (torch.arange(n) < k).float() * 30,
            (torch.arange(n) < k + 1).float() * 30,
        ]
    )
    labels = torch.arange(m).expand(len(rows), m)
    logits = rows.clone().requires_grad_()
    gaps = smooth_gap(logits, labels, k, tau)
    exact = rows.double().requires_grad_()
    expected = torch.cat([tree.smooth_gap(exact, labels[:, [i]], k, tau) for i in range(m)], 1)
    torch.testing.assert_close(gaps, expected, rtol=1e-6, atol=1e-5 * tau)
    cotangent = torch.rand(gaps.shape, dtype=torch.float64)
    (actual,) = torch.autograd.grad(gaps, logits, cotangent)
    (slope,) = torch.autograd.grad(expected, exact, cotangent)
    torch.testing.assert_close(actual, slope.float(), rtol=1e-5, atol=2e-6)


def test_constants_of_some_rows_at_a_time(monkeypatch):
    logits, _ = problem((9, C))
    target, arguments = few((9, C), 3), SMOOTH.arguments() | {"reduction": "none"}
    expected = value_and_gradient(SMOOTH, logits, target, **arguments)
    monkeypatch.setattr("topklass.reference.fused.CONSTANTS_ELEMENTS", 200)
    actual = value_and_gradient(SMOOTH, logits, target, **arguments)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert gradgradcheck(lambda x: SMOOTH(x, target, **arguments), logits.requires_grad_())


# What PyTorch does to functions


@every_loss
@pytest.mark.parametrize("m", [1, 3])
def test_derivatives(loss, m):
    logits, _ = problem((3, C))
    target = few((3, C), m)
    arguments = loss.arguments(per_class=True) | loss.fixed(logits.shape) | {"reduction": "none"}

    def function(x: Tensor, weights: Tensor) -> Tensor:
        return loss(x, SparseTarget(target.indices, weights), **arguments)

    leaves = logits.requires_grad_(), target.weights.requires_grad_()
    assert gradcheck(function, leaves, check_forward_ad=True)
    if loss.smooth:
        assert gradgradcheck(function, leaves)


@every_smooth_loss
def test_second_derivative_with_absent_classes(loss):
    logits = torch.randn(2, C, dtype=torch.float64)
    target, arguments = few((2, 3), 2), loss.arguments()

    def masked(x: Tensor) -> Tensor:
        return loss(x.masked_fill(torch.arange(C) > 3, -INF), target, **arguments)

    assert gradgradcheck(masked, logits.requires_grad_())


@every_loss
def test_vmap_and_func_grad(loss):
    logits, _ = problem((4, C))
    target, arguments = few((4, C), 3), loss.arguments()
    noise = loss.fixed(logits.shape)

    def of_one(x: Tensor, y: SparseTarget, fixed: dict[str, Tensor]) -> Tensor:
        return loss(x, y, **arguments, **fixed)

    each = torch.func.vmap(torch.func.grad(of_one))(logits, target, noise)
    total = value_and_gradient(loss, logits, target, **arguments, **noise, reduction="sum")
    torch.testing.assert_close(each, total[1])


@pytest.mark.filterwarnings("ignore")  # the compiler warns, differently in every version
@pytest.mark.parametrize(
    "loss",
    [x if x is SMOOTH else pytest.param(x, marks=pytest.mark.slow) for x in LOSSES],
    ids=lambda loss: loss.name,
)
@pytest.mark.parametrize("m", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_compile(loss, m):
    torch.compiler.reset()
    arguments = loss.arguments(per_class=True)
    compiled = torch.compile(
        lambda x, i, w, fixed: loss(x, SparseTarget(i, w), **arguments, **fixed),
        backend="aot_eager",
        fullgraph=True,
    )
    for rows in (4, 7):
        logits, _ = problem((rows, C))
        target, fixed = few((rows, C), m), loss.fixed(logits.shape)
        actual = value_and_gradient(compiled, logits, *target, fixed)
        expected = value_and_gradient(loss, logits, target, **arguments, **fixed)
        torch.testing.assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["smooth", "hinge", "mixed_topk_cross_entropy"])
def test_export(name):
    loss = next(loss for loss in LOSSES if loss.name == name)
    module = loss.module(**loss.arguments())
    rows = {0: torch.export.Dim("rows", max=2**31)}
    inputs = problem((4, C))[0], few((4, C), 3)
    program = torch.export.export(module, inputs, dynamic_shapes=(rows, SparseTarget(rows, rows)))
    logits, target = problem((9, C))[0], few((9, C), 3)
    torch.testing.assert_close(program.module()(logits, target), module(logits, target))


# Properties

# The linear losses


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("k", [2, {1: 0.4, 3: 0.6}], ids=str)
def test_linear_losses(reduction, label_smoothing, k):
    features, weight = torch.randn(5, 3, 4).double(), torch.randn(C, 4).double().requires_grad_()
    target = SparseTarget(torch.randint(C, (5, 3, 2)), torch.rand(5, 3, 2).double())
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    chunked = topklass.functional.linear_topk_cross_entropy(
        features, weight, target, k, chunk_bytes=4096, **options
    )
    plain = topklass.functional.topk_cross_entropy(
        F.linear(features, weight), target, k, dim=-1, **options
    )
    torch.testing.assert_close(chunked, plain)
    gradients = [torch.autograd.grad(x.sum(), weight)[0] for x in (chunked, plain)]
    torch.testing.assert_close(*gradients)


def test_linear_losses_have_no_derivative_by_weights():
    target = SparseTarget(torch.zeros(2, 1).long(), torch.ones(2, 1, requires_grad=True))
    with pytest.raises(RuntimeError, match="derivative by the target"):
        topklass.LinearSmoothTopKLoss(4, C, k=2)(torch.randn(2, 4), target)


# Conversion


@pytest.mark.parametrize("shape", [(C,), (4, C), (3, C, 2), (0, C)], ids=str)
@pytest.mark.parametrize("m", [None, 3, C + 2])
def test_from_dense(shape, m):
    dense = torch.rand(shape, dtype=torch.float64)
    dim = 0 if len(shape) == 1 else 1
    dense = dense.scatter(dim, dense.topk(C - 3, dim).indices, 0.0).requires_grad_()
    target = SparseTarget.from_dense(dense, m)
    expected = min(C, 3 if m is None else m) if dense.numel() or m else 0
    assert target.indices.shape[dim] == target.weights.shape[dim] == expected
    torch.testing.assert_close(target.to_dense(C), dense)
    assert torch.autograd.grad(target.weights.sum(), dense)[0].sum() == target.weights.numel()


def test_from_dense_loses_nothing():
    dense = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]])
    with pytest.raises(ValueError, match=r"a sample has 3 classes .* got m=2"):
        SparseTarget.from_dense(dense, 2)
    with pytest.raises(TypeError, match=r"probabilities must be .* got torch.int64"):
        SparseTarget.from_dense(torch.ones(2, 3).long())
    spoilt = torch.tensor([[math.nan, 0.5, 0.0]])
    assert SparseTarget.from_dense(spoilt).weights.isnan().any()


# Mistakes


@pytest.mark.parametrize(
    ("indices", "weights", "error", "message"),
    [
        ((4, 2), (4, 3), RuntimeError, r"must have shape \(4, m\), got \(4, 2\) and \(4, 3\)"),
        ((3, 2), (3, 2), RuntimeError, r"must have shape \(4, m\), got \(3, 2\)"),
        ((4,), (4,), RuntimeError, r"must have shape \(4, m\), got \(4,\)"),
    ],
)
def test_wrong_shapes(indices, weights, error, message):
    target = SparseTarget(torch.zeros(indices).long(), torch.zeros(weights))
    with pytest.raises(error, match=message):
        topklass.SmoothTopKLoss(2)(torch.randn(4, C), target)


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        (SparseTarget(torch.zeros(4, 2), torch.zeros(4, 2)), RuntimeError, "must be integers"),
        (SparseTarget(torch.zeros(4, 2).long(), torch.zeros(4, 2).long()), RuntimeError, "floats"),
        (SparseTarget(torch.full((4, 2), C), torch.zeros(4, 2)), IndexError, f"got {C}"),
        (SparseTarget(torch.zeros(4, 2).long(), 0.5), TypeError, "weights .* must be a tensor"),
        ((torch.zeros(4, 2).long(), torch.zeros(4, 2)), TypeError, "got tuple"),
    ],
    ids=["indices", "weights", "range", "number", "tuple"],
)
def test_wrong_targets(target, error, message):
    with pytest.raises(error, match=message):
        topklass.SmoothTopKLoss(2)(torch.randn(4, C), target)


def test_metrics_take_class_indices():
    with pytest.raises(TypeError, match="class probabilities here, got SparseTarget"):
        topklass.topk_accuracy(torch.randn(4, C), few((4, C), 2))
