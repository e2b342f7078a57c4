"""The kernel of the expected k-th largest score under noise, against the reference in float64."""

from math import inf, nan, sqrt

import pytest
import torch
from smooth_cases import slow
from torch import Tensor

import topklass
from topklass import expected_topk
from topklass.kernels.expected import launch as expected


def value_and_gradient(backend: str, scores: Tensor, k: int, epsilon: float = 0.5):
    leaf = scores.detach().requires_grad_()
    with topklass.use_backend(backend):
        value = expected_topk(leaf, k, epsilon)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


def check(scores: Tensor, k: int, epsilon: float = 0.5, error: float = 3e-6) -> None:
    before = scores.clone()
    value, gradient = value_and_gradient("kernel", scores, k, epsilon)
    torch.testing.assert_close(scores, before, rtol=0, atol=0, equal_nan=True)
    exact, shares = value_and_gradient("reference", scores.double(), k, epsilon)
    assert value.dtype == gradient.dtype == scores.dtype
    torch.testing.assert_close(
        value.double(), exact, rtol=3e-7, atol=error * epsilon, equal_nan=True
    )
    torch.testing.assert_close(gradient.double(), shares, rtol=0, atol=error)


@pytest.mark.parametrize("epsilon", [0.02, 0.5, 3.0])
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(1, 1, 1), (2, 7, 1), slow(2, 7, 7), slow(3, 40, 6)],
)
def test_random_scores(rows, n, k, epsilon):
    check(torch.randn(rows, n), k, epsilon)


@pytest.mark.parametrize("k", [slow(2), slow(11)])
def test_pieces_of_a_row(k):
    """Heads of several pieces are merged, and moments added; some heads are equal."""
    scores = torch.randn(1, 9_000)
    scores[0, 100::2_000] = 3.5
    scores[0, 8_999] = nan if k == 2 else 4.0
    if k == 2:
        value, gradient = value_and_gradient("kernel", scores, k)
        assert value.isnan()
        assert gradient.isnan().all()
        scores[0, 8_999] = -inf
    check(scores, k)


@pytest.mark.slow
@pytest.mark.parametrize("n", [11, 22, 60])
def test_more_heads_of_long_lists(n):
    """2k of them, or all classes; some are equal, also those below the k-th."""
    check((2 * torch.randn(1, n)).round() / 2, 11)


@pytest.mark.slow
def test_largest_k():
    check(torch.randn(1, 66), 64)
    with topklass.use_backend("kernel"), pytest.raises(RuntimeError, match="k = 65, only up to 64"):
        expected_topk(torch.randn(1, 70), 65)


@pytest.mark.slow
def test_many_classes_few_of_which_matter():
    """More than a block of them; in the last row in one tile only."""
    scores = 3 * torch.randn(3, 2_050)
    scores[2] = -50
    scores[2, 2_000:2_004] = torch.randn(4)
    check(scores, 3, 0.05)


@pytest.mark.parametrize("k", [1, slow(3), slow(9)])
def test_ties(k):
    check(torch.zeros(1, 20), k)
    scores = torch.zeros(1, 20)
    scores[0, :2] = 5.0
    check(scores, k)


@pytest.mark.slow
def test_programs_take_several_rows_and_rows_are_taken_in_chunks(monkeypatch):
    scores = torch.randn(20, 30)
    scores[1] *= 10
    whole = value_and_gradient("kernel", scores, 4)
    monkeypatch.setattr(expected, "MOST_PROGRAMS", 2)
    for one, other in zip(value_and_gradient("kernel", scores, 4), whole, strict=True):
        assert torch.equal(one, other)
    monkeypatch.setattr(expected, "MOST_BYTES", 1)  # one program, chunks of 16 rows
    for one, other in zip(value_and_gradient("kernel", scores, 4), whole, strict=True):
        assert torch.equal(one, other)


def test_absent_classes():
    scores = torch.tensor([[1.0, -inf, 0.5, 2.0], [1.0, -inf, -inf, 2.0], [-inf, 1.0, -inf, -inf]])
    value, gradient = value_and_gradient("kernel", scores, 2)
    exact, shares = value_and_gradient("reference", scores, 2)
    torch.testing.assert_close(value, exact)
    torch.testing.assert_close(gradient, shares, rtol=0, atol=1e-6)
    assert value[2] == -inf
    assert not gradient[2].any()


