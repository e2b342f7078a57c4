"""Every loss is a drop-in replacement of ``cross_entropy``: options, shapes, absent classes."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from contract_cases import (
    CROSS_ENTROPIES,
    INF,
    TARGETS,
    C,
    assert_same,
    every_kind,
    every_loss,
    every_reduction,
    name,
    value_and_gradient,
    with_and_without_weight,
)
from losses_table import (
    LOSSES,
    by_hand,
    problem,
)

# The options of cross-entropy


@pytest.mark.parametrize("loss", CROSS_ENTROPIES, ids=name)
@pytest.mark.parametrize(("shape", "kind", "ignore_index"), TARGETS, ids=str)
@every_reduction
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2, 1.0])
@with_and_without_weight
def test_is_cross_entropy(loss, shape, kind, ignore_index, reduction, label_smoothing, weighted):
    input, target = problem(shape, kind)
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    if weighted:
        options["weight"] = torch.rand(C, dtype=torch.float64)
    if ignore_index is not None:
        options["ignore_index"] = ignore_index
        target.view(-1)[:2] = ignore_index
        target.view(-1)[2] = 0
    assert_same(
        lambda x, y, **options: loss(x, y, **loss.as_cross_entropy, **options),
        F.cross_entropy,
        input,
        target,
        **options,
    )


@every_loss
@pytest.mark.parametrize("shape", [(C,), (3, C, 2)], ids=str)
@every_kind
@every_reduction
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
@with_and_without_weight
def test_options_by_hand(loss, shape, kind, reduction, label_smoothing, weighted):
    input, target = problem(shape, kind)
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    if weighted:
        options["weight"] = torch.rand(C, dtype=torch.float64)
    if kind == "indices" and len(shape) > 1:
        target.view(-1)[1] = options["ignore_index"] = -1
    arguments = loss.arguments(per_class=weighted)
    assert_same(loss, lambda *a, **o: by_hand(loss, *a, **o), input, target, **options, **arguments)


@every_loss
@pytest.mark.parametrize(("classes", "k"), [(2, 1), (5, 1), (5, 4), (15, 13)])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_k_by_hand(loss, classes, k, label_smoothing, dtype):
    input, target = problem((3, classes))
    arguments = loss.arguments(classes, k, per_class=True) | {"label_smoothing": label_smoothing}
    expected = value_and_gradient(
        lambda *a, **o: by_hand(loss, *a, **o), input, target, **arguments
    )
    actual = value_and_gradient(loss, input.to(dtype), target, **arguments)
    tolerance = 2e-6 if dtype == torch.float32 else 1e-10
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, e.to(dtype), rtol=tolerance, atol=tolerance)


@every_loss
def test_module_is_function(loss):
    input, target = problem((4, C))
    options = {
        "weight": torch.rand(C, dtype=torch.float64),
        "ignore_index": int(target[0]),
        "reduction": "sum",
        "label_smoothing": 0.1,
    }
    arguments = loss.arguments(per_class=True) | options
    module = loss.module(**arguments)
    fixed = loss.fixed(input.shape)
    torch.testing.assert_close(
        module(input, target, **fixed), loss(input, target, **arguments), rtol=0, atol=0
    )


@every_loss
def test_gradient_of_probabilities(loss):
    input, target = problem((3, C), "probabilities")
    arguments = loss.arguments() | {"reduction": "sum"}
    target.requires_grad_()
    (actual,) = torch.autograd.grad(loss(input, target, **arguments), target)
    (expected,) = torch.autograd.grad(by_hand(loss, input, target, **arguments), target)
    torch.testing.assert_close(actual, expected)


@every_loss
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_integer_targets(loss, dtype):
    """Any integers; class 156 is not mistaken for −100, which is the same byte."""
    input, _ = problem((3, 160))
    target = torch.tensor([0, 2, 156 if dtype != torch.int8 else 100])
    arguments = loss.arguments(160) | loss.fixed(input.shape) | {"reduction": "none"}
    expected = loss(input, target, **arguments)
    torch.testing.assert_close(loss(input, target.to(dtype), **arguments), expected)

    arguments |= {n: v[0] for n, v in loss.fixed(input.shape).items()}  # the same for all samples
    each = torch.vmap(lambda x, y: loss(x, y, **arguments))
    torch.testing.assert_close(each(input, target.to(dtype)), each(input, target))
    assert (each(input, target)[2] > 0) == (expected[2] > 0)


# Empty batches


@every_loss
@every_kind
@pytest.mark.parametrize("shape", [(0, C), (0, C, 3), (3, C, 0)], ids=str)
def test_empty_batch(loss, kind, shape):
    input, target = problem(shape, kind)
    input.requires_grad_()
    for reduction in ("none", "sum", "mean"):
        actual = loss(input, target, **loss.arguments(), reduction=reduction)
        expected = F.cross_entropy(input, target, reduction=reduction)
        assert actual.shape == expected.shape
        assert actual.isnan().tolist() == expected.isnan().tolist()
        if reduction == "sum":
            assert actual == 0
        (gradient,) = torch.autograd.grad(actual.sum(), input)
        assert gradient.shape == input.shape


@every_loss
@with_and_without_weight
def test_all_ignored(loss, weighted):
    input, _ = problem((3, C))
    target = torch.full((3,), -100)
    arguments = loss.arguments()
    if weighted:
        arguments["weight"] = torch.rand(C, dtype=torch.float64)
    assert loss(input, target, **arguments).isnan()
    total, gradient = value_and_gradient(loss, input, target, **arguments, reduction="sum")
    assert total == 0
    assert (gradient == 0).all()


@every_loss
@pytest.mark.parametrize("content", [1e4, INF, -INF, math.nan])
def test_ignored_rows_do_not_matter(loss, content):
    """Whatever they hold. As with cross-entropy their own gradient is 0 if that is finite."""
    input, target = problem((4, C))
    target[1:] = -100
    arguments = loss.arguments() | loss.fixed(input.shape)
    expected, expected_gradient = value_and_gradient(loss, input, target, **arguments)
    input[1:] = content
    value, gradient = value_and_gradient(loss, input, target, **arguments)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient[0], expected_gradient[0])
    assert (expected_gradient[1:] == 0).all()
    assert math.isinf(content) or math.isnan(content) or (gradient[1:] == 0).all()


# Absent classes


@every_loss
@every_kind
@pytest.mark.parametrize("k", [1, 2, 13])
@with_and_without_weight
def test_masking_is_removing(loss, kind, k, weighted):
    classes = k + 6
    absent = torch.tensor([0, 2, k + 3])
    present = torch.tensor([c for c in range(classes) if c not in absent])
    full = loss.arguments(classes, k, per_class=weighted)
    if weighted:
        full["weight"] = torch.rand(classes, dtype=torch.float64)
    full |= {"reduction": "none"} | loss.fixed((4, classes))
    per_class = {n: v for n, v in full.items() if isinstance(v, Tensor)}
    less = full | {n: v[:, present] if v.dim() == 3 else v[present] for n, v in per_class.items()}

    input, few_target = problem((4, len(present)), kind)
    masked = torch.full((4, classes), -INF, dtype=torch.float64).index_copy(1, present, input)
    if kind == "indices":
        target = present[few_target]
    else:
        target = torch.zeros_like(masked).index_copy(1, present, few_target)

    value, gradient = value_and_gradient(loss, masked, target, **full)
    expected, expected_gradient = value_and_gradient(loss, input, few_target, **less)
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient[:, present], expected_gradient, rtol=1e-10, atol=1e-10)
    assert (gradient[:, absent] == 0).all()


@every_loss
@every_kind
@pytest.mark.parametrize("k", [1, 2, 5, 13])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_fewer_than_k_rivals(loss, kind, k, dtype):
    """The label cannot miss the list: loss 0, gradient 0."""
    rivals = k - 1 if loss.takes_k else 0
    classes = k + 2
    input = torch.full((1, classes), -INF, dtype=dtype)
    input[0, : rivals + 1] = 10 * torch.randn(rivals + 1, dtype=dtype)
    target = torch.tensor([0])
    if kind == "probabilities":
        target = F.one_hot(target, classes).to(dtype)
    value, gradient = value_and_gradient(loss, input, target, **loss.arguments(classes, k))
    assert value == 0
    assert (gradient == 0).all()


@every_loss
@every_kind
@pytest.mark.parametrize("present", [1, 2, C - 1])
@pytest.mark.parametrize("k", [1, 2, C - 1])
def test_absent_label(loss, kind, present, k):
    """As for cross-entropy the loss is +inf, and samples beside it keep their gradients."""
    input, _ = problem((3, C))
    target = torch.tensor([1, 0, 2])
    if kind == "probabilities":
        target = F.one_hot(target, C).double()
    arguments = loss.arguments(k=k) | {"reduction": "none"}
    _, before = value_and_gradient(loss, input, target, **arguments)
    input[1, 0] = -INF
    input[1, 1 + present :] = -INF
    value, gradient = value_and_gradient(loss, input, target, **arguments)
    assert value[1] == INF
    torch.testing.assert_close(gradient[::2], before[::2])


@every_loss
def test_absent_class_in_smoothed_target(loss):
    """Smoothing gives every class a share, so an absent one makes the loss +inf."""
    input, target = problem((2, C))
    input[0, (target[0] + 1) % C] = -INF
    value = loss(input, target, **loss.arguments(), label_smoothing=0.1, reduction="none")
    assert value[0] == INF
    assert value[1].isfinite()


# Not a number


WHERE = [(loss, "label") for loss in LOSSES] + [
    (loss, where) for loss in LOSSES if loss.smooth for where in ("rival", "among absent classes")
]


@pytest.mark.parametrize(("loss", "where"), WHERE, ids=lambda x: getattr(x, "name", x))
@every_kind
@pytest.mark.parametrize("k", [1, 2, 13])
def test_nan_propagates(loss, where, kind, k):
    """Wherever it is; a hinge sees the label and some of its rivals only."""
    classes = k + 3
    input, _ = problem((2, classes))
    if where == "among absent classes":
        input[0, 1:] = -INF
    input[0, 0 if where == "label" else -1] = math.nan
    target = torch.tensor([0, 1])
    if kind == "probabilities":
        target = F.one_hot(target, classes).double()
    value = loss(input, target, **loss.arguments(classes, k), reduction="none")
    assert value.isnan().tolist() == [True, False]
