"""``python -m benchmarks long-tail``: files that it takes, and what it measures."""

import pytest
import torch
from benchmarks.long_tail import checked, compare
from benchmarks.prediction_tables import long_tail as table

from set_samples import long_tail
from test_bad_input import raises

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning


def saved() -> dict:
    logits, target = long_tail()
    return {"name": "toy", "logits": logits, "target": target, "counts": torch.bincount(target)}


def test_rows():
    """A method with one threshold has the coverage; thresholds of classes cover the worst more."""
    rows = {row["sets"]: row for row in compare(0.1, 4, **checked(saved(), "toy.pt"))}
    assert len(rows) == 9
    assert rows["LAC"]["micro"] == pytest.approx(0.9, abs=0.03)
    assert rows["LAC by class"]["worst"] > rows["LAC"]["worst"]
    for row in rows.values():
        assert row["worst"] <= row["macro"] <= 1
    record = {"processor": "a", "threads": 1, "torch": "2", "commit": "c"}
    text = table({**record, "sets": [{"name": "toy", "alpha": 0.1, **rows["APS"]}]})
    assert f"| toy | 90 | APS | {100 * rows['APS']['micro']:.2f} |" in text


def test_files():
    with raises(ValueError, "toy.pt", "'counts': (C)"):
        checked({"name": "toy"}, "toy.pt")
    with raises(ValueError, "toy.pt", "(900, 12)", "(7,)"):
        checked({**saved(), "counts": torch.ones(7)}, "toy.pt")
