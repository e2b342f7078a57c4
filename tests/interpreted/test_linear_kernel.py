"""Kernels serve the linear losses, and write a chunk's gradient over its logits."""

from typing import Any

import pytest
import torch
from torch import Tensor

import topklass
from linear_cases import LOSSES, Loss, differentiate, fused, layer
from topklass.functional import _linear_function, linear_smooth_topk_loss
from topklass.functional._contract import RowLoss
from topklass.kernels import scaling, smooth

CASES = LOSSES | {"long list": LOSSES["smooth"]._replace(parameters={"k": 40})}


def run(loss: Loss, backend: str, dtype: torch.dtype, **options: Any) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    of = layer(rows=5, classes=45, dtype=dtype)
    of.target[1] = -100
    with topklass.use_backend(backend):
        return differentiate(fused(loss, of, **options), of)


@pytest.mark.parametrize("loss", CASES.values(), ids=CASES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_kernel_is_reference(loss, reduction, monkeypatch):
    monkeypatch.setattr(_linear_function, "chunk_rows", lambda *_: 2)
    options = {"reduction": reduction, "weight": torch.rand(45), "margin": torch.rand(45)}
    actual, expected = (
        run(loss, backend, torch.float32, **options) for backend in ("kernel", "reference")
    )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", [CASES["smooth"], CASES["mixture"]], ids=["smooth", "mixture"])
def test_half_precision(loss):
    actual, expected = (run(loss, b, torch.bfloat16) for b in ("kernel", "reference"))
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.01)


def test_gradient_takes_the_place_of_the_logits(monkeypatch):
    """So that a chunk needs no more memory than its logits."""
    seen = []
    original = RowLoss.losses_and_gradient

    def recorded(self: RowLoss, scores: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        losses, gradient = original(self, scores, *rest)
        seen.append((scores.data_ptr(), gradient.data_ptr()))
        return losses, gradient

    monkeypatch.setattr(RowLoss, "losses_and_gradient", recorded)
    run(CASES["smooth"], "kernel", torch.float32)
    run(CASES["long list"], "kernel", torch.float32)
    assert len(seen) == 2
    assert all(scores == gradient for scores, gradient in seen)


def test_no_gradient_without_need(monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(smooth, "backward", refuse)
    of = layer(dtype=torch.float32)
    with torch.no_grad(), topklass.use_backend("kernel"):
        assert linear_smooth_topk_loss(of.input, of.weight, of.target, 3) > 0


@pytest.mark.parametrize("factor", [1.0, 0.5, 0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_multiplication_by_the_outgoing_gradient(factor, dtype, monkeypatch):
    monkeypatch.setattr(scaling.launch, "PROGRAMS", 2)
    monkeypatch.setattr(scaling.launch, "BLOCK", 16)
    values = torch.randn(7, 11, dtype=dtype)
    expected = values * factor
    scaling.multiply(values, torch.tensor(factor, dtype=dtype))
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
