"""``python -m benchmarks sharded``, in small with two processes."""

import pytest
import torch
from benchmarks import sharded

where = {"processor": "CPU", "threads": "1", "torch": "2", "commit": "0"}


@pytest.mark.slow
def test_rows_and_table():
    """Bytes are those of the model; times are positive."""
    rows = sharded.measured(2, torch.device("cpu"), smoke=True)
    assert [row["ranks"] for row in rows] == [2] * len(sharded.SMOKE)
    for row in rows:
        assert row["bytes"] == row["model_bytes"]
        assert min(row[name] for name in ("exchange", "model_exchange", "step", "own")) > 0
    text = sharded.exchanges({**where, "rows": rows})
    assert "| 2 |" in text
    assert "16 × 100, k = 3" in text


def test_model():
    """Each other rank's part takes its time; each collective has its latency."""
    link = sharded.Link(latency=0.5, bandwidth=10.0)
    assert link.seconds(2, [10]) == 1.5
    assert link.seconds(3, [10, 20]) == 2 * 0.5 + 2 * 30 / 10
