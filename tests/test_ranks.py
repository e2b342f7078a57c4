"""The k-th largest of rows is that of ``topk``, also where some are equal, infinite or NaN."""

from math import inf, nan

import pytest
import torch

from topklass.reference.ranks import _by_rounds, kth_largest


@pytest.mark.parametrize("k", [1, 2, 6, 16, 17, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distinct_numbers(k, dtype):
    rows = 3 * torch.randn(200, 30, dtype=dtype)
    rows[:, 0], rows[:, 1], rows[:50, 2] = -1e38, 1e38, inf
    assert torch.equal(kth_largest(rows, k), rows.topk(k).indices[:, -1:])
    if k <= 16 and dtype == torch.float32:
        assert _by_rounds(rows, k) is not None


@pytest.mark.parametrize("special", [0.5, inf, -inf, nan])
def test_equal_numbers(special):
    """One row with some is enough; each row alone, and rows that make up for one another."""
    rows = torch.rand(5, 20)
    rows[1, 3:9] = special
    rows[2] = special
    expected = rows.topk(4)
    for chosen in (slice(None), slice(1, 2), slice(2, 3)):
        place = kth_largest(rows[chosen], 4)
        found = rows[chosen].gather(1, place)
        torch.testing.assert_close(found, expected.values[chosen, -1:], equal_nan=True)


def test_too_few_distinct_numbers_among_other_rows():
    """A row with fewer than k numbers above the last and one with more are k on average."""
    rows = torch.tensor([[3.0, 3.0, 3.0, 1.0], [4.0, 2.0, 2.0, 1.0]])
    for k in (1, 2, 3, 4):
        values = rows.gather(1, kth_largest(rows, k))
        assert torch.equal(values, rows.topk(k).values[:, -1:])
