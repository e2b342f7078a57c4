"""Times of epochs: who is timed, in which order, what is made of it. No time is judged."""

import json

import pytest
import torch
from rich.console import Console

from experiments import peers, step_time
from experiments.catalogue import EXPERIMENTS
from experiments.epoch_time import BASE, LENGTHS, PUBLISHED, SETTINGS, candidates
from experiments.experiment import RECORD, Request
from experiments.step_time import Setting, epoch_seconds, ratio, training_step
from experiments.study_losses import SummationTopKLoss

EXPERIMENT = EXPERIMENTS["epoch-time"]
TINY = Setting("convnet", batch=2, images=6, classes=7, size=16, rounds=4)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds of a step with each loss, instead of real ones; what was timed is under "seen"."""
    seconds: dict[str, float] = {}
    seen: list[tuple[str, int]] = []

    def timed(step, loss, steps):
        seen.append((loss, steps))
        return seconds[loss] * steps

    monkeypatch.setattr(step_time, "timed", timed)
    monkeypatch.setattr(step_time, "training_step", lambda setting: None)
    seconds["seen"] = seen
    return seconds


def test_losses_take_turns_in_changing_order(clock):
    clock |= dict.fromkeys("abcd", 1.0)
    found = epoch_seconds(TINY, {name: name for name in "abcd"})
    assert found == {name: [3.0] * 4 for name in "abcd"}
    measured = [name for name, steps in clock["seen"][8:]]
    rounds = [measured[at : at + 4] for at in range(0, 16, 4)]
    assert all(sorted(each) == list("abcd") for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1


def test_slow_losses_are_timed_on_fewer_steps_and_scaled(clock):
    clock |= {"fast": 1.0, "slow": 7.0}
    long = Setting("convnet", batch=1, images=40, classes=7, rounds=1)
    assert epoch_seconds(long, {"fast": "fast", "slow": "slow"}) == {
        "fast": [40.0],
        "slow": [280.0],
    }
    assert sorted(clock["seen"][4:]) == [("fast", 40), ("slow", 4)]


def test_losses_with_buffers_go_where_steps_are(clock, monkeypatch):
    monkeypatch.setattr(step_time, "device", lambda: torch.device("meta"))
    loss = SummationTopKLoss()
    clock[loss] = 1.0
    epoch_seconds(TINY, {"summation": loss})
    assert loss.calls.is_meta


def test_ratios_are_those_of_the_same_round():
    assert ratio([2.0, 20.0, 200.0], [[1.0, 10.0, 100.0]]) == 2.0
    assert ratio([3.0], [[1.0], [3.0], [30.0]]) == 1.0


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_step_is_a_step_of_training(precision):
    seen = []

    def loss(logits, labels):
        seen.append(logits.detach().float())
        assert labels.shape == logits.shape[:1]
        return torch.nn.functional.cross_entropy(logits, labels)

    step = training_step(Setting("convnet", 4, 8, 7, size=16, precision=precision))
    for _ in range(2):
        step(loss)
    assert seen[0].shape == (4, 7)
    assert seen[0].isfinite().all()
    assert not torch.equal(seen[0], seen[1])  # the weights have changed


def test_every_loss_is_there_for_every_length():
    losses, left_out = candidates((1, 3))
    names = {name for name, _ in losses}
    assert {k for _, k in losses} == {1, 3}
    assert len(losses) == 2 * len(names)
    expected = {BASE, "smooth", "noised, B = 3", "noised, B = 10", "noised, exact"}
    assert names - {PUBLISHED} == expected
    assert bool(left_out) == (PUBLISHED not in names)
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 9, requires_grad=True), torch.arange(4)
    for loss in losses.values():
        loss(logits, labels).backward()


def test_without_the_published_code_it_is_left_out(monkeypatch):
    monkeypatch.setattr(peers, "available", lambda package: False)
    losses, left_out = candidates((5,))
    assert (PUBLISHED, 5) not in losses
    assert left_out == ["smooth, published: difftopk is not installed"]


def test_smoke(tmp_path):
    record = EXPERIMENT.run(Request("smoke", tmp_path))
    assert list(record) == list(RECORD)
    assert record["protocol"]["model"] == "convnet"
    assert {row["k"] for row in record["rows"]} == set(LENGTHS["smoke"])
    for row in record["rows"]:
        assert len(row["rounds"]) == SETTINGS["smoke"].rounds
        assert row["seconds"] > 0 < row["ratio"]
    path = tmp_path / "epoch-time-smoke.json"
    written = path.read_text()
    assert json.loads(written) == record
    console = Console(width=1000)
    with console.capture() as said:
        assert EXPERIMENT.run(Request("smoke", tmp_path, console=console)) == record
    assert "is kept" in said.get()
    assert path.read_text() == written
    path.write_text(written.replace('"batch": 4', '"batch": 8'))
    with pytest.raises(
        ValueError, match=r"another protocol \(batch was 8 and is 4\): choose another"
    ):
        EXPERIMENT.run(Request("smoke", tmp_path))
    path.write_text(written.replace('"epoch-time"', '"level-sets"'))
    with pytest.raises(ValueError, match="is a record of level-sets"):
        EXPERIMENT.run(Request("smoke", tmp_path))
    path.write_text(written)
    drawn = EXPERIMENT.draw(record, tmp_path)
    assert [each.name for each in drawn] == ["epoch-time.svg"]


def test_tables_say_how_much_longer_and_what_is_missing():
    rows = [
        {"loss": BASE, "k": 5, "seconds": 2.0, "ratio": 1.0, "rounds": [2.0]},
        {"loss": "smooth", "k": 5, "seconds": 2.5, "ratio": 1.25, "rounds": [2.5]},
    ]
    record = {"rows": rows, "not_run": ["x: is missing"], "protocol": {"goal": "1 %"}}
    console = Console(width=120)
    with console.capture() as shown:
        for table in EXPERIMENT.show(record):
            console.print(table)
    for said in ("+25.00 %", "+0.00 %", "x: is missing", "Cross-entropy: 2 s", "65", "81", "68"):
        assert said in " ".join(shown.get().split()), said
