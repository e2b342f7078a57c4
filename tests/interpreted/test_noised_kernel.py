"""The kernels of the noised top-k and its loss: their noise, and without it the reference."""

import math
from itertools import product

import pytest
import torch
from smooth_cases import slow
from torch import Tensor

import topklass
from topklass.functional import calibrated_topk_hinge_loss, noised_topk_loss
from topklass.kernels.noised import launch
from topklass.kernels.noised import loss as kernels


def value_and_gradient(function, scores: Tensor) -> tuple[Tensor, Tensor]:
    """By the kernel, which leaves the scores as they are."""
    leaf, before = scores.detach().requires_grad_(), scores.clone()
    with topklass.use_backend("kernel"):
        value = function(leaf)
        (gradient,) = torch.autograd.grad(value, leaf, torch.ones_like(value))
    torch.testing.assert_close(scores, before, rtol=0, atol=0, equal_nan=True)
    return value.detach(), gradient


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [
        (1, 7, 1),
        (5, 40, 6),
        *(slow(*case) for case in product([1], [7], [5, 6])),
        *(slow(*case) for case in product([5, 3], [40, 1030], [1, 6])),
        slow(2, 70, 64),
        slow(1, 1030, 33),
    ],
)
def test_without_noise(rows, n, k):
    """The k-th largest, and the whole gradient on it."""
    scores = torch.randn(rows, n)
    value, gradient = value_and_gradient(
        lambda s: topklass.noised_topk(s, k, epsilon=0.0, samples=3), scores
    )
    top = scores.topk(k)
    torch.testing.assert_close(value, top.values[:, -1])
    torch.testing.assert_close(gradient.argmax(1), top.indices[:, -1])
    torch.testing.assert_close(gradient.max(1).values, torch.ones(rows))
    assert (gradient != 0).sum() == rows


@pytest.mark.parametrize("samples", [1, slow(5), 10])
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(1, 7, 7), (3, 40, 5), slow(2, 1030, 11), slow(2, 70, 64)]
)
def test_gradient_counts_samples(rows, n, k, samples):
    value, gradient = value_and_gradient(
        lambda s: topklass.noised_topk(s, k, 1.0, samples), torch.randn(rows, n)
    )
    counts = gradient * samples
    assert value.isfinite().all()
    assert (counts >= 0).all()
    torch.testing.assert_close(counts, counts.round(), rtol=0, atol=1e-5)
    assert torch.equal(counts.round().sum(1), torch.full((rows,), float(samples)))


