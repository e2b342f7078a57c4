"""On a CUDA device: the kernels that draw noise."""

import math

import pytest
import torch
from torch import Tensor

import topklass
import topklass.functional as TF
from cuda_cases import NEEDS_GPU, SHAPES, each_shape, problem, value_and_gradient

pytestmark = NEEDS_GPU


def generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


@pytest.mark.parametrize("shape", [*SHAPES, (5000, 40)], ids=str)
def test_noise_is_that_of_the_seed(shape):
    scores, target = problem(*shape)

    def draw(seed: int) -> list[Tensor]:
        with topklass.use_backend("kernel"):
            operator = value_and_gradient(
                lambda s: topklass.noised_topk(s, 5, samples=10, generator=generator(seed)), scores
            )
            loss = value_and_gradient(
                lambda s: TF.noised_topk_loss(
                    s, target, 5, epsilon=1.0, generator=generator(seed), reduction="none"
                ),
                scores,
            )
        return [*operator, *loss]

    first, again, other = draw(1), draw(1), draw(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@each_shape
@pytest.mark.parametrize(("k", "samples"), [(1, 5), (6, 1), (6, 10), (6, 32), (32, 10)])
def test_gradient_of_noised_topk_counts_samples(shape, k, samples):
    scores, _ = problem(*shape)
    with topklass.use_backend("kernel"):
        _, gradient = value_and_gradient(lambda s: topklass.noised_topk(s, k, 1.0, samples), scores)
    counts = gradient * samples
    assert (counts >= 0).all()
    torch.testing.assert_close(counts, counts.round(), rtol=0, atol=1e-4)
    assert torch.equal(counts.round().sum(1), torch.full_like(counts[:, 0], samples))


@pytest.mark.parametrize(
    ("row", "k"),
    [
        (torch.linspace(-2, 2, 30), 5),
        (torch.zeros(30), 1),
        (torch.zeros(3000), 6),
        (torch.arange(30.0).where(torch.arange(30) < 25, -math.inf), 3),
    ],
    ids=["even", "zero", "many zeros", "masked"],
)
def test_noise_is_normal(row, k):
    """Mean and spread of the k-th largest, and how often each class is it, as in the reference."""
    rows = row.cuda().expand(20_000 if len(row) < 100 else 2000, -1)
    leaf = rows.clone().requires_grad_()
    results = []
    for backend in ("kernel", "reference"):
        with topklass.use_backend(backend):
            results.append(
                value_and_gradient(lambda s: topklass.noised_topk(s, k, 1.0, samples=4), leaf)
            )
    (ours, shares), (reference, reference_shares) = results
    count = len(rows)
    error = ((ours.var() + reference.var()) / count).sqrt()
    assert (ours.mean() - reference.mean()).abs() < 5 * error
    assert abs(ours.std() / reference.std() - 1) < 10 / math.sqrt(count)
    mean, expected = shares.mean(0), reference_shares.mean(0)
    errors = ((shares.var(0) + reference_shares.var(0)) / count).sqrt()
    assert ((mean - expected).abs() <= 6 * errors + 1e-12).all()


def test_noise_of_rows_and_samples_is_independent():
    zeros = torch.zeros(4000, 1, device="cuda")
    with topklass.use_backend("kernel"):
        one = topklass.noised_topk(zeros, 1, samples=1)
        many = topklass.noised_topk(zeros, 1, samples=16)
    assert len(one.unique()) > 3900
    assert abs(one.std() - 1) < 0.1
    assert abs(many.std() - 1 / 4) < 0.025


@each_shape
def test_noised_loss_without_noise_is_the_calibrated_hinge(shape):
    scores, target = problem(*shape)
    target[0] = -100
    options = {"weight": torch.rand(shape[1], device="cuda"), "margin": 0.5}
    with topklass.use_backend("kernel"):
        ours = value_and_gradient(
            lambda s: TF.noised_topk_loss(s, target, 5, epsilon=0.0, **options), scores
        )
    expected = value_and_gradient(
        lambda s: TF.calibrated_topk_hinge_loss(s, target, 5, **options), scores
    )
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
