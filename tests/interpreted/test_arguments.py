"""What kernels accept: numbers of NumPy, margins without dimensions, and no rows beyond a grid."""

import numpy as np
import pytest
import torch

import topklass
from topklass import dispatch
from topklass.functional import noised_topk_loss, smooth_topk_loss


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


@pytest.mark.parametrize(("rows", "columns"), [(2, dispatch.MOST_COLUMNS + 1), (50_000**2, 2)])
def test_too_large(rows, columns):
    with topklass.use_backend("kernel"), pytest.raises(RuntimeError, match="up to"):
        topklass.topk_marginals(torch.empty(1, 1).expand(rows, columns), 1)