def test_noise_is_that_of_the_seed():
    scores = torch.randn(3, 40)

    def draw(seed: int) -> tuple[Tensor, Tensor]:
        return value_and_gradient(
            lambda s: topklass.noised_topk(s, 5, generator=generator(seed)), scores
        )

    for a, b, c in zip(draw(1), draw(1), draw(2), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    first, second = (
        value_and_gradient(lambda s: topklass.noised_topk(s, 5), scores)[0] for _ in "ab"
    )
    assert not torch.equal(first, second)


def test_noise_is_normal():
    """Of one class, the value is its mean noise: independent in rows and samples."""
    for samples in (1, 16):
        value, _ = value_and_gradient(
            lambda s, b=samples: math.sqrt(b) * topklass.noised_topk(s, 1, 1.0, b),
            torch.zeros(20, 1),
        )
        assert abs(value.mean()) < 5 / math.sqrt(20)
        assert abs(value.std() - 1) < 5 / math.sqrt(40)
        assert len(value.unique()) == 20


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k"), [(30, 4), (40, 34)])
def test_mean_is_that_of_the_reference(n, k):
    scores = torch.linspace(-2, 2, n).expand(60, n)
    ours, shares = value_and_gradient(lambda s: topklass.noised_topk(s, k, 1.0, 16), scores)
    leaf = scores.clone().requires_grad_()
    expected = topklass.noised_topk(leaf, k, 1.0, 16)
    expected.sum().backward()
    error = ((ours.var() + expected.var()) / 60).sqrt()
    assert (ours.mean() - expected.mean()).abs() < 5 * error
    errors = ((shares.var(0) + leaf.grad.var(0)) / 60).sqrt()
    assert ((shares.mean(0) - leaf.grad.mean(0)).abs() <= 5 * errors + 1e-6).all()


@pytest.mark.parametrize(
    ("scores", "k", "epsilon", "rows", "enough"),
    [
        (torch.zeros(40), 2, 0.5, 12, 8),
        slow(torch.zeros(300), 2, 0.5, 30, 8),
        slow(torch.linspace(-2, 2, 48), 3, 1.0, 60, 10),
        slow(torch.zeros(100), 2, 0.5, 40, 2),
        slow(torch.linspace(0, 30, 48), 5, 2.0, 40, 13),
        slow(torch.linspace(-2, 2, 48), 20, 0.7, 20, 35),
    ],
)
def test_law_where_many_classes_are_near(monkeypatch, scores, k, epsilon, rows, enough):
    """Means and shares are the exact expectation and its gradient, for any threshold."""
    monkeypatch.setattr(kernels, "MANY", 20)
    monkeypatch.setattr(launch, "enough", lambda k: enough)
    samples, n = 8, len(scores)
    both = torch.cat([scores, torch.full((9,), -math.inf)]).expand(rows, -1)
    value, shares = value_and_gradient(
        lambda s: topklass.noised_topk(s, k, epsilon, samples, generator=generator(2)), both
    )
    leaf = scores.double().requires_grad_()
    mean = topklass.expected_topk(leaf, k, epsilon)
    mean.backward()
    assert abs(value.mean() - mean) < 4 * value.std() / math.sqrt(rows)
    counts, expected = samples * shares.sum(0), samples * rows * leaf.grad
    assert (counts[n:] == 0).all()
    deviation = (counts[:n] - expected).square() / (expected + 1e-3)
    freedom = int((expected > 0.1).sum())
    assert deviation[expected > 0.1].sum() < freedom + 4 * math.sqrt(2 * freedom) + 4
    assert abs(counts.sum() - samples * rows) < 1e-3
    assert 0.5 < value.var() / one_sample_variance(scores, k, epsilon) * samples < 2


def one_sample_variance(scores: Tensor, k: int, epsilon: float) -> Tensor:
    """Of the k-th largest noised score, from noise for all classes."""
    noise = torch.randn(20_000, len(scores), generator=generator(0))
    return (scores + epsilon * noise).topk(k).values[:, -1].var()


@pytest.mark.parametrize(
    ("reduction", "per_class", "n"),
    [
        ("mean", False, 9),
        ("mean", True, 9),
        ("sum", False, 9),
        ("none", True, 9),
        slow("mean", True, 1030),
        slow("none", False, 1030),
    ],
)
def test_loss_without_noise(reduction, per_class, n):
    scores, target = torch.randn(5, n), torch.randint(n, (5,))
    target[1] = -100
    weight = torch.rand(n) if per_class else None
    margin = torch.rand(n) if per_class else 0.5
    options = {"weight": weight, "margin": margin, "reduction": reduction}
    loss, gradient = value_and_gradient(
        lambda s: noised_topk_loss(s, target, 5, 0.0, 3, scale=2.0, **options), scores
    )
    leaf = scores.clone().requires_grad_()
    expected = 2 * calibrated_topk_hinge_loss(leaf, target, 5, **options)
    expected.sum().backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, leaf.grad)


def test_gradient_of_the_loss():
    scores, target = torch.randn(4, 40), torch.tensor([3, 39, -100, 0])
    _, gradient = value_and_gradient(
        lambda s: noised_topk_loss(s, target, 5, 1.0, margin=100.0, reduction="none"), scores
    )
    torch.testing.assert_close(gradient.sum(1), torch.zeros(4), rtol=0, atol=1e-6)
    assert torch.equal(gradient[2], torch.zeros(40))
    for row in (0, 1, 3):
        assert gradient[row, target[row]] < 0
        assert (gradient[row] >= 0).sum() == 39


@pytest.mark.parametrize("n", [9, slow(1030)])
def test_nan_absent_and_ignored(n):
    scores, target = torch.randn(5, n), torch.tensor([0, 1, -100, 2, 3])
    scores[1, n - 1] = math.nan
    scores[2, 3] = math.nan
    scores[3, 2] = -math.inf  # an absent label
    scores[4, torch.arange(n) % 3 > 0] = -math.inf
    loss, gradient = value_and_gradient(
        lambda s: noised_topk_loss(s, target, 2, reduction="none"), scores
    )
    assert loss[0].isfinite()
    assert gradient[0].isfinite().all()
    assert loss[1].isnan()
    assert gradient[1].isnan().all()
    assert loss[2] == 0
    assert torch.equal(gradient[2], torch.zeros(n))
    assert loss[3] == math.inf
    scores[3, n - 1] = math.nan  # besides an absent label
    spoilt, spoilt_gradient = value_and_gradient(
        lambda s: noised_topk_loss(s, target, 2, reduction="none"), scores
    )
    assert spoilt[3].isnan()
    assert spoilt_gradient[3].isnan().all()
    assert (gradient[4, scores[4] == -math.inf] <= 0).all()


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_nan_of_one_row(reduction):
    """The gradients of all others are as before, also where the class of that row has weight 0."""
    scores, target, weight = torch.randn(9, 300), torch.arange(9), torch.ones(300)
    weight[8] = 0
    options = {"k": 2, "epsilon": 0.0, "reduction": reduction, "weight": weight}
    _, before = value_and_gradient(lambda s: noised_topk_loss(s, target, **options), scores)
    scores[8, 299] = math.nan
    loss, gradient = value_and_gradient(lambda s: noised_topk_loss(s, target, **options), scores)
    assert loss.isnan()
    assert gradient[8].isnan().all()
    torch.testing.assert_close(gradient[:8], before[:8])


