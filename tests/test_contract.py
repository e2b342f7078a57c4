"""Every loss is a drop-in replacement of ``cross_entropy``: options, shapes, masks, precision."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from losses_table import CLASSES, LOSSES, Loss, by_hand, class_dim, problem

INF = math.inf
C = CLASSES
SHAPES = [(C,), (4, C), (3, C, 2), (2, C, 2, 3)]
KINDS = ["indices", "probabilities"]
TARGETS = [(shape, kind, None) for shape in SHAPES for kind in KINDS] + [
    (shape, "indices", ignore_index) for shape in SHAPES[1:] for ignore_index in (-7, 2)
]
CROSS_ENTROPIES = [loss for loss in LOSSES if loss.as_cross_entropy is not None]


def name(loss: Loss) -> str:
    return loss.name


every_loss = pytest.mark.parametrize("loss", LOSSES, ids=name)
every_smooth_loss = pytest.mark.parametrize("loss", [x for x in LOSSES if x.smooth], ids=name)
every_kind = pytest.mark.parametrize("kind", KINDS)
with_and_without_weight = pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
every_reduction = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])


def value_and_gradient(function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A loss and its gradient; those of several samples are weighted differently."""
    leaf = input.detach().clone().requires_grad_()
    value = function(leaf, *args, **kwargs)
    cotangent = torch.arange(1, value.numel() + 1).reshape(value.shape).to(value)
    (gradient,) = torch.autograd.grad(value, leaf, cotangent)
    return value.detach(), gradient


def assert_same(
    first: Any, second: Any, input: Tensor, target: Tensor, tolerance: float = 1e-10, **kwargs: Any
) -> None:
    """Both functions have the same finite values and gradients."""
    actual = value_and_gradient(first, input, target, **kwargs)
    expected = value_and_gradient(second, input, target, **kwargs)
    assert all(x.isfinite().all() for x in expected)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


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


# Extreme scores


@every_loss
@every_kind
@pytest.mark.parametrize("k", [1, 2, 13])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [40.0, 1e4, 1e30])
def test_large_scores_stay_finite(loss, kind, k, dtype, size):
    classes = k + 3
    input, target = problem((8, classes), kind, dtype)
    value, gradient = value_and_gradient(
        loss, input * size, target, **loss.arguments(classes, k), reduction="none"
    )
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    assert (value >= 0).all()


@every_smooth_loss
@every_kind
def test_certain_label(loss, kind):
    """Where the label's probability rounds to 1 the gradient vanishes; it is not 0 · ∞."""
    input = torch.zeros(1, C)
    input[0, 0] = 100.0
    target = torch.tensor([0])
    if kind == "probabilities":
        target = F.one_hot(target, C).float()
    changes = [{"gamma": g} for g in (0.0, 0.5, 1.0, 1.5)] if "gamma" in loss.parameters else [{}]
    for change in changes:
        arguments = loss.arguments(k=1) | change
        value, gradient = value_and_gradient(loss, input, target, **arguments)
        assert value < 1e-20
        assert gradient.abs().max() < 1e-20


# Ties


@every_smooth_loss
@every_kind
@pytest.mark.parametrize("k", [1, 2, 5, 13])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("lead", [0.0, 3.0, -3.0])
def test_equal_rivals_share_alike(loss, kind, k, dtype, lead):
    classes = k + 4
    input = torch.zeros(1, classes, dtype=dtype)
    input[0, 0] = lead
    target = torch.tensor([0])
    if kind == "probabilities":
        target = F.one_hot(target, classes).to(dtype)
    value, gradient = value_and_gradient(loss, input, target, **loss.arguments(classes, k))
    rivals = gradient[0, 1:]
    tolerance = 10 * torch.finfo(dtype).eps
    assert value.isfinite()
    torch.testing.assert_close(
        rivals, rivals.mean().expand_as(rivals), rtol=tolerance, atol=tolerance
    )
    torch.testing.assert_close(gradient[0, 0], -rivals.sum(), rtol=tolerance, atol=tolerance)


@every_loss
@every_kind
@pytest.mark.parametrize("k", [1, 2, 5])
def test_ties_by_hand(loss, kind, k):
    """All scores equal, or two values only: values as by hand, finite gradients that sum to 0."""
    classes = k + 2
    input = torch.zeros(2, classes, dtype=torch.float64)
    input[1, ::2] = 1.0
    _, target = problem((2, classes), kind)
    arguments = loss.arguments(classes, k)
    value, gradient = value_and_gradient(loss, input, target, **arguments)
    torch.testing.assert_close(value, by_hand(loss, input, target, **arguments))
    torch.testing.assert_close(gradient.sum(1), torch.zeros(2, dtype=torch.float64))


# Precision