def test_infinite_scores_and_nan():
    scores = torch.tensor([[inf, inf, 1.0], [inf, 1.0, 0.0], [nan, 1.0, 2.0]])
    value, gradient = value_and_gradient("kernel", scores, 2)
    exact, shares = value_and_gradient("reference", scores, 2)
    torch.testing.assert_close(value, exact, equal_nan=True)
    torch.testing.assert_close(gradient, shares, rtol=0, atol=1e-6, equal_nan=True)
    assert gradient[2].isnan().all()


@pytest.mark.parametrize("epsilon", [1e-30, 1e-6])
def test_little_noise(epsilon):
    scores = torch.tensor([[3.0, 1.0, 2.0, -inf], [0.5, 0.25, 4.0, 1.0]])
    value, gradient = value_and_gradient("kernel", scores, 2, epsilon)
    torch.testing.assert_close(value, torch.tensor([2.0, 1.0]))
    torch.testing.assert_close(gradient, torch.eye(4)[[2, 3]], rtol=0, atol=1e-6)


def test_much_noise():
    check(torch.randn(2, 3), 1, 1e6)


@pytest.mark.parametrize("dtype", [slow(torch.float16), torch.bfloat16])
def test_half_precision(dtype):
    scores = torch.randn(2, 20).to(dtype)
    wide, wide_gradient = value_and_gradient("kernel", scores.float(), 3)
    value, gradient = value_and_gradient("kernel", scores, 3)
    assert value.dtype == gradient.dtype == dtype
    torch.testing.assert_close(value, wide.to(dtype))
    torch.testing.assert_close(gradient, wide_gradient.to(dtype))


@pytest.mark.slow
def test_rows_that_are_not_in_one_piece():
    check(torch.randn(9, 3).T, 2)
    check(torch.randn(3, 18)[:, ::2], 2)
    check(torch.randn(2, 2, 9), 2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_value_without_gradient(mode, monkeypatch):
    """What costs more than the value is not computed."""
    scores, launched = torch.randn(2, 9, requires_grad=True), []
    value = value_and_gradient("kernel", scores, 2)[0]
    real = expected.launch

    def launch(kernel, *arguments):
        launched.append(kernel)
        real(kernel, *arguments)

    monkeypatch.setattr(expected, "launch", launch)
    with topklass.use_backend("kernel"), mode():
        again = expected_topk(scores, 2, 0.5)
    assert torch.equal(value, again)
    assert launched == [expected.heads_kernel, expected.integral_kernel]


@pytest.mark.slow
def test_second_derivatives():
    """Those of the reference."""
    scores = torch.randn(2, 6)
    second = []
    for backend in ("kernel", "reference"):
        leaf = scores.clone().requires_grad_()
        with topklass.use_backend(backend):
            value = expected_topk(leaf, 2, 0.5).sum()
        (first,) = torch.autograd.grad(value, leaf, create_graph=True)
        second += torch.autograd.grad((first**2).sum(), leaf)
    torch.testing.assert_close(*second)
    assert second[0].abs().max() > 0.01


@pytest.mark.slow
def test_batches_of_gradients():
    leaf = torch.randn(2, 6).requires_grad_()
    with topklass.use_backend("kernel"):
        value = expected_topk(leaf, 2, 0.5)
    (each,) = torch.autograd.grad(value, leaf, torch.eye(2), is_grads_batched=True)
    _, gradient = value_and_gradient("reference", leaf, 2)
    torch.testing.assert_close(each[0] + each[1], gradient, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_far_tail():
    """Many classes far below still count: 600 of them, five noises down."""
    scores = torch.full((1, 602), -5.0)
    scores[0, :2] = torch.tensor([0.0, 0.1])
    with topklass.use_backend("kernel"):
        value = expected_topk(scores, 2, 1.0)
    exact = expected_topk(scores.double(), 2, 1.0)
    torch.testing.assert_close(value.double(), exact, rtol=0, atol=1e-6)
    assert exact > expected_topk(scores[:, :2].double(), 2, 1.0) + 1e-4


def test_normal_distribution():
    """Of a single class, the chance is the density's integral."""
    value, gradient = value_and_gradient("kernel", torch.tensor([[0.3]]), 1, 2.0)
    torch.testing.assert_close(value, torch.tensor([0.3]), rtol=0, atol=1e-5)
    torch.testing.assert_close(gradient, torch.ones(1, 1), rtol=0, atol=1e-5)
    value, _ = value_and_gradient("kernel", torch.zeros(1, 2), 1, 1.0)
    torch.testing.assert_close(value, torch.tensor([1 / sqrt(torch.pi)]), rtol=0, atol=1e-6)
