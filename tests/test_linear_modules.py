"""Modules that hold a layer and its loss."""

import pytest
import torch
from benchmarks.memory import peak_on_cpu
from torch import nn

import topklass
from topklass import LinearSmoothTopKLoss, LinearTopKCrossEntropyLoss

PAIRS = {
    "smooth": (LinearSmoothTopKLoss, topklass.SmoothTopKLoss, {"k": 3, "tau": 0.5, "margin": 0.2}),
    "lists": (LinearTopKCrossEntropyLoss, topklass.TopKCrossEntropyLoss, {"k": {1: 0.5, 4: 0.5}}),
}
every_pair = pytest.mark.parametrize(("fused", "plain", "parameters"), PAIRS.values(), ids=PAIRS)


@every_pair
@pytest.mark.parametrize("bias", [False, True])
def test_is_the_layer_and_the_loss(fused, plain, parameters, bias):
    options = {"weight": torch.rand(9), "ignore_index": 2, "label_smoothing": 0.1}
    criterion = fused(4, 9, **parameters, bias=bias, **options)
    head, loss = nn.Linear(4, 9, bias), plain(**parameters, **options)
    head.load_state_dict(criterion.linear.state_dict())
    input, target = torch.randn(6, 4), torch.randint(9, (6,))
    value, expected = criterion(input, target), loss(head(input), target)
    torch.testing.assert_close(value, expected)
    value.backward(), expected.backward()
    for actual, wanted in zip(criterion.parameters(), head.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, wanted.grad)
    assert criterion.temperature == loss.temperature


@every_pair
def test_state(fused, plain, parameters):
    criterion = fused(4, 9, 3, margin=[0.1] * 9, weight=torch.rand(9), bias=True)
    names = {"linear.weight", "linear.bias", "weight", "margin"}
    assert set(criterion.state_dict()) == names
    assert {name for name, _ in criterion.named_parameters()} == {"linear.weight", "linear.bias"}
    other = fused(4, 9, 3, margin=[0.2] * 9, weight=torch.rand(9), bias=True)
    other.load_state_dict(criterion.state_dict())
    input, target = torch.randn(6, 4), torch.randint(9, (6,))
    assert torch.equal(criterion(input, target), other(input, target))
    assert other.double()(input.double(), target).dtype == torch.float64


@every_pair
def test_repr(fused, plain, parameters):
    shown = repr(fused(4, 9, **parameters, chunk_bytes=1000))
    assert "Linear(in_features=4, out_features=9, bias=False)" in shown
    assert "chunk_bytes=1000" in shown
    assert f"k={parameters['k']}" in shown
    assert "linear.weight" not in shown


def test_chunk_bytes_are_given():
    criterion = LinearSmoothTopKLoss(4, 9, k=3, label_smoothing=0.1, chunk_bytes=1)
    with pytest.raises(RuntimeError, match="chunk_bytes=1"):
        criterion(torch.randn(6, 4), torch.randint(9, (6,)))


def test_prediction():
    criterion = LinearSmoothTopKLoss(4, 9, bias=True)
    input = torch.randn(6, 4)
    labels, scores = criterion.predict_topk(input, k=3)
    expected = criterion.linear(input).topk(3)
    assert torch.equal(labels, expected.indices)
    torch.testing.assert_close(scores, expected.values.detach())


@every_pair
def test_prediction_of_as_many_as_the_loss_lists(fused, plain, parameters):
    lengths = parameters["k"]
    expected = max(lengths) if isinstance(lengths, dict) else lengths
    assert fused(4, 9, **parameters).predict_topk(torch.randn(6, 4)).labels.shape == (6, expected)


@every_pair
def test_errors_before_the_first_batch(fused, plain, parameters):
    for options, message in (
        ({"k": 9}, "k must be from 1 to 8, one less than the 9 classes, got k=9"),
        ({"margin": torch.ones(8)}, "have one value for each of the 9 classes, got shape"),
        ({"weight": torch.ones(8)}, "weight must have one value for each of the 9 classes"),
        ({"num_classes": 1}, "at least two classes"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            fused(**{"in_features": 4, "num_classes": 9} | parameters | options)


def test_prediction_in_chunks():
    room = 2**19
    criterion = LinearSmoothTopKLoss(4, 50_000, chunk_bytes=room)
    input = torch.randn(64, 4)
    taken = peak_on_cpu(lambda: criterion.predict_topk(input, k=5))
    assert 0.3 * room < taken < 1.5 * room < 64 * 50_000 * 4


def test_device_and_dtype():
    criterion = LinearSmoothTopKLoss(4, 9, device="meta", dtype=torch.bfloat16)
    assert criterion.linear.weight.device.type == "meta"
    assert criterion.linear.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 9), ValueError, "in_features must be at least 1"),
        ((4, 2.0), TypeError, "num_classes must be an integer"),
        ((4, 9, 0), ValueError, "k must be at least 1"),
    ],
    ids=str,
)
@pytest.mark.parametrize("module", [LinearSmoothTopKLoss, LinearTopKCrossEntropyLoss])
def test_errors(module, arguments, error, message):
    with pytest.raises(error, match=message):
        module(*arguments)
    with pytest.raises(ValueError, match="chunk_bytes must be at least 1"):
        module(4, 9, chunk_bytes=0)


def test_training():
    """A thousand classes are learnt, in chunks of few rows."""
    criterion = LinearSmoothTopKLoss(32, 1000, margin=0.1, chunk_bytes=2**16)
    optimizer = torch.optim.SGD(criterion.parameters(), lr=50.0)
    input, target = torch.randn(64, 32), torch.randint(1000, (64,))
    for _ in range(20):
        optimizer.zero_grad()
        criterion(input, target).backward()
        optimizer.step()
    labels, _ = criterion.predict_topk(input, k=5)
    assert (labels == target[:, None]).any(1).float().mean() > 0.9