@every_loss
@every_kind
@every_reduction
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_half_precision_computes_in_float32(loss, kind, reduction, dtype, label_smoothing):
    """The loss of the same numbers in float32, rounded once."""
    input, target = problem((32, C), kind)
    input = input.to(dtype)
    target = target.to(dtype) if kind == "probabilities" else target
    weight = torch.rand(C, dtype=dtype)
    arguments = loss.arguments() | {"reduction": reduction, "label_smoothing": label_smoothing}
    value, gradient = value_and_gradient(loss, input, target, weight=weight, **arguments)
    wide = target.float() if kind == "probabilities" else target
    exact, exact_gradient = value_and_gradient(
        loss, input.float(), wide, weight=weight.float(), **arguments
    )
    assert value.dtype == gradient.dtype == dtype
    half_a_digit = 0.505 * torch.finfo(dtype).eps
    torch.testing.assert_close(value.float(), exact, rtol=half_a_digit, atol=1e-7)
    torch.testing.assert_close(gradient, exact_gradient.to(dtype))


@every_loss
def test_sum_of_half_precision_weights(loss):
    """The sum of many weights neither overflows nor stalls in half precision."""
    input, target = problem((2, C))
    many = 40_000
    input, target = input.half().repeat(many, 1), target.repeat(many)
    weight = torch.ones(C, dtype=torch.float16)
    arguments = loss.arguments()
    if "samples" in arguments:
        arguments["epsilon"] = 0.0
    actual = loss(input, target, weight=weight, **arguments)
    expected = loss(input[:2], target[:2], **arguments)
    torch.testing.assert_close(actual, expected)


@every_loss
@every_kind
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_autocast(loss, kind, dtype, label_smoothing):
    """Under autocast the loss is that of the logits in float32, as cross-entropy's."""
    input, target = problem((8, C), kind)
    input = input.to(dtype)
    target = target.to(dtype) if kind == "probabilities" else target
    arguments = loss.arguments() | {"label_smoothing": label_smoothing}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, gradient = value_and_gradient(loss, input, target, **arguments)
        as_usual = F.cross_entropy(input, target, label_smoothing=label_smoothing)
    wide = torch.promote_types(dtype, torch.float32)
    exact, exact_gradient = value_and_gradient(
        loss, input.to(wide), target.to(wide) if kind == "probabilities" else target, **arguments
    )
    assert value.dtype == as_usual.dtype
    assert gradient.dtype == dtype
    torch.testing.assert_close(value, exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, exact_gradient.to(dtype))


@every_loss
def test_autocast_of_a_model(loss):
    model = torch.nn.Linear(4, C)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(torch.randn(3, 4))
        value = loss(logits, torch.tensor([0, 1, 2]), **loss.arguments())
    assert logits.dtype == torch.bfloat16
    assert value.dtype == torch.float32
    value.backward()
    assert model.weight.grad.isfinite().all()


# Properties

scores_and_label = st.integers(3, 7).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(-20, 20, width=32), min_size=n, max_size=n), st.integers(0, n - 1)
    )
)
few_examples = settings(max_examples=25, deadline=None, derandomize=True)


@every_loss
@few_examples
@given(scores_and_label, st.floats(-1e3, 1e3), st.integers(1, 2))
def test_shift_changes_nothing(loss, case, shift, k):
    scores, label = torch.tensor(case[0], dtype=torch.float64), torch.tensor(case[1])
    arguments = loss.arguments(len(scores), k)
    torch.testing.assert_close(
        loss(scores + shift, label, **arguments),
        loss(scores, label, **arguments),
        rtol=1e-9,
        atol=1e-9,
    )


@every_loss
@few_examples
@given(scores_and_label, st.randoms(use_true_random=False), st.integers(1, 2))
def test_order_of_classes_is_free(loss, case, random, k):
    scores, label = torch.tensor(case[0], dtype=torch.float64), case[1]
    n = len(scores)
    order = torch.tensor(random.sample(range(n), n))
    arguments = loss.arguments(n, k, per_class=True) | loss.fixed(scores.shape)
    reordered = {key: v[order] if isinstance(v, Tensor) else v for key, v in arguments.items()}
    torch.testing.assert_close(
        loss(scores[order], (order == label).nonzero().squeeze(), **reordered),
        loss(scores, torch.tensor(label), **arguments),
    )


@every_loss
@few_examples
@given(scores_and_label, st.floats(0, 10), st.integers(1, 2))
def test_falls_with_the_score_of_the_label(loss, case, rise, k):
    scores, label = torch.tensor(case[0], dtype=torch.float64), torch.tensor(case[1])
    arguments = loss.arguments(len(scores), k)
    lower = loss(scores, label, **arguments)
    scores[label] += rise
    higher = loss(scores, label, **arguments)
    assert 0 <= higher <= lower + 1e-12


@every_loss
@few_examples
@given(scores_and_label, st.integers(1, 2), st.sampled_from(KINDS))
def test_gradient_sums_to_zero(loss, case, k, kind):
    scores, label = torch.tensor(case[0], dtype=torch.float64), torch.tensor(case[1])
    target = label
    if kind == "probabilities":
        target = (F.one_hot(label, len(scores)) + 0.5).double().softmax(class_dim(scores))
    _, gradient = value_and_gradient(loss, scores, target, **loss.arguments(len(scores), k))
    assert gradient.sum().abs() < 1e-12
    if kind == "indices":
        assert gradient[label] <= 0
