"""Linear losses in chunks of classes, by the kernels that read states and write gradients."""

import pytest
import torch

from linear_cases import LOSSES, differentiate, fused, layer, plain
from topklass import use_backend
from topklass.functional import _linear_function


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
@pytest.mark.parametrize("step", [700, 130])
def test_class_chunks(loss, step, monkeypatch):
    """Rows of several pieces, each in several tiles; the gradient takes the logits' place."""
    monkeypatch.setattr(_linear_function, "fewer_bytes", lambda *_: True)
    of = layer(rows=5, classes=1500, dtype=torch.float32, bias=False)
    of.target[0] = 1499
    with use_backend("kernel"):
        found = fused(loss, of, chunk_bytes=step * 5 * 4, ignore_index=int(of.target[1]))
    with use_backend("reference"):
        wanted = plain(loss, of, ignore_index=int(of.target[1]))
    for given, value in zip(differentiate(found, of), differentiate(wanted, of), strict=True):
        torch.testing.assert_close(given, value, rtol=1e-5, atol=1e-6)


def test_a_target_that_is_no_class(monkeypatch):
    """NaN, as in other calls of kernels."""
    monkeypatch.setattr(_linear_function, "fewer_bytes", lambda *_: True)
    of = layer(rows=4, classes=50, dtype=torch.float32, bias=False)
    of.target[2] = 50
    with use_backend("kernel"):
        losses = fused(LOSSES["smooth"], of, chunk_bytes=4 * 4 * 20, reduction="none")
    assert losses.isnan().nonzero().tolist() == [[2]]
    (slope,) = torch.autograd.grad(losses.sum(), of.input)
    assert slope.isnan().all(1).nonzero().tolist() == [[2]]
