"""Every loss with difficult numbers: extreme scores, ties, half precision, and laws for all."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contract_cases import (
    KINDS,
    C,
    all_pairs,
    every_kind,
    every_loss,
    every_smooth_loss,
    value_and_gradient,
)
from losses_table import LOSSES, by_hand, class_dim, problem

DTYPES = [torch.float32, torch.float64]
HALVES = [torch.bfloat16, torch.float16]
SMOOTHING = [0.0, 0.1]

# Extreme scores


@every_loss
@pytest.mark.parametrize(
    ("k", "size", "kind", "dtype"), all_pairs([1, 2, 13], [40.0, 1e4, 1e30], KINDS, DTYPES), ids=str
)
def test_large_scores_stay_finite(loss, k, size, kind, dtype):
    classes = k + 3
    logits, target = problem((8, classes), kind, dtype)
    value, gradient = value_and_gradient(
        loss, logits * size, target, **loss.arguments(classes, k), reduction="none"
    )
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    assert (value >= 0).all()


@every_smooth_loss
@every_kind
def test_certain_label(loss, kind):
    """Where the label's probability rounds to 1 the gradient vanishes; it is not 0 · ∞."""
    logits = torch.zeros(1, C)
    logits[0, 0] = 100.0
    target = torch.tensor([0])
    if kind == "probabilities":
        target = F.one_hot(target, C).float()
    changes = [{"gamma": g} for g in (0.0, 0.5, 1.0, 1.5)] if "gamma" in loss.parameters else [{}]
    for change in changes:
        arguments = loss.arguments(k=1) | change
        value, gradient = value_and_gradient(loss, logits, target, **arguments)
        assert value < 1e-20
        assert gradient.abs().max() < 1e-20


# Ties


@every_smooth_loss
@pytest.mark.parametrize(
    ("k", "lead", "kind", "dtype"), all_pairs([1, 2, 13], [0.0, 3.0, -3.0], KINDS, DTYPES), ids=str
)
def test_equal_rivals_share_alike(loss, k, lead, kind, dtype):
    classes = k + 4
    logits = torch.zeros(1, classes, dtype=dtype)
    logits[0, 0] = lead
    target = torch.tensor([0])
    if kind == "probabilities":
        target = F.one_hot(target, classes).to(dtype)
    value, gradient = value_and_gradient(loss, logits, target, **loss.arguments(classes, k))
    rivals = gradient[0, 1:]
    tolerance = 10 * torch.finfo(dtype).eps
    assert value.isfinite()
    torch.testing.assert_close(
        rivals, rivals.mean().expand_as(rivals), rtol=tolerance, atol=tolerance
    )
    torch.testing.assert_close(gradient[0, 0], -rivals.sum(), rtol=tolerance, atol=tolerance)


@every_loss
@every_kind
@pytest.mark.parametrize("k", [1, 4])
def test_ties_by_hand(loss, kind, k):
    """All scores equal, or two values only: values as by hand, finite gradients that sum to 0."""
    classes = k + 2
    logits = torch.zeros(2, classes, dtype=torch.float64)
    logits[1, ::2] = 1.0
    _, target = problem((2, classes), kind)
    arguments = loss.arguments(classes, k)
    value, gradient = value_and_gradient(loss, logits, target, **arguments)
    torch.testing.assert_close(value, by_hand(loss, logits, target, **arguments))
    torch.testing.assert_close(gradient.sum(1), torch.zeros(2, dtype=torch.float64))


# Precision


@every_loss
@pytest.mark.parametrize(
    ("reduction", "kind", "dtype", "label_smoothing"),
    all_pairs(["none", "mean", "sum"], KINDS, HALVES, SMOOTHING),
    ids=str,
)
def test_half_precision_computes_in_float32(loss, reduction, kind, dtype, label_smoothing):
    """The loss of the same numbers in float32, rounded once."""
    logits, target = problem((32, C), kind)
    logits = logits.to(dtype)
    target = target.to(dtype) if kind == "probabilities" else target
    weight = torch.rand(C, dtype=dtype)
    arguments = loss.arguments() | {"reduction": reduction, "label_smoothing": label_smoothing}
    value, gradient = value_and_gradient(loss, logits, target, weight=weight, **arguments)
    wide = target.float() if kind == "probabilities" else target
    exact, exact_gradient = value_and_gradient(
        loss, logits.float(), wide, weight=weight.float(), **arguments
    )
    assert value.dtype == gradient.dtype == dtype
    half_a_digit = 0.505 * torch.finfo(dtype).eps
    torch.testing.assert_close(value.float(), exact, rtol=half_a_digit, atol=1e-7)
    torch.testing.assert_close(gradient, exact_gradient.to(dtype))


@every_loss
def test_sum_of_half_precision_weights(loss):
    """The sum of many weights neither overflows nor stalls in half precision."""
    logits, target = problem((2, C))
    many = 40_000
    logits, target = logits.half().repeat(many, 1), target.repeat(many)
    weight = torch.ones(C, dtype=torch.float16)
    arguments = loss.arguments()
    if "samples" in arguments:
        arguments["epsilon"] = 0.0
    actual = loss(logits, target, weight=weight, **arguments)
    expected = loss(logits[:2], target[:2], **arguments)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("loss", "dtype", "kind", "label_smoothing"),
    [(LOSSES[0], *row) for row in all_pairs([*HALVES, *DTYPES], KINDS, SMOOTHING)]
    + [
        (loss, *row)
        for loss in LOSSES[1:]
        for row in [(torch.bfloat16, "indices", 0.0), (torch.float64, "probabilities", 0.1)]
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_autocast(loss, dtype, kind, label_smoothing):
    """Under autocast the loss is that of the logits in float32, as cross-entropy's."""
    logits, target = problem((8, C), kind)
    logits = logits.to(dtype)
    target = target.to(dtype) if kind == "probabilities" else target
    arguments = loss.arguments() | {"label_smoothing": label_smoothing}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, gradient = value_and_gradient(loss, logits, target, **arguments)
        as_usual = F.cross_entropy(logits, target, label_smoothing=label_smoothing)
    wide = torch.promote_types(dtype, torch.float32)
    exact, exact_gradient = value_and_gradient(
        loss, logits.to(wide), target.to(wide) if kind == "probabilities" else target, **arguments
    )
    assert value.dtype == as_usual.dtype
    assert gradient.dtype == dtype
    torch.testing.assert_close(value, exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, exact_gradient.to(dtype))


# Properties

scores_and_label = st.integers(3, 7).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(-20, 20, width=32), min_size=n, max_size=n), st.integers(0, n - 1)
    )
)
few_examples = settings(max_examples=10, deadline=None, derandomize=True)


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
