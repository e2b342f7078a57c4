"""Cases that once went wrong, and the code of the pages."""

from concurrent.futures import ThreadPoolExecutor
from math import inf

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

import topklass
from losses_table import LOSSES, problem
from topklass.functional import focal_loss, smooth_topk_loss

every_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)


@pytest.mark.parametrize(("k", "extra"), [(1, 1), (1, 256), (2, 255), (5, 1), (5, 16)])
def test_absent_heads_in_the_padding_of_long_rows(k, extra):
    n = 512 * k + extra
    for present in range(k + 2):
        scores = torch.full((3, n), -inf)
        scores[:, : present + 1] = torch.randn(3, present + 1)
        scores.requires_grad_()
        loss = smooth_topk_loss(scores, torch.zeros(3, dtype=torch.long), k, reduction="none")
        loss.sum().backward()
        few = scores.detach()[:, : present + 1].requires_grad_()
        if present < k:
            assert torch.equal(loss, torch.zeros(3))
            assert torch.equal(scores.grad, torch.zeros(3, n))
        else:
            expected = smooth_topk_loss(few, torch.zeros(3, dtype=torch.long), k, reduction="none")
            expected.sum().backward()
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(scores.grad[:, : present + 1], few.grad)


@pytest.mark.parametrize(
    ("k", "dtype"), [(3, torch.float32), (20, torch.float64), (300, torch.float32)]
)
def test_absent_label_with_too_few_rivals(k, dtype):
    """Its loss is infinite, and the gradient is the label's alone, by every algorithm."""
    scores, target = torch.full((2, 400), -inf, dtype=dtype), torch.tensor([1, 2])
    scores[1, 399] = 0.0

    def loss(scores: torch.Tensor) -> torch.Tensor:
        return smooth_topk_loss(scores, target, k, reduction="sum")

    leaf = scores.clone().requires_grad_()
    value = loss(leaf)
    assert value == inf
    expected = F.one_hot(target, 400).to(scores.dtype) / -k
    torch.testing.assert_close(*torch.autograd.grad(value, leaf), expected)
    torch.testing.assert_close(torch.func.grad(loss)(scores), expected)


def test_masks_of_half_precision_are_present():
    """The lowest number of float16 is a score like others."""
    scores = torch.full((1, 8), torch.finfo(torch.float16).min, dtype=torch.float16)
    scores[0, 0] = 1.0
    gradients = []
    for each in (scores, scores.double()):
        leaf = each.requires_grad_()
        loss = smooth_topk_loss(leaf, torch.tensor([5]), 2)
        gradients.append(torch.autograd.grad(loss, leaf)[0].double())
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=0)


def test_gradient_of_probabilities_and_weights_that_are_0():
    scores, labels = problem((3, 4))
    target = F.one_hot(labels, 4).double().requires_grad_()
    weight = torch.tensor([1.0, 0.0, 2.0, 1.0], dtype=torch.float64, requires_grad=True)
    inputs = (target, weight)
    ours = focal_loss(scores, target, gamma=0.0, weight=weight)
    cross_entropy = F.cross_entropy(scores, target, weight)
    for a, b in zip(
        torch.autograd.grad(ours, inputs), torch.autograd.grad(cross_entropy, inputs), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", ["indices", "probabilities"])
@pytest.mark.parametrize("loss", [x for x in LOSSES if x.takes_margin], ids=lambda x: x.name)
@pytest.mark.parametrize("shape", [(), (6,)])
def test_margin_that_is_learnt(loss, kind, shape):
    margin = torch.nn.Parameter(torch.full(shape, 0.5, dtype=torch.float64))
    module = loss.module(**(loss.arguments() | {"margin": margin}))
    assert list(module.parameters()) == [margin]
    scores, target = problem((3, 6), kind)
    module(scores, target, **loss.fixed(scores.shape)).backward()
    assert margin.grad.abs().sum() > 0
    number = loss.module(**(loss.arguments() | {"margin": 0.5}))
    fixed = loss.fixed(scores.shape)
    torch.testing.assert_close(module(scores, target, **fixed), number(scores, target, **fixed))


@every_loss
@pytest.mark.parametrize("kind", ["indices", "probabilities"])
def test_fake_tensors(loss, kind):
    with FakeTensorMode():
        scores, target = problem((3, 6), kind)
        assert loss.function(scores, target, **loss.arguments(per_class=True)).shape == ()


def test_training_after_inference_mode_shares_no_inference_tensor():
    def in_a_new_thread():
        scores, target = torch.randn(4, 9), torch.tensor([0, 1, 2, 3])
        with torch.inference_mode():
            value = smooth_topk_loss(scores, target, 3, 1.0)
        with FakeTensorMode():
            smooth_topk_loss(torch.randn(9, 9), torch.arange(9), 3, 1.0)
        again = smooth_topk_loss(scores.requires_grad_(), target, 3, 1.0)
        again.backward()
        return value.item() == again.item() and bool(scores.grad.abs().sum() > 0)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(in_a_new_thread).result()


def test_noise_is_added_in_single_precision():
    scores = torch.full((200, 10), 8.0, dtype=torch.bfloat16)
    value = topklass.noised_topk(scores, 1, epsilon=0.3, samples=50)
    exact = topklass.noised_topk(scores.float(), 1, epsilon=0.3, samples=50)
    assert value.dtype == torch.bfloat16
    assert abs(value.float().mean() - exact.mean()) < 0.03  # the maximum of ten is 0.46 higher
    assert exact.mean() > 8.4
