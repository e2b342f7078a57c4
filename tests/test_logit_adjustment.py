"""Logit adjustment: the paper's formula and its guarantee, around any loss."""

import copy
import io
import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import topklass
from contract_cases import C, every_loss, value_and_gradient
from losses_table import problem
from test_bad_input import raises
from topklass import DeferredReweighting, LogitAdjustment
from topklass.integrations import hf_loss

COUNTS = torch.tensor([500, 100, 50, 20, 10, 1])


def log_prior(counts: Tensor = COUNTS) -> Tensor:
    return (counts.double() / counts.sum()).log()


# The paper


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0, 2.0])
def test_the_formula(strength):
    """Equation 10, in its second form: a margin of (π_j / π_y)^t between label and rival."""
    logits, target = problem((8, C))
    adjusted = LogitAdjustment(nn.CrossEntropyLoss(reduction="none"), COUNTS.double(), strength)
    for row, label, loss in zip(logits, target, adjusted(logits, target), strict=True):
        rivals = [
            (COUNTS[j] / COUNTS[label]) ** strength * (row[j] - row[label]).exp()
            for j in range(C)
            if j != label
        ]
        torch.testing.assert_close(loss, torch.stack(rivals).sum().log1p(), rtol=1e-6, atol=0)


def balanced_accuracy(rule: tuple[int, ...], joint: Tensor) -> float:
    """Accuracy averaged over classes of a rule that maps each x to a class."""
    of_class = joint / joint.sum(0)
    return float(sum(of_class[x, y] for x, y in enumerate(rule)) / joint.shape[1])


