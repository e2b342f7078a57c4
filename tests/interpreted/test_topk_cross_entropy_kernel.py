"""Kernels serve the top-k cross-entropy, of one length and of several."""

from typing import Any

import pytest
import torch
from torch import Tensor

import topklass
from topklass.functional import topk_cross_entropy

every_k = pytest.mark.parametrize("k", [1, 3, {1: 0.5, 3: 0.25, 5: 0.25}], ids=str)


def run(backend: str, logits: Tensor, target: Tensor, k, **options) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    with topklass.use_backend(backend):
        value = topk_cross_entropy(leaf, target, k, **options)
        value.backward(torch.arange(1.0, value.numel() + 1).reshape(value.shape).to(value))
    return value.detach(), leaf.grad


@every_k
@pytest.mark.parametrize(
    ("reduction", "weighted"), [("mean", False), ("sum", True), ("none", True)]
)
def test_kernel_is_reference(k, reduction, weighted):
    logits, target = 3 * torch.randn(5, 33), torch.tensor([0, 7, -100, 32, 2])
    logits[3, 5:30] = -torch.inf
    options = {"reduction": reduction, "weight": torch.rand(33) if weighted else None}
    actual = run("kernel", logits, target, k, **options)
    torch.testing.assert_close(actual, run("reference", logits, target, k, **options))


@every_k
def test_targets_of_a_few_classes(k):
    logits = 3 * torch.randn(5, 33)
    logits[1, 5] = torch.nan
    indices = torch.randint(33, (5, 3))
    indices[0, 0] = -100
    target = topklass.SparseTarget(indices, torch.rand(5, 3))
    options = {"reduction": "none", "weight": torch.rand(33)}
    actual = run("kernel", logits, target, k, **options)
    expected = run("reference", logits, target, k, **options)
    assert expected[0].isnan().sum() == 1
    torch.testing.assert_close(actual, expected, equal_nan=True)
    with pytest.raises(RuntimeError, match="no kernel for a SparseTarget with label smoothing"):
        run("kernel", logits, target, k, label_smoothing=0.1)


@pytest.mark.slow
@every_k
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(k, dtype):
    logits, target = torch.randn(4, 33).to(dtype), torch.arange(4)
    value, gradient = run("kernel", logits, target, k)
    expected, expected_gradient = run("reference", logits, target, k)
    assert value.dtype == gradient.dtype == dtype
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient, expected_gradient)


@every_k
def test_other_shapes(k):
    logits, target = torch.randn(2, 9, 3), torch.randint(9, (2, 3))
    actual = run("kernel", logits, target, k, reduction="none")
    assert actual[0].shape == (2, 3)
    torch.testing.assert_close(actual, run("reference", logits, target, k, reduction="none"))


@pytest.mark.parametrize(("k", "served"), [(3, [3]), ({5: 1.0, 2: 1.0}, [5, 2])], ids=str)
def test_each_length_by_a_kernel(k, served, monkeypatch):
    lengths = []

    def recorded(scores: Tensor, labels: Tensor, loss: Any, *_: object) -> tuple[Tensor, tuple[()]]:
        lengths.append(loss.k)
        assert (loss.tau, loss.margin) == (1 / loss.k, 0.0)
        return scores.sum(1), ()

    monkeypatch.setattr("topklass.kernels.smooth.forward", recorded)
    with topklass.use_backend("kernel"):
        topk_cross_entropy(torch.randn(4, 9), torch.arange(4), k, reduction="none")
    assert lengths == served


@every_k
def test_second_derivatives(k):
    logits, target = torch.randn(2, 9), torch.tensor([1, 2])
    results = []
    for backend in ("kernel", "reference"):
        leaf = logits.clone().requires_grad_()
        with topklass.use_backend(backend):
            value = topk_cross_entropy(leaf, target, k)
        (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), leaf)[0])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


def test_absent_label_of_a_mixture():
    logits, target = torch.randn(2, 9), torch.tensor([1, 2])
    logits[0, 1] = -torch.inf
    value, gradient = run("kernel", logits, target, {1: 1.0, 3: 1.0}, reduction="none")
    assert value[0] == torch.inf
    assert gradient.isfinite().all()


def test_what_kernels_refuse():
    logits, target = torch.randn(2, 1030), torch.tensor([1, 2])
    mixture = {1: 1.0, 1025: 1.0}
    with (
        topklass.use_backend("kernel"),
        pytest.raises(RuntimeError, match="k = 1025, only up to 1024"),
    ):
        topk_cross_entropy(logits, target, mixture)
