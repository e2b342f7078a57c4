"""Every loss with NaN, an infinite label or one class alone: where cross-entropy is NaN, and 0."""

import math

import pytest
import torch
import torch.nn.functional as F

import topklass
from contract_cases import (
    INF,
    KINDS,
    C,
    all_pairs,
    every_kind,
    every_loss,
    every_reduction,
    value_and_gradient,
)
from losses_table import LOSSES, problem

# PyTorch's own forward mode still uses what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
PLACES = ["label", "rival", "among absent classes"]
WITHOUT_K = [loss for loss in LOSSES if not loss.takes_k]
WITH_K = [loss for loss in LOSSES if loss.takes_k]


def spoilt_problem(where, kind, classes=C):
    """Four rows, of which the second has a NaN."""
    logits, _ = problem((4, classes))
    target = torch.tensor([0, 1, 2, 0])
    if where == "among absent classes":
        logits[1, 2:] = -INF
    logits[1, 1 if where == "label" else -1] = math.nan
    if kind == "probabilities":
        target = F.one_hot(target, classes).double()
    return logits, target


def assert_nan_as_cross_entropy(loss, logits, target, options, arguments):
    for ours, theirs in zip(
        value_and_gradient(loss, logits, target, **options, **arguments),
        value_and_gradient(F.cross_entropy, logits, target, **options),
        strict=True,
    ):
        assert torch.equal(ours.isnan(), theirs.isnan())


@every_loss
@pytest.mark.parametrize(
    ("k", "where", "kind", "reduction"),
    all_pairs([1, 2, 13, 40], PLACES, KINDS, ["none", "mean", "sum"]),
    ids=str,
)
def test_nan(loss, k, where, kind, reduction):
    """Its row has the loss NaN and the gradient NaN throughout, the other rows have neither."""
    logits, target = spoilt_problem(where, kind, k + 3)
    arguments = loss.arguments(k + 3, k)
    assert_nan_as_cross_entropy(loss, logits, target, {"reduction": reduction}, arguments)


@every_loss
@every_kind
@pytest.mark.parametrize("where", PLACES)
def test_nan_of_a_class_that_does_not_count(loss, kind, where):
    logits, target = spoilt_problem(where, kind)
    weight = torch.ones(C, dtype=torch.float64)
    weight[1] = 0
    options = {"weight": weight, "reduction": "none"}
    assert_nan_as_cross_entropy(loss, logits, target, options, loss.arguments())


@every_loss
@every_reduction
def test_nan_of_an_ignored_row(loss, reduction):
    """No loss; a gradient that is NaN."""
    logits, target = spoilt_problem("label", "indices")
    options = {"ignore_index": 1, "reduction": reduction}
    assert_nan_as_cross_entropy(loss, logits, target, options, loss.arguments())


@every_loss
@pytest.mark.parametrize("where", PLACES)
def test_nan_with_label_smoothing(loss, where):
    logits, target = spoilt_problem(where, "indices")
    if where == "among absent classes":
        logits[1] = logits[1].nan_to_num(neginf=0.0, nan=math.nan)
    options = {"label_smoothing": 0.1, "reduction": "none"}
    assert_nan_as_cross_entropy(loss, logits, target, options, loss.arguments())


@every_loss
@every_kind
@pytest.mark.parametrize("where", PLACES)
def test_nan_under_transformations(loss, kind, where):
    """Where values may not be read: torch.func, in reverse and in forward mode."""
    logits, target = spoilt_problem(where, kind)

    def losses_of(scores):
        return loss(scores, target, **loss.arguments(), reduction="none")

    spoilt = torch.tensor([False, True, False, False])
    gradient = torch.func.grad(lambda s: losses_of(s).sum())(logits)
    assert torch.equal(gradient.isnan(), spoilt[:, None].expand(4, C))
    losses, slopes = torch.func.jvp(losses_of, (logits,), (torch.ones_like(logits),))
    assert torch.equal(losses.isnan(), spoilt)
    assert torch.equal(slopes.isnan(), spoilt)


