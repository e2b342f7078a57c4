"""Every loss is a drop-in replacement of ``cross_entropy``: options, shapes, absent classes."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from contract_cases import (
    CROSS_ENTROPIES,
    INF,
    KINDS,
    TARGETS,
    C,
    all_pairs,
    assert_same,
    every_kind,
    every_loss,
    every_reduction,
    name,
    value_and_gradient,
    with_and_without_weight,
)
from losses_table import LOSSES, by_hand, problem

SMOOTH, *OTHERS = LOSSES
DTYPES = [torch.float32, torch.float64]

# The options of cross-entropy


def check_cross_entropy(loss, shape, kind, ignore_index, reduction, label_smoothing, weighted):
    logits, target = problem(shape, kind)
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
        logits,
        target,
        **options,
    )


@pytest.mark.parametrize(("shape", "kind", "ignore_index"), TARGETS, ids=str)
@every_reduction
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2, 1.0])
@with_and_without_weight
def test_all_options_of_cross_entropy(
    shape, kind, ignore_index, reduction, label_smoothing, weighted
):
    check_cross_entropy(SMOOTH, shape, kind, ignore_index, reduction, label_smoothing, weighted)


@pytest.mark.parametrize("loss", CROSS_ENTROPIES, ids=name)
@pytest.mark.parametrize(("kind", "ignore_index"), [("indices", -7), ("probabilities", None)])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_is_cross_entropy(loss, kind, ignore_index, label_smoothing):
    check_cross_entropy(loss, (3, C, 2), kind, ignore_index, "mean", label_smoothing, True)


@every_loss
@pytest.mark.parametrize(
    ("shape", "kind", "reduction", "label_smoothing", "weighted"),
    all_pairs([(C,), (3, C, 2)], KINDS, ["none", "mean", "sum"], [0.0, 0.2], [False, True]),
    ids=str,
)
def test_options_by_hand(loss, shape, kind, reduction, label_smoothing, weighted):
    logits, target = problem(shape, kind)
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    if weighted:
        options["weight"] = torch.rand(C, dtype=torch.float64)
    if kind == "indices" and len(shape) > 1:
        target.view(-1)[1] = options["ignore_index"] = -1
    arguments = loss.arguments(per_class=weighted)
    assert_same(
        loss, lambda *a, **o: by_hand(loss, *a, **o), logits, target, **options, **arguments
    )


@every_loss
@pytest.mark.parametrize(
    ("size", "label_smoothing", "dtype"),
    all_pairs([(2, 1), (5, 1), (5, 4), (15, 13)], [0.0, 0.2], DTYPES),
    ids=str,
)
def test_k_by_hand(loss, size, label_smoothing, dtype):
    classes, k = size
    logits, target = problem((3, classes))
    arguments = loss.arguments(classes, k, per_class=True) | {"label_smoothing": label_smoothing}
    expected = value_and_gradient(
        lambda *a, **o: by_hand(loss, *a, **o), logits, target, **arguments
    )
    actual = value_and_gradient(loss, logits.to(dtype), target, **arguments)
    tolerance = 2e-6 if dtype == torch.float32 else 1e-10
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, e.to(dtype), rtol=tolerance, atol=tolerance)


# The class dimension


@every_loss
@pytest.mark.parametrize(("shape", "dim"), [((3, C, 2), -1), ((2, C, C), 2), ((4, C), 0)], ids=str)
@every_kind
def test_dim(loss, shape, dim, kind):
    """Classes anywhere, also where another dimension has as many entries."""
    logits, target = problem(shape, kind)
    arguments = loss.arguments(per_class=True) | {"reduction": "none", "label_smoothing": 0.1}
    fixed = loss.fixed(shape)
    moved = {n: noise.movedim(1, dim % len(shape)) for n, noise in fixed.items()}

    def with_dim(x, y):
        y = y.movedim(1, dim) if kind == "probabilities" else y
        return loss(x.movedim(1, dim), y, dim=dim, **arguments, **moved)

    assert_same(with_dim, lambda x, y: loss(x, y, **arguments, **fixed), logits, target)


def test_dim_of_modules_and_of_one_sample():
    logits, target = problem((2, C, C))
    module = SMOOTH.module(2, dim=-1)
    expected = SMOOTH.module(2)(logits.movedim(-1, 1), target)
    torch.testing.assert_close(module(logits, target), expected)
    assert expected != SMOOTH.module(2)(logits, target)
    for dim in (0, 1, -1):
        value = SMOOTH.module(2, dim=dim)(logits[0, 0], target[0, 0])
        torch.testing.assert_close(value, SMOOTH.module(2)(logits[0, 0], target[0, 0]))


# Targets


@every_loss
def test_module_is_function(loss):
    logits, target = problem((4, C))
    options = {
        "weight": torch.rand(C, dtype=torch.float64),
        "ignore_index": int(target[0]),
        "reduction": "sum",
        "label_smoothing": 0.1,
    }
    arguments = loss.arguments(per_class=True) | options
    module = loss.module(**arguments)
    fixed = loss.fixed(logits.shape)
    torch.testing.assert_close(
        module(logits, target, **fixed), loss(logits, target, **arguments), rtol=0, atol=0
    )


@every_loss
def test_gradient_of_probabilities(loss):
    logits, target = problem((3, C), "probabilities")
    arguments = loss.arguments() | {"reduction": "sum"}
    target.requires_grad_()
    (actual,) = torch.autograd.grad(loss(logits, target, **arguments), target)
    (expected,) = torch.autograd.grad(by_hand(loss, logits, target, **arguments), target)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_integer_targets(dtype):
    """Any integers; class 156 is not mistaken for −100, which is the same byte."""
    logits, _ = problem((3, 160))
    target = torch.tensor([0, 2, 156 if dtype != torch.int8 else 100])
    arguments = SMOOTH.arguments(160) | {"reduction": "none"}
    expected = SMOOTH(logits, target, **arguments)
    torch.testing.assert_close(SMOOTH(logits, target.to(dtype), **arguments), expected)
    each = torch.vmap(lambda x, y: SMOOTH(x, y, **arguments))
    torch.testing.assert_close(each(logits, target.to(dtype)), expected)


# Empty batches


@pytest.mark.parametrize(
    ("loss", "shape"),
    [(loss, (0, C)) for loss in LOSSES] + [(SMOOTH, (0, C, 3)), (SMOOTH, (3, C, 0))],
    ids=lambda x: getattr(x, "name", str(x)),
)
@every_kind
def test_empty_batch(loss, shape, kind):
    logits, target = problem(shape, kind)
    logits.requires_grad_()
    for reduction in ("none", "sum", "mean"):
        actual = loss(logits, target, **loss.arguments(), reduction=reduction)
        expected = F.cross_entropy(logits, target, reduction=reduction)
        assert actual.shape == expected.shape
        assert actual.isnan().tolist() == expected.isnan().tolist()
        if reduction == "sum":
            assert actual == 0
        (gradient,) = torch.autograd.grad(actual.sum(), logits)
        assert gradient.shape == logits.shape


@every_loss
@with_and_without_weight
def test_all_ignored(loss, weighted):
    logits, _ = problem((3, C))
    target = torch.full((3,), -100)
    arguments = loss.arguments()
    if weighted:
        arguments["weight"] = torch.rand(C, dtype=torch.float64)
    assert loss(logits, target, **arguments).isnan()
    total, gradient = value_and_gradient(loss, logits, target, **arguments, reduction="sum")
    assert total == 0
    assert (gradient == 0).all()


@every_loss
def test_ignored_rows_do_not_matter(loss):
    """Whatever they hold. As with cross-entropy their own gradient is 0 if that is finite."""
    logits, target = problem((4, C))
    target[1:] = -100
    arguments = loss.arguments() | loss.fixed(logits.shape)
    expected, expected_gradient = value_and_gradient(loss, logits, target, **arguments)
    assert (expected_gradient[1:] == 0).all()
    for content in (1e4, INF, -INF, math.nan):
        logits[1:] = content
        value, gradient = value_and_gradient(loss, logits, target, **arguments)
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(gradient[0], expected_gradient[0])
        assert not math.isfinite(content) or (gradient[1:] == 0).all()


# Absent classes


@every_loss
@pytest.mark.parametrize(
    ("k", "kind", "weighted"), all_pairs([1, 2, 13], KINDS, [False, True]), ids=str
)
def test_masking_is_removing(loss, k, kind, weighted):
    classes = k + 6
    absent = torch.tensor([0, 2, k + 3])
    present = torch.tensor([c for c in range(classes) if c not in absent])
    full = loss.arguments(classes, k, per_class=weighted)
    if weighted:
        full["weight"] = torch.rand(classes, dtype=torch.float64)
    full |= {"reduction": "none"} | loss.fixed((4, classes))
    per_class = {n: v for n, v in full.items() if isinstance(v, Tensor)}
    less = full | {n: v[:, present] if v.dim() == 3 else v[present] for n, v in per_class.items()}

    logits, few_target = problem((4, len(present)), kind)
    masked = torch.full((4, classes), -INF, dtype=torch.float64).index_copy(1, present, logits)
    if kind == "indices":
        target = present[few_target]
    else:
        target = torch.zeros_like(masked).index_copy(1, present, few_target)

    value, gradient = value_and_gradient(loss, masked, target, **full)
    expected, expected_gradient = value_and_gradient(loss, logits, few_target, **less)
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient[:, present], expected_gradient, rtol=1e-10, atol=1e-10)
    assert (gradient[:, absent] == 0).all()


@every_loss
@pytest.mark.parametrize(("k", "kind", "dtype"), all_pairs([1, 2, 13], KINDS, DTYPES), ids=str)
def test_fewer_than_k_rivals(loss, k, kind, dtype):
    """The label cannot miss the list: loss 0, gradient 0."""
    rivals = k - 1 if loss.takes_k else 0
    classes = k + 2
    logits = torch.full((1, classes), -INF, dtype=dtype)
    logits[0, : rivals + 1] = 10 * torch.randn(rivals + 1, dtype=dtype)
    target = torch.tensor([0])
    if kind == "probabilities":
        target = F.one_hot(target, classes).to(dtype)
    value, gradient = value_and_gradient(loss, logits, target, **loss.arguments(classes, k))
    assert value == 0
    assert (gradient == 0).all()


@every_loss
@pytest.mark.parametrize(
    ("k", "present", "kind"), all_pairs([1, C - 1], [1, 2, C - 1], KINDS), ids=str
)
def test_absent_label(loss, k, present, kind):
    """As for cross-entropy the loss is +inf, and samples beside it keep their gradients."""
    logits, _ = problem((3, C))
    target = torch.tensor([1, 0, 2])
    if kind == "probabilities":
        target = F.one_hot(target, C).double()
    arguments = loss.arguments(k=k) | {"reduction": "none"}
    _, before = value_and_gradient(loss, logits, target, **arguments)
    logits[1, 0] = -INF
    logits[1, 1 + present :] = -INF
    value, gradient = value_and_gradient(loss, logits, target, **arguments)
    assert value[1] == INF
    torch.testing.assert_close(gradient[::2], before[::2])


@every_loss
def test_absent_class_in_smoothed_target(loss):
    """Smoothing gives every class a share, so an absent one makes the loss +inf."""
    logits, target = problem((2, C))
    logits[0, (target[0] + 1) % C] = -INF
    value = loss(logits, target, **loss.arguments(), label_smoothing=0.1, reduction="none")
    assert value[0] == INF
    assert value[1].isfinite()
