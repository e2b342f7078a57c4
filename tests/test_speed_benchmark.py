"""``python -m benchmarks speed`` on a GPU, in small on the CPU."""

import pytest
import torch
from benchmarks import first_calls, speed_gpu, tables, training_steps
from benchmarks.candidates import (
    BASE,
    OURS,
    SMOOTHED,
    Candidate,
    base,
    with_few_classes,
    with_smoothing,
)
from benchmarks.environment import read
from torch import Tensor

import topklass

CPU = torch.device("cpu")
FIRST_CALL = {"samples": 4, "classes": 40, "loss": OURS, "seconds": 2.5, "seconds_again": 0.001}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A run of the losses that the documents compare by target; what it would write."""
    written: dict[str, object] = {}
    one = [base(), Candidate(OURS, "smooth", topklass.SmoothTopKLoss(5))]
    times = {
        "medians": lambda steps, *_, **__: dict.fromkeys(steps, 0.001),
        "training_steps": lambda _: [],
        "first_calls": lambda _: [FIRST_CALL],
        "copy_bandwidth": lambda *_: 1e12,
        "on_gpu": lambda: one,
        "QUICK_SHAPES": ((4, 40), (3, 50)),
        "GROWTH": (2, (30, 40, 50)),
        "write": lambda _, record, __: written.update(record),
    }
    for name, value in times.items():
        monkeypatch.setattr(speed_gpu, name, value)
    speed_gpu.main(CPU, quick=True)
    return written


def test_record_and_tables(short):
    assert short["failed"] == []
    assert [row["loss"] for row in short["few"][:4]] == [c.name for c in with_few_classes()]
    assert [row["loss"] for row in short["smoothing"][:8]] == [c.name for c in with_smoothing()]
    assert all(row["gradient_error"] < 1e-5 for row in short["few"] + short["smoothing"])
    short |= {"gpu": "some", "triton": "3"}
    texts = dict(tables.of_parts({**short, "rows": [], "growth": []}, tables.SPEED_GPU))
    assert list(texts) == ["smoothing-gpu", "few-gpu", "dtypes-gpu", "first-calls-gpu"]
    assert f"| {OURS} | 2.5 | 1 |" in texts["first-calls-gpu"]
    assert "| 4 × 40 | 1 | 1 (1) | 1 (1) | 1 (1) | 1 (1) |" in texts["smoothing-gpu"]
    assert "| 3 × 50 | 1 | 1 | 1 |" in texts["few-gpu"]


def test_times_of_first_calls():
    (row,) = first_calls.first_calls(quick=True)
    assert 0 < row["seconds_again"] < 60
    assert row["seconds"] > 0


def test_what_fails_is_recorded_and_the_rest_goes_on(monkeypatch):
    def broken(*_: object) -> Tensor:
        raise ValueError("broken")

    wrong = Candidate("wrong", "smooth", topklass.SmoothTopKLoss(4))
    chosen = [base(), Candidate("broken", "reference", broken), wrong]
    monkeypatch.setattr(speed_gpu, "medians", lambda steps, *_: dict.fromkeys(steps, 0.001))
    first, second, third = speed_gpu.targets(chosen, 4, 40, CPU)
    assert first["ratio"] == 1
    assert second["failed"] == "ValueError: broken"
    assert third["failed"].startswith("WrongResult: wrong: gradient off by")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_training_steps(monkeypatch):
    seconds = {c.name: [2.0 if c.name.endswith(SMOOTHED) else 1.0] for c in with_smoothing()}
    monkeypatch.setattr("experiments.step_time.epoch_seconds", lambda *_: seconds)
    rows = training_steps.training_steps(quick=True)
    assert [row["ratio"] for row in rows] == [1] * 8
    assert rows[0]["milliseconds"] == 500


def test_records_that_were_measured_before_have_tables():
    record = read("speed-gpu")
    assert {"speed-gpu", "growth-gpu"} <= dict(tables.of_parts(record, tables.SPEED_GPU)).keys()
    assert BASE in {row["loss"] for row in record["rows"]}
