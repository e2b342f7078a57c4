"""What the tests of the smooth loss's kernels share: problems, and kernel against reference."""

import pytest
import torch
from torch import Tensor

import topklass
from topklass.functional import smooth_topk_loss
from topklass.kernels.smooth.launch import plan
from topklass.reference.power_sums import LARGEST_K_IN_FLOAT32


def slow(*values: object) -> object:
    """A case of a test that is not run in the quick part."""
    return pytest.param(*values, marks=pytest.mark.slow)


def split(k: int) -> int:
    """So many classes that a few rows are divided into pieces."""
    return next(n for n in range(2052, 10**6, 2048) if plan(5, n, 1, k).parts > 1)


SPLIT, SPLIT_K = min((split(k), k) for k in (3, 11, 20))
each_size = pytest.mark.parametrize(("n", "k"), [(8, 3), slow(1030, 3), slow(SPLIT, SPLIT_K)])


def run(
    input: Tensor,
    target: Tensor,
    k: int = 5,
    tau: float = 1.0,
    backend: str = "kernel",
    outgoing: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, Tensor]:
    """Loss and gradient; the logits keep their layout, and must keep their values."""
    leaf, before = input.detach().requires_grad_(), input.clone()
    with topklass.use_backend(backend):
        loss = smooth_topk_loss(leaf, target, k, tau, **options)
        loss.backward(torch.ones_like(loss) if outgoing is None else outgoing)
    torch.testing.assert_close(input, before, rtol=0, atol=0, equal_nan=True)
    return loss.detach(), leaf.grad


def check(input: Tensor, target: Tensor, k: int = 5, *arguments: object, **options: object) -> None:
    """Kernel and reference agree, to a few roundings of the largest value.

    Both take the powers of small k in float32, whose rounding Newton's identities amplify.
    """
    (loss, gradient), (expected, expected_gradient) = (
        run(input, target, k, *arguments, backend=backend, **options)
        for backend in ("kernel", "reference")
    )
    amplified = 2**k / (k + 1) * torch.finfo(torch.float32).eps if k <= LARGEST_K_IN_FLOAT32 else 0
    tolerance = 2 * torch.finfo(input.dtype).eps + amplified
    assert loss.dtype == expected.dtype
    assert loss.shape == expected.shape
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=1e-30, equal_nan=True)
    assert gradient.dtype == expected_gradient.dtype
    largest = expected_gradient.nan_to_num().abs().max().item()
    torch.testing.assert_close(
        gradient, expected_gradient, rtol=tolerance, atol=tolerance * largest, equal_nan=True
    )


def problem(rows: int, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return (3 * torch.randn(rows, n)).to(dtype), torch.randint(n, (rows,))
