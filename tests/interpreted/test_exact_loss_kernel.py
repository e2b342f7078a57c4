"""The noised loss without samples: one kernel for rival, hinge and mean, against the reference."""

from math import inf, nan

import pytest
import torch
from smooth_cases import slow
from torch import Tensor

import topklass
from topklass.functional import noised_topk_loss
from topklass.kernels.expected import launch as expected

K, N = 3, 12


def value_and_gradient(backend: str, logits: Tensor, target: Tensor, k: int = K, **options):
    leaf = logits.clone().requires_grad_()
    with topklass.use_backend(backend):
        loss = noised_topk_loss(leaf, target, k, samples=None, **options)
        loss.backward(outgoing(loss))
    return loss.detach(), leaf.grad


def outgoing(loss: Tensor) -> Tensor:
    """Another number for each loss."""
    return torch.linspace(0.5, 2.0, loss.numel()).reshape(loss.shape).to(loss.dtype)


def check(logits: Tensor, target: Tensor, k: int = K, **options) -> tuple[Tensor, Tensor]:
    ours = value_and_gradient("kernel", logits, target, k, **options)
    plain = value_and_gradient("reference", logits, target, k, **options)
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=5e-6, equal_nan=True)
    return ours


def some_logits(rows: int = 5) -> Tensor:
    logits = torch.randn(rows, N, generator=torch.Generator().manual_seed(1))
    logits[1, 3] = logits[1].topk(K + 1).values[-1] + 0.01
    logits[-1, 4] = 20.0
    return logits


TARGET = torch.tensor([0, 3, -100, 11, 4])
"""The second is just among the largest. One is ignored; the last is far above, without a loss."""


@pytest.mark.parametrize(
    ("reduction", "weighted", "per_class"),
    [("mean", True, False), ("sum", False, True), ("none", True, True)],
)
def test_options(reduction, weighted, per_class):
    source = torch.Generator().manual_seed(0)
    loss, gradient = check(
        some_logits(),
        TARGET,
        weight=torch.rand(N, generator=source) if weighted else None,
        margin=torch.rand(N, generator=source) if per_class else 0.7,
        scale=2.0,
        reduction=reduction,
        epsilon=0.5,
    )
    assert loss.isfinite().all()
    assert not gradient[[2, 4]].any()
    assert gradient[:2].any(1).all()


@pytest.mark.parametrize("k", [1, slow(6), slow(N - 1)])
def test_lengths(k):
    check(some_logits(), TARGET, k, epsilon=1.0)


@pytest.mark.slow
def test_programs_take_several_rows(monkeypatch):
    logits, target = torch.randn(7, N), torch.tensor([0, 1, -100, 3, 4, 5, 6])
    whole = value_and_gradient("kernel", logits, target)
    monkeypatch.setattr(expected, "MOST_PROGRAMS", 2)
    value, gradient = value_and_gradient("kernel", logits, target)
    torch.testing.assert_close(value, whole[0])
    assert torch.equal(gradient, whole[1])


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_chunks_of_rows(reduction, monkeypatch):
    """Three, the last of one row; losses and weights of all are added up."""
    logits, target = torch.randn(33, 3), torch.arange(33) % 3
    target[20] = -100
    options = {"reduction": reduction, "weight": torch.rand(3)}
    whole = value_and_gradient("kernel", logits, target, 1, **options)
    monkeypatch.setattr(expected, "MOST_BYTES", 1)
    for _ in range(2):  # nothing is left of earlier calls
        value, gradient = value_and_gradient("kernel", logits, target, 1, **options)
        torch.testing.assert_close(value, whole[0], rtol=1e-7, atol=0)
        assert torch.equal(gradient, whole[1])


def test_absent_classes_and_labels():
    logits = some_logits(4)
    logits[0, 5:] = -inf  # the label among those that are there
    logits[1, 3] = -inf  # an absent label
    logits[2, 2:] = -inf  # no rival
    logits[3, 2:] = -inf  # neither
    loss, gradient = check(logits, torch.tensor([0, 3, 1, 7]), reduction="none")
    assert loss[1:].tolist() == [inf, 0, inf]
    assert not gradient[2:].any()