@pytest.mark.parametrize("seed", range(5))
def test_the_minimiser_is_best_for_balanced_accuracy(seed):
    """Fisher consistency: on a discrete problem, against all rules; cross-entropy's is not best."""
    values, classes = 6, 3
    generator = torch.Generator().manual_seed(seed)
    given_class = torch.rand(values, classes, generator=generator, dtype=torch.float64)
    given_class = (2 * given_class).softmax(0)
    prior = torch.tensor([0.9, 0.09, 0.01], dtype=torch.float64)
    joint = given_class * prior
    plain = nn.CrossEntropyLoss(reduction="none")
    rules = {}
    for name, loss in (("plain", plain), ("adjusted", LogitAdjustment(plain, 1000 * prior))):
        logits = torch.zeros(values, classes, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([logits], max_iter=500, line_search_fn="strong_wolfe")
        chance = joint.sum(1)

        def risk(loss=loss, logits=logits, chance=chance, optimizer=optimizer):
            optimizer.zero_grad()
            total = (loss(logits, joint / chance[:, None]) * chance).sum()
            total.backward()
            return total

        optimizer.step(risk)
        rules[name] = tuple(logits.argmax(1).tolist())
    best = max(balanced_accuracy(r, joint) for r in product(range(classes), repeat=values))
    assert balanced_accuracy(rules["adjusted"], joint) == pytest.approx(best, abs=1e-12)
    assert balanced_accuracy(rules["plain"], joint) < best - 0.05


def test_a_class_without_samples_is_as_rare_as_the_rarest():
    """So its logit gets a gradient, and its loss is finite."""
    counts = torch.tensor([40, 0, 8, 2])
    loss = LogitAdjustment(nn.CrossEntropyLoss(), counts)
    expected = log_prior(torch.tensor([40, 2, 8, 2]))
    torch.testing.assert_close(loss.log_prior.double(), expected, rtol=1e-6, atol=0)
    value, gradient = value_and_gradient(loss, torch.zeros(1, 4), torch.tensor([0]))
    assert value.isfinite()
    assert gradient[0, 1] > 0
    without_any = LogitAdjustment(nn.CrossEntropyLoss(), [0, 0, 0, 0])
    assert torch.equal(without_any.log_prior, torch.full((4,), 0.25).log())


# Around any loss


@every_loss
@pytest.mark.parametrize("kind", ["indices", "probabilities"])
@pytest.mark.parametrize("shape", [(C,), (4, C), (3, C, 2), (2, C, 2, 3)], ids=str)
def test_every_loss(loss, kind, shape):
    logits, target = problem(shape, kind)
    criterion = loss.module(**loss.arguments(), reduction="none")
    fixed = loss.fixed(shape)
    dim = min(1, len(shape) - 1)
    prior = log_prior().view([-1 if i == dim else 1 for i in range(len(shape))])
    adjusted = LogitAdjustment(criterion, COUNTS.double(), 0.7)
    ours = value_and_gradient(adjusted, logits, target, **fixed)
    expected = value_and_gradient(
        criterion, logits + 0.7 * criterion.temperature * prior, target, **fixed
    )
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("dim", [-1, 2])
def test_class_dimension_of_the_criterion(dim):
    logits, target = torch.randn(2, 3, C), torch.randint(C, (2, 3))
    smooth = topklass.SmoothTopKLoss(2, dim=dim)
    deferred = DeferredReweighting(smooth, COUNTS, start=0)
    for criterion in (smooth, deferred):
        expected = criterion(logits + 2 * log_prior().float(), target)  # at temperature k
        torch.testing.assert_close(LogitAdjustment(criterion, COUNTS)(logits, target), expected)


def test_several_labels():
    logits, target = torch.randn(3, C), torch.tensor([[0, 1], [2, 5], [3, -100]])
    criterion = topklass.MultiLabelSmoothTopKLoss(2)
    expected = criterion(logits + log_prior().float(), target)
    torch.testing.assert_close(LogitAdjustment(criterion, COUNTS)(logits, target), expected)


def test_absent_classes_and_nan_stay():
    logits, target = torch.randn(3, C), torch.tensor([0, 1, 2])
    logits[0, 4], logits[1, 1], logits[2, 0] = -math.inf, -math.inf, math.nan
    loss = LogitAdjustment(topklass.SmoothTopKLoss(2, reduction="none"), COUNTS)
    values, gradient = value_and_gradient(loss, logits, target)
    assert values[0].isfinite()
    assert gradient[0, 4] == 0
    assert values[1] == math.inf
    assert gradient[2].isnan().all()


# With deferred weights


@pytest.mark.parametrize("epoch", [0, 3])
def test_around_deferred_weights(epoch):
    logits, target = torch.randn(4, C), torch.tensor([0, 1, 5, 5])
    deferred = DeferredReweighting(nn.CrossEntropyLoss(), COUNTS, start=3)
    loss = LogitAdjustment(deferred, COUNTS)
    deferred.set_epoch(epoch)
    weight = topklass.class_weights(COUNTS) if epoch else None
    expected = F.cross_entropy(logits + log_prior().float(), target, weight)
    torch.testing.assert_close(loss(logits, target), expected)


def test_not_inside_deferred_weights():
    loss = LogitAdjustment(nn.CrossEntropyLoss(), COUNTS)
    with raises(TypeError, "LogitAdjustment", "no buffer named weight"):
        DeferredReweighting(loss, COUNTS, 1)


# In training


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("moved", [False, True])
def test_half_precision(dtype, moved):
    """As the criterion's: the sum is rounded once, and weights in half precision are taken."""
    logits, target = torch.randn(4, C).to(dtype), torch.tensor([0, 1, 2, 3])
    loss = LogitAdjustment(nn.CrossEntropyLoss(torch.ones(C, dtype=dtype)), COUNTS)
    prior = loss.log_prior.clone()
    if moved:
        loss = loss.to(dtype)
        prior = prior.to(dtype).float()
    value, gradient = value_and_gradient(loss, logits, target)
    expected = loss.criterion((logits.float() + prior).to(dtype), target)
    assert value.dtype == gradient.dtype == dtype
    assert torch.equal(value, expected)


@pytest.mark.parametrize("make", [nn.CrossEntropyLoss, lambda: topklass.SmoothTopKLoss(2)])
def test_autocast(make):
    """The loss of logits that are adjusted in float32."""
    logits, target = torch.randn(4, C).bfloat16(), torch.tensor([0, 1, 2, 3])
    loss = LogitAdjustment(make(), COUNTS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(logits, target)
    assert value.dtype == torch.float32
    adjusted = logits.float() + loss.temperature * loss.log_prior
    torch.testing.assert_close(value, make()(adjusted, target))


def test_precision_of_counts_does_not_change_that_of_the_loss():
    loss = LogitAdjustment(nn.CrossEntropyLoss(), COUNTS.double())
    assert loss(torch.randn(2, C), torch.tensor([0, 1])).dtype == torch.float32


def test_state_dict_and_copies():
    logits, target = torch.randn(4, C), torch.tensor([0, 1, 2, 3])
    loss = LogitAdjustment(topklass.SmoothTopKLoss(2, weight=torch.rand(C)), COUNTS, 0.5)
    file = io.BytesIO()
    torch.save(loss.state_dict(), file)
    file.seek(0)
    other = LogitAdjustment(topklass.SmoothTopKLoss(2, weight=torch.ones(C)), [1.0] * C, 0.5)
    other.load_state_dict(torch.load(file, weights_only=True))
    for twin in (other, copy.deepcopy(loss)):
        assert torch.equal(twin(logits, target), loss(logits, target))
    assert not list(loss.parameters())


def test_moves_with_the_module():
    logits, target = torch.randn(4, C), torch.tensor([0, 1, 2, 3])
    loss = LogitAdjustment(nn.CrossEntropyLoss(), COUNTS)
    with raises(RuntimeError, "log_prior is on cpu", "meta"):
        loss(logits.to("meta"), target.to("meta"))
    assert loss.to("meta")(logits.to("meta"), target.to("meta")).device.type == "meta"
    assert loss.log_prior.device.type == "meta"


def test_compile():
    logits, target = torch.randn(4, C), torch.tensor([0, 1, 2, 3])
    loss = LogitAdjustment(topklass.FocalLoss(), COUNTS)
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        value_and_gradient(compiled, logits, target), value_and_gradient(loss, logits, target)
    )


@pytest.mark.parametrize("items", [None, 7])
def test_hugging_face(items):
    logits, labels = torch.randn(2, 3, C), torch.randint(C, (2, 3))
    labels[0, 0] = -100
    margin = nn.Parameter(torch.ones(C))
    criterion = topklass.SmoothTopKLoss(2, margin=margin)
    deferred = DeferredReweighting(criterion, COUNTS, start=0)
    loss = LogitAdjustment(deferred, COUNTS)
    found = hf_loss(loss)({"logits": logits}, labels, num_items_in_batch=items)
    weight = topklass.class_weights(COUNTS)
    reduction = "mean" if items is None else "sum"
    expected = topklass.functional.smooth_topk_loss(
        (logits + 2 * log_prior().float()).flatten(0, 1),  # at temperature k
        labels.flatten(),
        2,
        weight=weight,
        reduction=reduction,
    )
    torch.testing.assert_close(found, expected / (items or 1))
    assert loss.criterion is deferred
    assert criterion.reduction == "mean"
    found.backward()
    assert margin.grad.any()


# Arguments


def test_bad_arguments():
    with raises(TypeError, "loss module", "cross_entropy"):
        LogitAdjustment(F.cross_entropy, COUNTS)
    with raises(ValueError, "counts", "one per class", "(2, 3)"):
        LogitAdjustment(nn.CrossEntropyLoss(), torch.ones(2, 3))
    with raises(ValueError, "counts", "negative", "-1"):
        LogitAdjustment(nn.CrossEntropyLoss(), [3, -1])
    for strength, error in ((-1.0, ValueError), (math.nan, ValueError), ("1", TypeError)):
        with raises(error, "strength", str(strength)):
            LogitAdjustment(nn.CrossEntropyLoss(), COUNTS, strength)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (3, 4, C)], ids=str)
def test_wrong_number_of_classes(shape):
    logits, target = problem(shape)
    with raises(ValueError, "counts for 6 classes", "have 4", "minlength=4"):
        LogitAdjustment(nn.CrossEntropyLoss(), COUNTS)(logits, target)


def test_bad_logits():
    loss = LogitAdjustment(nn.CrossEntropyLoss(), COUNTS)
    with raises(TypeError, "logits must be a tensor", "list"):
        loss([1.0] * C, torch.tensor(0))
    with raises(NotImplementedError, "floating-point", "torch.int64"):
        loss(torch.zeros(2, C).long(), torch.tensor([0, 1]))
    with raises(RuntimeError, "class dimension", "()"):
        loss(torch.tensor(1.0), torch.tensor(0))


def test_repr():
    shown = repr(LogitAdjustment(topklass.SmoothTopKLoss(2), COUNTS, 0.5))
    assert all(part in shown for part in ("strength=0.5", "6 values", "SmoothTopKLoss(", "k=2"))
