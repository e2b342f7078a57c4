"""The linear losses where calls are compiled, exported, traced or transformed."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import topklass
from linear_cases import LOSSES, Layer, differentiate, fused, layer, plain
from topklass.functional import (
    _chunks,
    _linear_function,
    linear_predict_topk,
    linear_smooth_topk_loss,
)

# Exporters and tracers warn, differently in every version of PyTorch.
pytestmark = pytest.mark.filterwarnings("ignore")
SMOOTH = LOSSES["smooth"]


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every chunk that is made."""
    made = []
    original = _chunks.chunk_rows
    monkeypatch.setattr(
        _linear_function, "chunk_rows", lambda *given: made.append(original(*given)) or made[-1]
    )
    return made


def loss_of(of: Layer):
    def loss(input: Tensor, weight: Tensor) -> Tensor:
        return fused(SMOOTH, of._replace(input=input, weight=weight))

    return loss


@pytest.mark.skipif(not hasattr(torch.compiler, "is_exporting"), reason="PyTorch from 2.7 on")
def test_compiled(chunks):
    """The graph breaks, the logits stay in chunks."""
    of = layer()

    def step(input: Tensor, weight: Tensor) -> Tensor:
        return 2 * loss_of(of)(input.sin(), weight)

    value = torch.compile(step, backend="aot_eager")(of.input, of.weight)
    actual = torch.autograd.grad(value, (of.input, of.weight))
    assert chunks
    expected = 2 * plain(SMOOTH, of._replace(input=of.input.sin()))
    torch.testing.assert_close(actual, torch.autograd.grad(expected, (of.input, of.weight)))


def test_exported(chunks):
    """With a dynamic batch, as the layer and the loss one after the other."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss = topklass.LinearSmoothTopKLoss(4, 9, k=3, bias=True)

        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            return self.loss(input, target)

    model, of = Model(), layer(rows=5, dtype=torch.float32)
    rows = torch.export.Dim("rows")
    exported = torch.export.export(
        model,
        (of.input.detach(), of.target),
        dynamic_shapes={"input": {0: rows}, "target": {0: rows}},
    ).module()
    assert not chunks
    other = layer(rows=8, dtype=torch.float32)
    torch.testing.assert_close(
        exported(other.input, other.target), model(other.input, other.target)
    )


@pytest.mark.parametrize("how", ["grad", "vmap", "jvp", "hessian", "make_fx"])
def test_transformed(how, chunks):
    of = layer(rows=3)
    loss = loss_of(of)

    def one_after_the_other(input: Tensor, weight: Tensor) -> Tensor:
        return plain(SMOOTH, of._replace(input=input, weight=weight))

    input, weight = of.input.detach(), of.weight.detach()
    transform = {
        "grad": lambda f: torch.func.grad(f, (0, 1))(input, weight),
        "vmap": lambda f: torch.func.vmap(lambda x: f(x, weight))(torch.stack([input, -input])),
        "jvp": lambda f: torch.func.jvp(lambda x: f(x, weight), (input,), (input,)),
        "hessian": lambda f: torch.func.hessian(lambda x: f(x, weight))(input),
        "make_fx": lambda f: make_fx(f)(input, weight)(-input, weight),
    }[how]
    torch.testing.assert_close(transform(loss), transform(one_after_the_other))
    assert not chunks


def test_without_memory(chunks):
    """Tensors of the meta device have shapes alone."""
    input, weight = torch.empty(3, 4, device="meta"), torch.empty(9, 4, device="meta")
    target = torch.empty(3, dtype=torch.long, device="meta")
    losses = linear_smooth_topk_loss(input, weight, target, 2, reduction="none")
    assert losses.shape == (3,)
    assert linear_predict_topk(input, weight, 2).labels.shape == (3, 2)
    assert not chunks


def test_checkpoint(chunks):
    of = layer()

    def step(input: Tensor) -> Tensor:
        return loss_of(of)(input.sin(), of.weight)

    value = torch.utils.checkpoint.checkpoint(step, of.input, use_reentrant=False)
    expected = plain(SMOOTH, of._replace(input=of.input.sin()))
    torch.testing.assert_close(differentiate(value, of), differentiate(expected, of))
    assert len(chunks) == 2


@pytest.mark.parametrize("how", ["compile", "export", "vmap"])
def test_prediction(how):
    of = layer(dtype=torch.float32)

    class Model(nn.Linear):
        def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
            return linear_predict_topk(input, self.weight.detach(), 3)

    model, input = Model(*of.weight.shape[::-1], bias=False), of.input.detach()
    model.weight = nn.Parameter(of.weight.detach())
    function = {
        "compile": lambda: torch.compile(model, backend="aot_eager"),
        "export": lambda: torch.export.export(model, (input,)).module(),
        "vmap": lambda: torch.func.vmap(model),
    }[how]()
    labels, scores = function(input)
    expected = F.linear(input, of.weight).topk(3)
    assert torch.equal(labels, expected.indices)
    torch.testing.assert_close(scores, expected.values.detach())