def test_nan_spoils_its_row_only():
    """Its loss and its whole gradient, also where the class has weight 0; ignored it has none."""
    logits = some_logits(6)
    logits[1, 7] = nan
    logits[2, 7], logits[2, 5] = nan, -inf  # an absent label
    logits[3, 1] = nan  # the label
    logits[4, 0] = nan
    target, weight = torch.tensor([0, 3, 5, 1, -100, 5]), torch.ones(N)
    weight[3] = 0
    spoilt = torch.tensor([False, True, True, True, False, False])
    loss, gradient = value_and_gradient("kernel", logits, target, reduction="none", weight=weight)
    plain, plain_gradient = value_and_gradient(
        "reference", logits, target, reduction="none", weight=weight
    )
    assert torch.equal(loss.isnan(), spoilt)
    torch.testing.assert_close(loss, plain, equal_nan=True)
    assert gradient[spoilt].isnan().all()
    assert not gradient[4].any()
    torch.testing.assert_close(gradient[::5], plain_gradient[::5], rtol=1e-5, atol=5e-6)


@pytest.mark.slow
def test_nothing_counts():
    """The mean over nothing is NaN, and has no gradient."""
    loss, gradient = value_and_gradient("kernel", torch.randn(2, N), torch.tensor([-100, -100]))
    assert loss.isnan()
    assert not gradient.any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    logits = some_logits().to(dtype)
    wide, wide_gradient = value_and_gradient("kernel", logits.float(), TARGET)
    value, gradient = value_and_gradient("kernel", logits, TARGET)
    assert value.dtype == gradient.dtype == dtype
    torch.testing.assert_close(value, wide.to(dtype))
    torch.testing.assert_close(gradient, wide_gradient.to(dtype))


@pytest.mark.slow
def test_images():
    """Labels for each pixel; logits that do not lie in one piece."""
    check(torch.randn(2, N, 3), torch.randint(N, (2, 3)), reduction="none")
    check(torch.randn(N, 4).T, torch.tensor([1, 2, 3, 4]))


def test_launches(monkeypatch):
    """Two forward and one backward; without a gradient, only the value."""
    launched, real = [], expected.launch

    def launch(kernel, *rest):
        launched.append((kernel, getattr(rest[-1], "differentiate", None)))
        real(kernel, *rest)

    monkeypatch.setattr(expected, "launch", launch)
    value, _ = value_and_gradient("kernel", some_logits(), TARGET)
    first = (expected.heads_kernel, None)
    assert launched[:2] == [first, (expected.integral_kernel, True)]
    assert launched[2:] == [(expected.gradient_kernel, None)]
    with topklass.use_backend("kernel"), torch.no_grad():
        leaf = some_logits().requires_grad_()
        assert noised_topk_loss(leaf, TARGET, K, samples=None) == value
    assert launched[3:] == [first, (expected.integral_kernel, False)]


@pytest.mark.slow
def test_second_derivatives_and_batches_of_gradients():
    logits, target = some_logits(3), torch.tensor([0, 1, 2])
    second, batched = [], []
    for backend in ("kernel", "reference"):
        leaf = logits.clone().requires_grad_()
        with topklass.use_backend(backend):
            losses = noised_topk_loss(leaf, target, K, samples=None, reduction="none")
        options = {"is_grads_batched": True, "retain_graph": True}
        batched += torch.autograd.grad(losses, leaf, torch.eye(3), **options)
        (first,) = torch.autograd.grad(losses.sum(), leaf, create_graph=True)
        second += torch.autograd.grad((first**2).sum(), leaf)
    torch.testing.assert_close(*second, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*batched, rtol=1e-4, atol=1e-5)
    assert second[0].abs().max() > 0.01


def test_no_kernel():
    """Without noise there is nothing to integrate; other obstacles are those of all losses."""
    logits, target = some_logits(), TARGET.clamp(min=0)
    check(logits, target, epsilon=0.0)
    with topklass.use_backend("kernel"):
        with pytest.raises(RuntimeError, match="class probabilities"):
            noised_topk_loss(logits, torch.full((5, N), 1 / N), K, samples=None)
        with pytest.raises(RuntimeError, match="k = 64, only up to 63"):
            noised_topk_loss(torch.randn(1, 70), torch.tensor([0]), 64, samples=None)
        with pytest.raises(ValueError, match="epsilon must be from 1e-30"):
            noised_topk_loss(logits, target, K, 1e-31, samples=None)
