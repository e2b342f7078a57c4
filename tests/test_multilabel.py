"""The smooth top-k loss of several positives: definition, absent classes, targets, module."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from contract_cases import all_pairs, value_and_gradient
from multilabel_cases import (
    INF,
    KINDS,
    MASK,
    PAD,
    TARGET,
    C,
    as_target,
    both_dtypes,
    by_hand,
    every_kind,
    scores_of,
)
from topklass import MultiLabelSmoothTopKLoss
from topklass.functional import multilabel_smooth_topk_loss, smooth_topk_loss

# PyTorch's own forward mode still uses what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


# Definition


@pytest.mark.parametrize(
    ("kind", "reduction", "k", "per_class"),
    all_pairs(KINDS, ["none", "mean", "sum"], [1, 2, 4], [False, True]),
)
def test_by_hand(kind, reduction, k, per_class):
    scores = scores_of(4, C)
    parameters = {"k": k, "tau": 0.7, "margin": 0.4}
    if per_class:
        parameters["margin"] = torch.rand(C, dtype=torch.float64)
        parameters["weight"] = torch.rand(C, dtype=torch.float64)
    actual = value_and_gradient(
        multilabel_smooth_topk_loss, scores, as_target(kind), reduction=reduction, **parameters
    )
    expected = value_and_gradient(by_hand, scores, reduction, **parameters)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("n", "k"), [(2, 1), (9, 1), (9, 5), (9, 8), (40, 13), (40, 33)])
@both_dtypes
@pytest.mark.parametrize("per_class", [False, True], ids=["", "per class"])
def test_of_one_positive_is_the_smooth_loss(n, k, dtype, per_class):
    scores, labels = scores_of(6, n, dtype=dtype), torch.arange(6) % n
    options = {"tau": 0.3, "reduction": "none"}
    if per_class:
        options |= {"margin": torch.rand(n, dtype=dtype), "weight": torch.rand(n, dtype=dtype)}
    expected = value_and_gradient(smooth_topk_loss, scores, labels, k, **options)
    tolerance = (
        {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-12}
    )
    for target in (labels.unsqueeze(1), F.one_hot(labels, n).bool()):
        actual = value_and_gradient(multilabel_smooth_topk_loss, scores, target, k, **options)
        torch.testing.assert_close(actual, expected, **tolerance)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_becomes_the_hinge_on_the_negatives(k):
    """As τ → 0: the mean over positives of (k·α_y + s_[k] − s_y)_+ / k."""
    scores, margin = scores_of(4, C), torch.rand(C, dtype=torch.float64)
    value = multilabel_smooth_topk_loss(scores, TARGET, k, 1e-6, margin, reduction="none")
    rival = scores.masked_fill(MASK, -INF).sort(1, descending=True).values[:, k - 1 : k]
    hinges = (k * margin + rival - scores).relu() / k
    expected = (hinges * MASK).sum(1) / MASK.sum(1).clamp(min=1)
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-4)


@every_kind
@pytest.mark.parametrize("k", [5, 6])
@both_dtypes
def test_fewer_than_k_negatives(kind, k, dtype):
    """Two samples have five negatives, one has four: no positive can miss a longer list."""
    scores = scores_of(4, C, dtype=dtype)
    value, gradient = value_and_gradient(
        multilabel_smooth_topk_loss, scores, as_target(kind), k, reduction="none"
    )
    assert (value == 0).tolist() == [k == 6, True, True, False]
    assert ((gradient == 0).all(1)).tolist() == [k == 6, True, True, False]


def test_all_classes_are_positive():
    scores = scores_of(2, C)
    value, gradient = value_and_gradient(
        multilabel_smooth_topk_loss, scores, torch.ones(2, C, dtype=torch.bool), 1
    )
    assert value == 0
    assert (gradient == 0).all()


# Absent classes, and what is not a number


@every_kind
@pytest.mark.parametrize("k", [1, 2, 13])
def test_masking_is_removing(kind, k):
    n = k + 6
    present = torch.tensor([c for c in range(n) if c not in (0, 2, k + 3)])
    few = scores_of(3, len(present))
    chosen = torch.tensor([[0, 1], [2, PAD], [1, 2]])
    masked = torch.full((3, n), -INF, dtype=torch.float64).index_copy(1, present, few)
    target = torch.where(chosen == PAD, PAD, present[chosen.clamp(min=0)])
    if kind != "indices":
        target = torch.tensor([[c in row for c in range(n)] for row in target.tolist()])
        target = target if kind == "bool" else target.float()
    value, gradient = value_and_gradient(multilabel_smooth_topk_loss, masked, target, k)
    expected, expected_gradient = value_and_gradient(multilabel_smooth_topk_loss, few, chosen, k)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient[:, present], expected_gradient)
    assert (gradient[:, [0, 2, k + 3]] == 0).all()


@pytest.mark.parametrize(
    ("kind", "k", "dtype"), all_pairs(KINDS, [1, 2, 6], [torch.float32, torch.float64]), ids=str
)
def test_absent_positive(kind, k, dtype):
    """The loss is +inf, with whatever rivals, and neighbours keep their gradients."""
    scores = scores_of(4, C, dtype=dtype)
    _, before = value_and_gradient(
        multilabel_smooth_topk_loss, scores, as_target(kind), k, reduction="none"
    )
    scores[0, 3] = -INF
    value, gradient = value_and_gradient(
        multilabel_smooth_topk_loss, scores, as_target(kind), k, reduction="none"
    )
    assert (value == INF).tolist() == [True, False, False, False]
    assert gradient.isfinite().all()
    torch.testing.assert_close(gradient[1:], before[1:])


@pytest.mark.parametrize("k", [2, 13, 33])
@both_dtypes
def test_absent_positive_among_few_negatives(k, dtype):
    """One positive cannot be in the list, the other cannot miss it."""
    scores = torch.full((1, 40), -INF, dtype=dtype)
    scores[0, 1] = 1.0
    value, gradient = value_and_gradient(
        multilabel_smooth_topk_loss, scores, torch.tensor([[0, 1]]), k
    )
    assert value == INF
    assert gradient.isfinite().all()


@every_kind
@pytest.mark.parametrize("place", [0, 1])
def test_nan_propagates(kind, place):
    """A positive's or a negative's, to the gradient of its row."""
    scores = scores_of(4, C)
    scores[0, place] = math.nan
    value, gradient = value_and_gradient(
        multilabel_smooth_topk_loss, scores, as_target(kind), 2, reduction="none"
    )
    assert value.isnan().tolist() == [True, False, False, False]
    assert gradient[0].isnan().all()
    assert gradient[1:].isfinite().all()


@every_kind
@pytest.mark.parametrize("size", [1e4, 1e30])
@both_dtypes
def test_large_scores_stay_finite(kind, size, dtype):
    scores = (scores_of(4, C) * size).to(dtype)
    for result in value_and_gradient(multilabel_smooth_topk_loss, scores, as_target(kind), 2):
        assert result.isfinite().all()


@every_kind
def test_shift_costs_no_digits(kind):
    scores = scores_of(4, C, dtype=torch.float32) + 3000
    value = multilabel_smooth_topk_loss(scores, as_target(kind), 3)
    exact = multilabel_smooth_topk_loss(scores.double(), as_target(kind), 3)
    torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=0)


@every_kind
def test_equal_scores(kind):
    """Values by hand; equal classes share alike."""
    scores = torch.zeros(4, C, dtype=torch.float64)
    value, gradient = value_and_gradient(
        multilabel_smooth_topk_loss, scores, as_target(kind), 2, reduction="none"
    )
    torch.testing.assert_close(value, by_hand(scores, k=2))
    negatives = gradient[0][~MASK[0]]
    torch.testing.assert_close(negatives, negatives.mean().expand(5))
    torch.testing.assert_close(gradient.sum(1), torch.zeros(4, dtype=torch.float64))


# Targets


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_integer_targets(dtype):
    """Class 156 is not mistaken for −100, which is the same byte."""
    scores = scores_of(1, 160)
    target = torch.tensor([[0, 156 if dtype != torch.int8 else 100]])
    mask = F.one_hot(target, 160).sum(1).bool()
    expected = multilabel_smooth_topk_loss(scores, mask, 2)
    torch.testing.assert_close(multilabel_smooth_topk_loss(scores, target.to(dtype), 2), expected)


@pytest.mark.parametrize("ignore_index", [-1, 2, 0, 6])
def test_ignore_index(ignore_index):
    """Any number may pad, also one that would be a class."""
    scores = scores_of(3, C)
    plain = torch.tensor([[1, 3, PAD, PAD], [5, PAD, 4, 5], [PAD, PAD, PAD, PAD]])
    torch.testing.assert_close(
        multilabel_smooth_topk_loss(
            scores, plain.masked_fill(plain == PAD, ignore_index), 2, ignore_index=ignore_index
        ),
        multilabel_smooth_topk_loss(scores, plain, 2),
    )


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("target", ["indices", "no columns", "mask"])
@pytest.mark.parametrize("rows", [0, 3])
def test_no_positives_at_all(reduction, target, rows):
    """As cross-entropy where every target is ignored: NaN for the mean, else 0."""
    scores = scores_of(rows, C)
    targets = {
        "indices": torch.full((rows, 2), PAD),
        "no columns": torch.zeros(rows, 0, dtype=torch.long),
        "mask": torch.zeros(rows, C, dtype=torch.bool),
    }
    value, gradient = value_and_gradient(
        multilabel_smooth_topk_loss, scores, targets[target], 2, reduction=reduction
    )
    as_usual = F.cross_entropy(scores, torch.full((rows,), PAD), reduction=reduction)
    torch.testing.assert_close(value, as_usual, equal_nan=True)
    assert reduction == "mean" or (gradient == 0).all()


@pytest.mark.parametrize("content", [INF, math.nan])
def test_rows_without_positives_do_not_matter(content):
    scores = scores_of(4, C)
    expected = multilabel_smooth_topk_loss(scores, TARGET, 2)
    scores[2] = content
    torch.testing.assert_close(multilabel_smooth_topk_loss(scores, TARGET, 2), expected)


@every_kind
def test_one_sample_without_a_batch(kind):
    scores = scores_of(4, C)
    expected = multilabel_smooth_topk_loss(scores, as_target(kind), 2, reduction="none")
    for i in (0, 1, 3):
        for reduction in ("none", "mean", "sum"):
            value = multilabel_smooth_topk_loss(
                scores[i], as_target(kind)[i], 2, reduction=reduction
            )
            torch.testing.assert_close(value, expected[i])


@pytest.mark.parametrize(
    ("shape", "target", "error", "message"),
    [
        ((4, C), torch.zeros(4, C, dtype=torch.long), ValueError, r"target\.bool\(\)"),
        ((C,), torch.zeros(C, dtype=torch.long), ValueError, r"target\.bool\(\)"),
        ((4, C), torch.zeros(4, dtype=torch.long), ValueError, r"\(4, P\).*unsqueeze"),
        ((4, C), torch.zeros(3, 2, dtype=torch.long), ValueError, r"\(4, P\).*\(3, 2\)"),
        ((C,), torch.tensor(0), ValueError, r"\(P\), got \(\)"),
        ((4, C), torch.ones(4, 2, dtype=torch.bool), ValueError, r"\(4, 7\), got \(4, 2\)"),
        ((4, C), torch.ones(4), ValueError, r"\(4, 7\), got \(4,\)"),
        ((4, C), torch.full((4, C), 0.25), ValueError, r"zeros and ones, got 0\.25"),
        ((4, C), torch.full((4, C), math.nan), ValueError, "zeros and ones, got nan"),
        ((4, C), torch.ones(4, C, dtype=torch.complex64), TypeError, "torch.complex64"),
        ((4, C), [[0], [1], [2], [3]], TypeError, "list"),
        ((4, C, 2), torch.ones(4, C, 2, dtype=torch.bool), ValueError, "flatten"),
        ((4, C), torch.full((4, 2), C), IndexError, "from 0 to 6.*got 7"),
        ((4, C), torch.full((4, 2), -1), IndexError, "ignore_index=-100, got -1"),
        ((4, 1), torch.ones(4, 1), ValueError, "at least two classes, got 1"),
    ],
)
def test_bad_target(shape, target, error, message):
    with pytest.raises(error, match=message):
        multilabel_smooth_topk_loss(torch.randn(shape), target, 2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"k": 0}, ValueError, "k=0"),
        ({"k": 2.0}, TypeError, "integer"),
        ({"tau": 0.0}, ValueError, "tau"),
        ({"margin": -1.0}, ValueError, "margin"),
        ({"reduction": "average"}, ValueError, "none, mean, sum"),
        ({"weight": torch.ones(C, 1)}, RuntimeError, "weight"),
        ({"label_smoothing": 0.1}, TypeError, "label_smoothing"),
    ],
    ids=str,
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        MultiLabelSmoothTopKLoss(**options)
    with pytest.raises(error, match=message):
        multilabel_smooth_topk_loss(torch.randn(4, C), TARGET, **options)


def test_lengths_and_classes():
    with pytest.raises(ValueError, match="7 classes, got k=7"):
        MultiLabelSmoothTopKLoss(7)(torch.randn(4, C), TARGET)
    with pytest.raises(RuntimeError, match="weight must have one value for each of the 7 classes"):
        MultiLabelSmoothTopKLoss(2, weight=torch.ones(6))(torch.randn(4, C), TARGET)


# Module


def test_module():
    weight, margin = torch.rand(C), [0.5] * C
    module = MultiLabelSmoothTopKLoss(
        3, 0.5, margin, weight=weight, ignore_index=-1, reduction="sum"
    )
    scores, target = torch.randn(4, C), TARGET.masked_fill(TARGET == PAD, -1)
    expected = multilabel_smooth_topk_loss(
        scores,
        target,
        3,
        0.5,
        torch.tensor(margin),
        weight=weight,
        ignore_index=-1,
        reduction="sum",
    )
    assert torch.equal(module(scores, target), expected)
    assert torch.equal(copy.deepcopy(module)(scores, target), expected)
    assert set(module.state_dict()) == {"weight", "margin"}
    assert all(b.dtype == torch.float64 for b in module.double().buffers())
    shown = repr(module)
    assert all(part in shown for part in ("k=3", "tau=0.5", "ignore_index=-1", "reduction='sum'"))
    assert "label_smoothing" not in shown


@every_kind
def test_changes_nothing_of_the_caller(kind):
    scores, target = scores_of(4, C).requires_grad_(), as_target(kind).clone()
    multilabel_smooth_topk_loss(scores, target, 2).backward()
    assert scores._version == target._version == 0
    assert torch.equal(target, as_target(kind))
