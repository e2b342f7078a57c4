"""``python -m benchmarks linear``, in small on the CPU."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from benchmarks import linear, linear_tables, tables
from benchmarks.linear_candidates import (
    BY_CLASSES,
    BY_ROWS,
    OURS,
    PLAIN,
    Candidate,
    candidates,
    smooth,
)
from benchmarks.verify import WrongResult
from torch import Tensor

import topklass.functional as TF
from topklass.functional import _linear_function

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a short run would write."""
    written = {}
    monkeypatch.setattr(linear, "SMOKE", (linear.Case(24, 8, 300),))
    monkeypatch.setattr(linear, "write", lambda name, record, _: written.update({name: record}))
    monkeypatch.setattr(linear, "medians", lambda steps, *_, **__: dict.fromkeys(steps, 0.001))
    linear.main(torch.device("cpu"), smoke=True)
    return written["linear-cpu"]


def test_record_and_tables(record):
    assert [row["loss"] for row in record["rows"]] == [each.name for each in candidates()]
    assert all(row["over_plain"] == 1 and row["mebibytes"] > 0 for row in record["rows"])
    few, many = record["rooms"]
    assert few["chunk_bytes"] < many["chunk_bytes"]
    texts = dict(tables.of_parts(record, tables.LINEAR))
    assert list(texts) == list(tables.LINEAR)
    for text in texts.values():
        assert text.count("\n| ") >= 3
        assert "None" not in text
    assert "24 × 8 → 300" in linear_tables.layers(record)


def test_what_does_not_fit_is_left_out(record):
    record["rows"] = [row for row in record["rows"] if row["loss"] != PLAIN]
    for row in record["rows"]:
        row["over_plain"] = None
    assert "| – | 1 |" in linear_tables.layers(record)


def test_what_fails_is_recorded_and_the_rest_goes_on(monkeypatch):
    def broken(*_: object) -> Tensor:
        raise ValueError("broken")

    case, written = linear.Case(24, 8, 300), {}
    both = [linear.by_name(PLAIN), Candidate(OURS, smooth, broken)]
    monkeypatch.setattr(linear, "SMOKE", (case,))
    monkeypatch.setattr(linear, "candidates", lambda *_, **__: both)
    monkeypatch.setattr(linear, "write", lambda _, record, __: written.update(record))
    monkeypatch.setattr(linear, "medians", lambda steps, *_, **__: dict.fromkeys(steps, 0.001))
    monkeypatch.setattr(linear, "compare_rooms", broken)
    linear.main(torch.device("cpu"), smoke=True)
    assert [row["loss"] for row in written["rows"]] == [PLAIN]
    failed = [(row["loss"], row["failed"]) for row in written["failed"]]
    assert failed == [(OURS, "ValueError: broken"), ("rooms", "ValueError: broken")]
    assert "linear-rooms" not in dict(tables.of_parts(written, tables.LINEAR))


def test_wrong_results_are_not_timed(monkeypatch):
    """A loss of lists that are too long is not the loss that its name says."""
    wrong = Candidate(OURS, smooth, lambda x, w, y: TF.linear_smooth_topk_loss(x, w, y, 6))
    case, device = linear.Case(24, 8, 300), torch.device("cpu")
    monkeypatch.setattr(linear, "candidates", lambda *_, **__: [wrong])
    with pytest.raises(WrongResult, match=f"{OURS}: value"):
        linear.verify_small(case, device, OURS)
    problem = linear.new_problem(case, device)
    with pytest.raises(WrongResult, match=f"{OURS}: gradient of some rows"):
        linear.verify_rows(wrong, problem)


def test_both_ways_are_measured(monkeypatch):
    """Chunks of rows and of classes, also where the default is the other way."""
    both = [linear.by_name(name, chunk_bytes=24 * 300) for name in (BY_ROWS, BY_CLASSES)]
    monkeypatch.setattr(linear, "candidates", lambda *_, **__: both)
    of_rows = Mock(wraps=_linear_function.in_chunks)
    of_classes = Mock(wraps=_linear_function.in_class_chunks)
    monkeypatch.setattr(_linear_function, "in_chunks", of_rows)
    monkeypatch.setattr(_linear_function, "in_class_chunks", of_classes)
    for name in (BY_ROWS, BY_CLASSES):
        linear.verify_small(linear.Case(24, 8, 300), torch.device("cpu"), name)
    assert of_rows.call_count == of_classes.call_count == 1


def test_names_are_unique():
    names = [candidate.name for candidate in candidates()]
    assert len(names) == len(set(names))
    assert set(names) <= set(linear_tables.ORDER)