@every_kind
def test_nan_under_compile(kind):
    logits, target = spoilt_problem("rival", kind)
    torch._dynamo.reset()
    loss = topklass.CalibratedTopKHingeLoss(2, reduction="none")
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    value, gradient = value_and_gradient(compiled, logits, target)
    assert value.isnan().tolist() == [False, True, False, False]
    assert torch.equal(gradient.isnan(), value.isnan()[:, None].expand(4, C))


@pytest.mark.parametrize(
    "operator", [topklass.noised_topk, topklass.expected_topk], ids=["noised", "expected"]
)
@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_nan_of_operators(operator, epsilon):
    scores = torch.randn(3, C)
    scores[1, 3] = math.nan
    value, gradient = value_and_gradient(operator, scores, 2, epsilon)
    assert value.isnan().tolist() == [False, True, False]
    assert gradient.isnan().all(1).tolist() == gradient.isnan().any(1).tolist()
    assert gradient.isnan().any(1).tolist() == [False, True, False]


def test_nan_of_noise():
    noise = torch.zeros(2, C, 3)
    noise[0, 1, 2] = math.nan
    losses = topklass.NoisedTopKLoss(2, reduction="none")(*problem((2, C)), noise=noise)
    assert losses.isnan().tolist() == [True, False]


# A label of +inf


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", WITH_K, ids=lambda loss: loss.name)
@pytest.mark.parametrize("k", [2, C - 1])
def test_label_of_infinite_score(loss, k, kind):
    """It is in the list, whatever the margin: no loss and no gradient."""
    logits, target = problem((2, C))
    logits[1, target[1]] = INF
    if kind == "probabilities":
        target = F.one_hot(target, C).double()
    arguments = loss.arguments(k=k) | {"reduction": "none"}
    value, gradient = value_and_gradient(loss, logits, target, **arguments)
    assert value[1] == 0
    if kind == "indices":
        assert not gradient[1].any()


def test_label_and_rivals_of_infinite_score():
    """The convex hinge is 0 where the hinge is: while fewer than k rivals are infinite."""
    logits, target = torch.zeros(2, 5), torch.tensor([0, 0])
    logits[0, :2] = INF
    logits[1, :3] = INF
    for loss in (topklass.ConvexTopKHingeLoss, topklass.TopKHingeLoss):
        losses = loss(2, reduction="none")(logits, target)
        assert losses[0] == 0
        assert losses[1].isnan()


# One class


@pytest.mark.parametrize("loss", WITHOUT_K, ids=lambda loss: loss.name)
@pytest.mark.parametrize("shape", [(1,), (3, 1), (3, 1, 2), (0, 1)], ids=str)
@pytest.mark.parametrize(
    ("kind", "label_smoothing", "weighted", "reduction"),
    all_pairs(KINDS, [0.0, 0.1], [False, True], ["none", "mean", "sum"]),
    ids=str,
)
def test_one_class(loss, shape, kind, label_smoothing, weighted, reduction):
    """It is certain, as for cross-entropy; a logit that is no number stays none."""
    options = {"label_smoothing": label_smoothing, "reduction": reduction}
    if weighted:
        options["weight"] = torch.rand(1, dtype=torch.float64)
    logits, target = problem(shape, kind)
    for spoilt in (False, True):
        if spoilt and logits.numel():
            logits.view(-1)[0] = math.nan
        ours = value_and_gradient(loss, logits, target, **options, **loss.arguments(1))
        theirs = value_and_gradient(F.cross_entropy, logits, target, **options)
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("loss", WITH_K, ids=lambda loss: loss.name)
@pytest.mark.parametrize("shape", [(1,), (3, 1), (3, 1, 2), (3, 0)], ids=str)
def test_no_list_of_one_class(loss, shape):
    logits = torch.zeros(shape)
    target = logits.sum(min(1, len(shape) - 1)).long()
    classes = shape[min(1, len(shape) - 1)]
    with pytest.raises(ValueError, match=rf"at least two classes, got {classes} in dimension \d"):
        loss.function(logits, target, **loss.arguments(k=1))
