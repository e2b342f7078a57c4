"""A loss as Hugging Face's Trainer calls it: against cross-entropy, with accumulation, in error."""

import subprocess
import sys
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import topklass
from test_bad_input import raises
from topklass.integrations import hf_loss

C = 7
CRITERIA = [nn.CrossEntropyLoss, lambda **o: topklass.SmoothTopKLoss(k=2, **o)]

every_criterion = pytest.mark.parametrize("make", CRITERIA, ids=["cross-entropy", "smooth top-k"])
every_shift = pytest.mark.parametrize("shift", [False, True])


def sequences(n: int, length: int = 5) -> tuple[Tensor, Tensor]:
    logits, labels = torch.randn(n, length, C), torch.randint(C, (n, length))
    labels[:, 0] = 0  # counts unless labels are shifted
    labels[0, 2:4] = -100
    return logits, labels


def predicted(logits: Tensor, labels: Tensor, shift: bool) -> tuple[Tensor, Tensor]:
    """Rows and labels, position by position."""
    length = labels.shape[1]
    pairs = [(t, t + shift) for t in range(length - shift)]
    rows = torch.stack([logits[:, t] for t, _ in pairs], 1)
    return rows.reshape(-1, C), torch.stack([labels[:, t] for _, t in pairs], 1).reshape(-1)


@every_criterion
@every_shift
def test_mean(make, shift):
    logits, labels = sequences(3)
    found = hf_loss(make(), shift)(SimpleNamespace(logits=logits), labels)
    torch.testing.assert_close(found, make()(*predicted(logits, labels, shift)))


@every_criterion
@every_shift
@pytest.mark.parametrize("tensor", [False, True], ids=["int", "tensor"])
def test_number_of_items(make, shift, tensor):
    logits, labels = sequences(3)
    items = torch.tensor(40) if tensor else 40
    found = hf_loss(make(), shift)({"logits": logits}, labels, num_items_in_batch=items)
    total = make(reduction="sum")(*predicted(logits, labels, shift))
    torch.testing.assert_close(found, total / 40)


@every_criterion
@every_shift
def test_accumulation_over_unequal_batches(make, shift):
    """Loss and gradient of all sequences at once, not the mean of the batches' means."""
    logits, labels = sequences(6)
    labels[4] = -100
    whole = logits.clone().requires_grad_()
    expected = make()(*predicted(whole, labels, shift))
    expected.backward()
    parts = logits.clone().requires_grad_()
    items = (predicted(logits, labels, shift)[1] != -100).sum()
    compute_loss, total = hf_loss(make(), shift), 0.0
    for rows in ([0], [1, 2, 3], [4, 5]):
        loss = compute_loss((parts[rows],), labels[rows], num_items_in_batch=items)
        loss.backward()
        total += loss.detach()
    torch.testing.assert_close(total, expected.detach())
    torch.testing.assert_close(parts.grad, whole.grad)


def test_causal_language_model_by_hand():
    """The first position predicts the second label; the last predicts nothing."""
    logits = torch.randn(1, 3, C)
    labels = torch.tensor([[5, 1, 2]])
    expected = F.cross_entropy(logits[0, :2], torch.tensor([1, 2]))
    torch.testing.assert_close(
        hf_loss(nn.CrossEntropyLoss(), shift=True)((logits,), labels), expected
    )


def test_sequence_classification():
    logits, labels = torch.randn(4, C), torch.tensor([0, 3, -100, 6])
    found = hf_loss(nn.CrossEntropyLoss())(SimpleNamespace(logits=logits), labels)
    torch.testing.assert_close(found, F.cross_entropy(logits, labels))


def test_outputs():
    logits, labels = sequences(2)
    compute_loss = hf_loss(nn.CrossEntropyLoss())
    expected = F.cross_entropy(logits.movedim(-1, 1), labels)
    named = namedtuple("Output", ["hidden", "logits"])(None, logits)
    for outputs in (
        SimpleNamespace(logits=logits),
        {"logits": logits},
        (logits, None),
        logits,
        named,
    ):
        torch.testing.assert_close(compute_loss(outputs, labels), expected)


def test_criterion_is_left_alone():
    """Its options hold, and those set later; its reduction does not change."""
    weight = torch.rand(C)
    criterion = nn.CrossEntropyLoss(weight, label_smoothing=0.1)
    compute_loss = hf_loss(criterion)
    logits, labels = sequences(2)
    rows = predicted(logits, labels, False)
    for smoothing in (0.1, 0.3):
        criterion.label_smoothing = smoothing
        found = compute_loss(logits, labels, num_items_in_batch=2)
        total = F.cross_entropy(*rows, weight, label_smoothing=smoothing, reduction="sum")
        torch.testing.assert_close(found, total / 2)
    assert criterion.reduction == "mean"
    criterion.to(torch.float64)
    assert compute_loss(logits.double(), labels, num_items_in_batch=2).dtype == torch.float64


def test_sum_of_the_criterion():
    logits, labels = sequences(2)
    compute_loss = hf_loss(nn.CrossEntropyLoss(reduction="sum"))
    total = F.cross_entropy(*predicted(logits, labels, False), reduction="sum")
    torch.testing.assert_close(compute_loss(logits, labels), total)


@every_shift
def test_other_ignore_index(shift):
    logits, labels = sequences(2)
    labels[labels == -100] = 3
    found = hf_loss(nn.CrossEntropyLoss(ignore_index=3), shift)(logits, labels)
    rows = predicted(logits, labels, shift)
    torch.testing.assert_close(found, F.cross_entropy(*rows, ignore_index=3))


def test_half_precision_sums_in_float32():
    logits, labels = torch.randn(40, 50, C).bfloat16().requires_grad_(), torch.randint(C, (40, 50))
    loss = hf_loss(nn.CrossEntropyLoss())(logits, labels, num_items_in_batch=2000)
    assert loss.dtype == torch.float32
    rows = predicted(logits.float(), labels, False)
    torch.testing.assert_close(loss, F.cross_entropy(*rows))
    loss.backward()
    assert logits.grad.dtype == torch.bfloat16


def test_transformers_is_not_imported():
    """In a process of its own: torchmetrics imports it where it is installed."""
    code = "import sys, topklass.integrations; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bad_criterion():
    for criterion in (F.cross_entropy, nn.MSELoss(), nn.Linear(2, 2)):
        with raises(TypeError, "reduction and ignore_index", type(criterion).__name__):
            hf_loss(criterion)
    with raises(TypeError, "reduction and ignore_index", "MultiMarginLoss"):
        hf_loss(topklass.LogitAdjustment(nn.MultiMarginLoss(), [3, 2, 1]))
    with raises(ValueError, "mean", "sum", "'none'"):
        hf_loss(nn.CrossEntropyLoss(reduction="none"))


def test_bad_arguments():
    logits, labels = sequences(2)
    compute_loss = hf_loss(nn.CrossEntropyLoss())
    for outputs in ({"scores": logits}, SimpleNamespace(), (), (None,)):
        with raises(TypeError, "logits", type(outputs).__name__):
            compute_loss(outputs, labels)
    with raises(TypeError, "labels", "list"):
        compute_loss(logits, labels.tolist())
    with raises(ValueError, "(2, 7, 5)", "(2, 5)", "classes, which are last"):
        compute_loss(logits.movedim(-1, 1), labels)
    with raises(ValueError, "shift=True needs sequences", "(2, 7)"):
        hf_loss(nn.CrossEntropyLoss(), shift=True)(logits[:, 0], labels[:, 0])
