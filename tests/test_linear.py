"""A layer and its loss in one equal the layer and the loss one after the other."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import topklass
from contract_cases import all_pairs
from linear_cases import (
    CLASSES,
    FEATURES,
    LOSSES,
    MARGINS,
    ROWS,
    Layer,
    differentiate,
    fused,
    in_rows,
    layer,
    plain,
)
from topklass.functional import (
    _chunks,
    _linear_function,
    linear_smooth_topk_loss,
    linear_topk_cross_entropy,
)
from topklass.functional._contract import RowLoss

every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
REDUCTIONS = ["mean", "sum", "none"]
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
OPTIONS = {
    "": {},
    "weight": {"weight": torch.linspace(0, 2, CLASSES, dtype=torch.float64)},
    "margins": {"margin": MARGINS},
    "ignored": {"ignore_index": 2},
    "smoothed": {"label_smoothing": 0.2, "weight": torch.linspace(0, 2, CLASSES).double()},
}


def exact(actual: object, expected: object) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("loss", "reduction", "options", "rows"), all_pairs(LOSSES, REDUCTIONS, OPTIONS, [1, 3, 100])
)
def test_value_and_gradients(loss, reduction, options, rows, monkeypatch):
    in_rows(monkeypatch, rows)
    loss, of = LOSSES[loss], layer(bias=rows != 1)
    of.target[:2] = torch.tensor([2, 1])
    options = OPTIONS[options] | {"reduction": reduction}
    exact(
        differentiate(fused(loss, of, **options), of), differentiate(plain(loss, of, **options), of)
    )


@every_loss
@every_reduction
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_class_probabilities(loss, reduction, smoothing, monkeypatch):
    in_rows(monkeypatch, 3)
    of = layer()._replace(target=torch.rand(ROWS, CLASSES, dtype=torch.float64).softmax(1))
    options = {"reduction": reduction, "label_smoothing": smoothing}
    exact(
        differentiate(fused(loss, of, **options), of), differentiate(plain(loss, of, **options), of)
    )


@pytest.mark.parametrize("features", [FEATURES, 0])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 0, 3)], ids=str)
@every_reduction
def test_shapes(shape, features, reduction, monkeypatch):
    in_rows(monkeypatch, 2)
    of = layer(rows=math.prod(shape), features=features)
    of = of._replace(
        input=of.input.detach().reshape(*shape, features).requires_grad_(),
        target=of.target.reshape(shape),
    )
    loss = LOSSES["smooth"]
    value = fused(loss, of, reduction=reduction)
    assert value.shape == (shape if reduction == "none" else ())
    expected = plain(loss, of, reduction=reduction)
    torch.testing.assert_close(
        differentiate(value, of), differentiate(expected, of), equal_nan=True
    )


@every_reduction
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_all_rows_ignored(reduction, dtype):
    """As the loss of the logits has it: no gradient, and the mean of nothing is NaN."""
    of = layer(dtype=dtype)._replace(target=torch.full((ROWS,), -100))
    value, *gradients = differentiate(fused(LOSSES["smooth"], of, reduction=reduction), of)
    assert value.isnan() if reduction == "mean" else (value == 0).all()
    assert all((gradient == 0).all() for gradient in gradients)


@every_loss
def test_backward_pass_again(loss, monkeypatch):
    """The second time, gradients are made again: the first ones may be those of parameters."""
    in_rows(monkeypatch, 3)
    of = layer()
    value = 3 * fused(loss, of)
    leaves = (of.input, of.weight, of.bias)
    first = torch.autograd.grad(value, leaves, retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(value, leaves)
    exact(first, kept)
    exact(second, kept)
    exact(second, torch.autograd.grad(3 * plain(loss, of), leaves))


def test_gradients_are_not_copied(monkeypatch):
    places = []
    original = _linear_function.in_chunks

    def recorded(*given: object) -> tuple[Tensor, tuple[Tensor, ...]]:
        losses, gradients = original(*given)
        places.extend(gradient.data_ptr() for gradient in gradients)
        return losses, gradients

    monkeypatch.setattr(_linear_function, "in_chunks", recorded)
    of = layer()
    (2 * fused(LOSSES["smooth"], of)).backward()
    assert of.weight.grad.data_ptr() == places[1]


@pytest.mark.parametrize("wanted", ["input", "weight", "bias"])
@every_reduction
def test_only_what_is_wanted(wanted, reduction, monkeypatch):
    """No product for the weight if its gradient is not asked for, and none at all without any."""
    products = []
    original = _chunks.add_product
    monkeypatch.setattr(
        _chunks, "add_product", lambda *given, **more: products.append(original(*given, **more))
    )
    of = layer()
    whole = dict(
        zip(
            ("input", "weight", "bias"),
            differentiate(plain(LOSSES["smooth"], of, reduction=reduction), of)[1:],
            strict=True,
        )
    )
    for name in {"input", "weight", "bias"} - {wanted}:
        getattr(of, name).requires_grad_(False)
    _, gradient = differentiate(fused(LOSSES["smooth"], of, reduction=reduction), of)
    exact(gradient, whole[wanted])
    assert bool(products) == (wanted == "weight")


@pytest.mark.parametrize("how", ["no_grad", "no leaf"])
def test_no_gradient_without_need(how, monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(RowLoss, "losses_and_gradient", refuse)
    of = layer()
    expected = plain(LOSSES["smooth"], of).detach()
    if how == "no leaf":
        of = Layer(*(t.detach() for t in of))
    with torch.set_grad_enabled(how == "no leaf"):
        value = fused(LOSSES["smooth"], of)
    assert not value.requires_grad
    exact(value, expected)


# Errors


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"input": [1.0]}, TypeError, "input must be a tensor, got list"),
        ({"input": torch.zeros(3, FEATURES).long()}, NotImplementedError, "input .* torch.int64"),
        ({"input": torch.zeros(())}, RuntimeError, r"last dimension of input .* shape \(\)"),
        ({"input": torch.zeros(3, 5)}, RuntimeError, r"that of linear_weight, 4, .* \(3, 5\)"),
        ({"linear_weight": torch.zeros(9, 1, 4)}, RuntimeError, r"\(C, d\), got \(9, 1, 4\)"),
        ({"linear_weight": None}, TypeError, "linear_weight must be a tensor, got NoneType"),
        ({"linear_weight": torch.zeros(9, 4).double()}, RuntimeError, "float32 and torch.float64"),
        ({"linear_bias": torch.zeros(8)}, RuntimeError, r"shape \(9,\), got \(8,\)"),
        ({"linear_bias": torch.zeros(9, device="meta")}, RuntimeError, "on meta"),
        ({"target": torch.zeros(3, 1).long()}, RuntimeError, r"target.squeeze\(-1\)"),
        ({"target": torch.tensor([0, 9, 1])}, IndexError, "from 0 to 8"),
        ({"k": 9}, ValueError, "from 1 to 8"),
        ({"reduction": "all"}, ValueError, "reduction must be one of"),
        ({"weight": torch.zeros(8)}, RuntimeError, "each of the 9 classes"),
        ({"margin": torch.zeros(8)}, ValueError, "each of the 9 classes"),
        ({"chunk_bytes": 0}, ValueError, "chunk_bytes must be at least 1"),
        ({"chunk_bytes": 1.5}, TypeError, "chunk_bytes must be an integer"),
    ],
    ids=str,
)
@pytest.mark.parametrize("function", [linear_smooth_topk_loss, linear_topk_cross_entropy])
def test_errors(function, changed, error, message):
    given = {
        "input": torch.zeros(3, FEATURES),
        "linear_weight": torch.zeros(CLASSES, FEATURES),
        "target": torch.zeros(3).long(),
    }
    with pytest.raises(error, match=message):
        function(**given | changed)


@pytest.mark.parametrize("name", ["margin", "weight", "target"])
def test_no_derivative_by_what_is_not_the_layer(name):
    of = layer()
    value = torch.full((CLASSES,), 0.5, dtype=torch.float64)
    options = {name: value.requires_grad_()}
    if name == "target":
        of = of._replace(target=options.pop(name).expand(ROWS, CLASSES))
    with pytest.raises(RuntimeError, match=rf"no derivative by the {name}: pass {name}.detach\(\)"):
        fused(LOSSES["smooth"], of, **options)


@every_reduction
def test_no_second_derivative(reduction):
    of = layer()
    value = fused(LOSSES["smooth"], of, reduction=reduction).sum()
    (gradient,) = torch.autograd.grad(value, of.input, create_graph=True)
    exact(
        gradient,
        torch.autograd.grad(plain(LOSSES["smooth"], of, reduction=reduction).sum(), of.input)[0],
    )
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


@every_reduction
def test_a_graph_of_the_gradient_under_checkpoint(reduction):
    """Which lets saved tensors be read only once."""
    of = layer()

    def loss(input: torch.Tensor) -> torch.Tensor:
        return fused(LOSSES["smooth"], of._replace(input=1 * input), reduction=reduction).sum()

    value = checkpoint(loss, of.input, use_reentrant=False)
    (gradient,) = torch.autograd.grad(value, of.input, create_graph=True)
    exact(gradient, torch.autograd.grad(loss(of.input), of.input)[0])


def test_no_batch_of_gradients():
    of = layer()
    value = fused(LOSSES["smooth"], of)
    with pytest.raises(RuntimeError, match="not a batch of them"):
        torch.autograd.grad(value, of.input, torch.ones(2).double(), is_grads_batched=True)


def test_no_kernel_on_the_cpu():
    with topklass.use_backend("kernel"), pytest.raises(RuntimeError, match="device cpu"):
        fused(LOSSES["smooth"], layer(dtype=torch.float32))
