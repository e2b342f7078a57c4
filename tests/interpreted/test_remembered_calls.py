"""Calls whose checks were made before: the same results, and the same errors for other calls."""

import pytest
import torch

import topklass
from topklass import dispatch
from topklass.functional import noised_topk_loss, smooth_topk_loss


@pytest.fixture(autouse=True)
def kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "DEVICES", ("cpu",))
    monkeypatch.setattr(dispatch, "_served", set())


def losses(logits: torch.Tensor, target: torch.Tensor, **options: object) -> torch.Tensor:
    return smooth_topk_loss(logits, target, 3, 0.7, 0.5, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_same_results(reduction):
    logits, target = torch.randn(4, 9), torch.tensor([0, 5, 2, 8])
    with topklass.use_backend("reference"):
        expected_leaf = logits.clone().requires_grad_()
        expected = losses(expected_leaf, target, ignore_index=5, reduction=reduction)
        expected.sum().backward()
    for served in (0, 1, 1):
        assert len(dispatch._served) == served
        leaf = logits.clone().requires_grad_()
        value = losses(leaf, target, ignore_index=5, reduction=reduction)
        value.sum().backward()
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(leaf.grad, expected_leaf.grad, rtol=1e-5, atol=1e-6)


def test_modules_share_what_is_remembered():
    logits, target = torch.randn(4, 9), torch.arange(4)
    first = topklass.SmoothTopKLoss(k=3)(logits, target)
    assert torch.equal(topklass.SmoothTopKLoss(k=3)(logits, target), first)
    assert len(dispatch._served) == 1
    topklass.SmoothTopKLoss(k=2)(logits, target)
    assert len(dispatch._served) == 2


def exact(logits: torch.Tensor, target: torch.Tensor, **options: object) -> torch.Tensor:
    return noised_topk_loss(logits, target, 3, samples=None, margin=2.0, **options)


@pytest.mark.parametrize("loss", [losses, exact])
def test_second_derivatives_of_a_remembered_call(loss):
    logits, target = torch.randn(2, 7), torch.tensor([1, 2])
    loss(logits, target)
    assert len(dispatch._served) == 1
    results = []
    for backend in ("auto", "reference"):
        leaf = logits.clone().requires_grad_()
        with topklass.use_backend(backend):
            (gradient,) = torch.autograd.grad(loss(leaf, target), leaf, create_graph=True)
            results.append(torch.autograd.grad(gradient.square().sum(), leaf)[0])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-7 if loss is losses else 1e-5)
    assert results[0].any()


@pytest.mark.parametrize("loss", [losses, exact])
def test_graphs_of_a_remembered_call_in_half_precision(loss):
    """A scaled loss, as mixed precision has it, whose gradient is differentiable."""
    logits, target = torch.randn(4, 9).half(), torch.arange(4)
    gradients = []
    for _ in range(2):
        leaf = logits.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(leaf, target)
        (gradient,) = torch.autograd.grad(value * 2.0**17, leaf, create_graph=True)
        gradients.append(gradient.detach())
    assert torch.isfinite(gradients[0]).all()
    torch.testing.assert_close(*gradients)


def test_transformations_of_a_remembered_call():
    logits, target = torch.randn(2, 7), torch.tensor([1, 2])
    leaf = logits.clone().requires_grad_()
    losses(leaf, target).backward()
    again = torch.func.grad(lambda s: losses(s, target))(logits)
    torch.testing.assert_close(again, leaf.grad, rtol=1e-5, atol=1e-7)


def test_other_calls_are_checked():
    logits, target = torch.randn(4, 9), torch.arange(4)
    losses(logits, target)
    with pytest.raises(ValueError, match="shape"):
        losses(logits, target[:3])
    with pytest.raises(ValueError, match="tau"):
        smooth_topk_loss(logits, target, 3, -0.7, 0.5)
    with pytest.raises(TypeError, match="unknown option"):
        losses(logits, target, colour="red")
    with pytest.raises(ValueError, match="reduction"):
        losses(logits, target, reduction="max")
    with pytest.raises(TypeError, match="target"):
        losses(logits, [0, 1, 2, 3])


@pytest.mark.parametrize("change", ["weight", "probabilities", "label_smoothing", "strided"])
def test_what_is_not_remembered(change):
    logits, target, options = torch.randn(4, 9), torch.arange(4), {}
    losses(logits, target)
    if change == "weight":
        options["weight"] = torch.rand(9) + 0.5
    elif change == "probabilities":
        target = torch.rand(4, 9)
    elif change == "label_smoothing":
        options["label_smoothing"] = 0.1
    else:
        target = torch.arange(8)[::2]
    value = losses(logits, target, **options)
    assert len(dispatch._served) == 1
    with topklass.use_backend("reference"):
        expected = losses(logits, target, **options)
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_remembered(dtype, autocast):
    logits, target = torch.randn(4, 9), torch.arange(4)
    losses(logits, target)
    logits = logits.to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for _ in range(2):
            value = losses(logits, target)
            assert value.dtype == (torch.float32 if autocast else dtype)
            assert len(dispatch._served) == 2
        with topklass.use_backend("reference"):
            expected = losses(logits, target)
    torch.testing.assert_close(value, expected)


@pytest.mark.parametrize(("k", "tau"), [(3.0, 0.7), (True, 0.7), (3, True)])
def test_equal_numbers_of_other_types_are_checked(k, tau):
    logits, target = torch.randn(4, 9), torch.arange(4)
    smooth_topk_loss(logits, target, 3, 0.7)
    smooth_topk_loss(logits, target, 1, 0.7)
    smooth_topk_loss(logits, target, 3, 1.0)
    with pytest.raises(TypeError, match="must be"):
        smooth_topk_loss(logits, target, k, tau)


def test_noised_loss_is_remembered_with_its_generator():
    logits, target = torch.randn(4, 9), torch.arange(4)
    generator = torch.Generator()
    values = []
    for _ in range(3):
        generator.manual_seed(3)
        values.append(noised_topk_loss(logits, target, 3, generator=generator))
    assert len(dispatch._served) == 1
    assert values[0] == values[1] == values[2]
    assert noised_topk_loss(logits, target, 3, generator=generator) != values[0]


def test_memory_of_calls_is_bounded(monkeypatch):
    monkeypatch.setattr(dispatch, "MOST_SERVED", 3)
    for rows in range(1, 9):
        losses(torch.randn(rows, 9), torch.zeros(rows, dtype=torch.long))
        assert len(dispatch._served) <= 3
