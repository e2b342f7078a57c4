"""What kernels cannot take goes to the reference, and what they should take they take."""

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

import topklass
from topklass import dispatch
from topklass.functional import noised_topk_loss, smooth_topk_loss


@pytest.fixture
def kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "DEVICES", ("cpu",))


@pytest.mark.usefixtures("kernels_on_the_cpu")
class TestByDefault:
    """Where kernels would be taken, as on a GPU."""

    def test_kernels_serve(self, monkeypatch):
        def fail(*_: object) -> None:
            raise AssertionError

        monkeypatch.setattr("topklass.kernels.smooth.smooth_loss", fail)
        with pytest.raises(AssertionError):
            smooth_topk_loss(torch.randn(2, 9), torch.arange(2), 3)

    def test_tensors_without_memory(self):
        with FakeTensorMode():
            value = smooth_topk_loss(torch.randn(2, 9), torch.arange(2), 3)
            assert value.shape == ()
            assert topklass.noised_topk(torch.randn(2, 9), 3).shape == (2,)

    @pytest.mark.filterwarnings("ignore")
    def test_trace(self):
        module = topklass.SmoothTopKLoss(k=3)
        logits, target = torch.randn(2, 9), torch.arange(2)
        traced = torch.jit.trace(module, (logits, target), check_trace=False)
        other = torch.randn(2, 9)
        torch.testing.assert_close(traced(other, target), module(other, target))

    @pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
    def test_forward_mode_by_the_margin(self):
        def loss(margin: torch.Tensor) -> torch.Tensor:
            return smooth_topk_loss(logits, torch.arange(2), 3, margin=margin)

        logits, margin = torch.randn(2, 9), torch.rand(9)
        _, tangent = torch.func.jvp(loss, (margin,), (torch.ones(9),))
        leaf = margin.clone().requires_grad_()
        (expected,) = torch.autograd.grad(loss(leaf), leaf)
        torch.testing.assert_close(tangent, expected.sum(), rtol=1e-5, atol=1e-6)

    def test_tensors_elsewhere(self):
        logits, meta = torch.randn(2, 9), {"device": "meta"}
        target = torch.arange(2)
        with pytest.raises(RuntimeError, match="target is on meta and the input on cpu"):
            smooth_topk_loss(logits, torch.zeros(2, dtype=torch.long, **meta), 3)
        with pytest.raises(RuntimeError, match="weight is on meta"):
            smooth_topk_loss(logits, target, 3, weight=torch.ones(9, **meta))
        with pytest.raises(RuntimeError, match="margin is on meta"):
            noised_topk_loss(logits, target, 3, margin=torch.ones(9, **meta))


def test_numbers_of_numpy():
    logits, target = torch.randn(2, 9), torch.tensor([1, 2])
    with topklass.use_backend("kernel"):
        plain = smooth_topk_loss(logits, target, 3, 0.5, 0.25, ignore_index=1)
        options = {"ignore_index": np.int64(1)}
        value = smooth_topk_loss(
            logits, target, np.int64(3), np.float32(0.5), np.float32(0.25), **options
        )
        assert value == plain
        k, samples = np.int32(2), np.int64(3)
        noised_topk_loss(logits, target, k, np.float32(0.1), samples, np.float64(1), **options)
        topklass.noised_topk(logits, k, np.float32(0.1), samples)
        assert torch.equal(topklass.log_esp(logits, k), topklass.log_esp(logits, 2))
        assert torch.equal(topklass.topk_marginals(logits, k), topklass.topk_marginals(logits, 2))


def test_margin_without_dimensions():
    logits, target = torch.randn(2, 9), torch.arange(2)
    with topklass.use_backend("kernel"):
        for loss in (smooth_topk_loss, noised_topk_loss):
            first, second = (
                loss(logits, target, 3, margin=margin, **noise(loss))
                for margin in (0.5, torch.tensor(0.5, dtype=torch.float64))
            )
            torch.testing.assert_close(first, second)


def noise(loss: object) -> dict[str, object]:
    seeded = {"generator": torch.Generator().manual_seed(0)}
    return seeded if loss is noised_topk_loss else {}


@pytest.mark.parametrize(
    ("rows", "columns"), [((2,), dispatch.MOST_COLUMNS + 1), ((50_000, 50_000), 2)]
)
def test_too_large(rows, columns):
    shape = torch.empty(1).expand(*rows, columns)
    assert "up to" in dispatch._obstacle(shape, 1, dispatch.LARGEST_K)