def test_nan_of_the_operator():
    scores = torch.randn(3, 9)
    scores[1, 4] = math.nan
    value, gradient = value_and_gradient(lambda s: topklass.noised_topk(s, 2), scores)
    assert value.isnan().tolist() == [False, True, False]
    assert gradient.isnan().all(1).tolist() == [False, True, False]
    torch.testing.assert_close(gradient[::2].sum(1), torch.ones(2))


def test_fewer_than_k_present():
    """The k-th largest is an absent class: no loss."""
    scores = torch.full((1, 9), -math.inf)
    scores[0, :2] = 1.0
    loss, gradient = value_and_gradient(lambda s: noised_topk_loss(s, torch.tensor([0]), 3), scores)
    assert loss == 0
    assert torch.equal(gradient, torch.zeros(1, 9))
    value, _ = value_and_gradient(lambda s: topklass.noised_topk(s, 3), scores)
    assert value == -math.inf
    loss, gradient = value_and_gradient(lambda s: noised_topk_loss(s, torch.tensor([8]), 3), scores)
    assert loss == math.inf  # the label is absent, too
    assert torch.equal(gradient, torch.zeros(1, 9))


def test_all_targets_ignored():
    target = torch.full((3,), -100)
    loss, gradient = value_and_gradient(lambda s: noised_topk_loss(s, target), torch.randn(3, 9))
    assert loss.isnan()
    assert torch.equal(gradient, torch.zeros(3, 9))


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16)])
def test_half_precision(dtype):
    scores, target = torch.randn(3, 40).to(dtype), torch.tensor([1, 2, 3])
    loss, gradient = value_and_gradient(
        lambda s: noised_topk_loss(s, target, generator=generator(1)), scores
    )
    single, single_gradient = value_and_gradient(
        lambda s: noised_topk_loss(s, target, generator=generator(1)), scores.float()
    )
    assert torch.equal(loss, single.to(dtype))
    torch.testing.assert_close(gradient, single_gradient.to(dtype))


@pytest.mark.parametrize("shape", [(9,), (2, 9, 3), slow((2, 9, 3, 2))])
def test_shapes(shape):
    scores = torch.randn(shape)
    target = torch.randint(9, shape[:1] * (len(shape) > 1) + shape[2:])
    loss, gradient = value_and_gradient(
        lambda s: noised_topk_loss(s, target, 2, 0.0, reduction="none"), scores
    )
    leaf = scores.clone().requires_grad_()
    expected = calibrated_topk_hinge_loss(leaf, target, 2, reduction="none")
    expected.sum().backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, leaf.grad)
    assert topklass.noised_topk(scores.movedim(min(1, len(shape) - 1), -1), 2).shape == loss.shape


def test_layouts():
    scores, target = torch.randn(3, 9), torch.tensor([1, 2, 3, 4, 5, 6])[::2]
    strided, contiguous = (
        value_and_gradient(lambda s, t=t: noised_topk_loss(s, t, 2, 0.0, margin=9.0), scores)[1]
        for t in (target, target.contiguous())
    )
    assert torch.equal(strided, contiguous)
    for scores in (torch.randn(9, 3).T, torch.randn(6, 9)[::2], torch.randn(28)[1:].view(3, 9)):
        value, _ = value_and_gradient(lambda s: topklass.noised_topk(s, 2, 0.0), scores)
        torch.testing.assert_close(value, scores.topk(2).values[:, 1])


def test_outgoing_gradients():
    leaf = torch.randn(3, 9, requires_grad=True)
    with topklass.use_backend("kernel"):
        value = topklass.noised_topk(leaf, 2)
    (one,) = torch.autograd.grad(value, leaf, torch.ones(3), retain_graph=True)
    for outgoing in (torch.randn(3), torch.tensor(-2.0).expand(3), torch.randn(3, 2)[:, 1]):
        (gradient,) = torch.autograd.grad(value, leaf, outgoing, retain_graph=True)
        torch.testing.assert_close(gradient, one * outgoing[:, None])


def test_no_second_derivative():
    leaf = torch.randn(3, 9, requires_grad=True)
    for function in (
        lambda s: topklass.noised_topk(s, 2).sum(),
        lambda s: noised_topk_loss(s, torch.tensor([0, 1, 2]), 2, margin=10.0),
    ):
        with topklass.use_backend("kernel"):
            (gradient,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            gradient.square().sum().backward()


@pytest.mark.parametrize(
    ("match", "arguments"),
    [("given noise", {"noise": torch.zeros(3, 9, 5)}), ("samples", {"samples": 65})],
    ids=["noise", "samples"],
)
def test_what_there_is_no_kernel_for(match, arguments):
    with topklass.use_backend("kernel"), pytest.raises(RuntimeError, match=match):
        topklass.noised_topk(torch.randn(3, 9), 2, **arguments)
