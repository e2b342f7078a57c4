"""What the tests of the linear losses share: layers with losses, in one and one after the other."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import topklass.functional as TF
from topklass.functional import _linear_function

CLASSES, FEATURES, ROWS = 9, 4, 7


class Loss(NamedTuple):
    """A loss of a layer in one, the loss of logits that it is, and parameters of both."""

    fused: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    parameters: dict[str, Any]


SMOOTH = (TF.linear_smooth_topk_loss, TF.smooth_topk_loss)
LISTS = (TF.linear_topk_cross_entropy, TF.topk_cross_entropy)
MARGINS = torch.linspace(0, 1, CLASSES, dtype=torch.float64)
LOSSES = {
    "smooth": Loss(*SMOOTH, {"k": 3}),
    "smooth, tau": Loss(*SMOOTH, {"k": 2, "tau": 0.3, "margin": 0.5}),
    "cross-entropy": Loss(*LISTS, {"k": 1}),
    "lists": Loss(*LISTS, {"k": 3, "margin": 0.2, "temperature": 2.0}),
    "mixture": Loss(*LISTS, {"k": {1: 0.3, 2: 0.3, 4: 0.4}, "temperature": 3.0}),
}


class Layer(NamedTuple):
    """Leaves that are differentiated, and targets."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor


def layer(
    rows: int = ROWS,
    classes: int = CLASSES,
    features: int = FEATURES,
    dtype: torch.dtype = torch.float64,
    bias: bool = True,
    device: str = "cpu",
) -> Layer:
    """A random problem, the same on every device."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(device, dtype).requires_grad_()

    target = torch.randint(classes, (rows,)).to(device)
    return Layer(
        random(rows, features), random(classes, features), random(classes) if bias else None, target
    )


def fused(loss: Loss, of: Layer, **options: Any) -> Tensor:
    return loss.fused(
        of.input, of.weight, of.target, **{"linear_bias": of.bias} | loss.parameters | options
    )


def plain(loss: Loss, of: Layer, **options: Any) -> Tensor:
    options.pop("chunk_bytes", None)
    logits = F.linear(of.input, of.weight, of.bias)
    return loss.plain(logits, of.target, **{"dim": -1} | loss.parameters | options)


def differentiate(value: Tensor, of: Layer) -> tuple[Tensor, ...]:
    """The value and all gradients, for outgoing gradients that differ from row to row."""
    leaves = [t for t in (of.input, of.weight, of.bias) if t is not None and t.requires_grad]
    outgoing = torch.arange(1.0, value.numel() + 1).reshape(value.shape).to(value)
    return value.detach(), *torch.autograd.grad(value, leaves, outgoing)


def in_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Make chunks of so many rows."""
    monkeypatch.setattr(_linear_function, "chunk_rows", lambda *_: rows)
