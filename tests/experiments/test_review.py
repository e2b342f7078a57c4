"""The review's experiment: it trains, counts and times; what cannot be run is not run."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console

from experiments import peers, review, training
from experiments.catalogue import EXPERIMENTS
from experiments.experiment import RECORD, Request
from experiments.grid import planned_runs
from experiments.review import PUBLISHED, timed_setting, without
from experiments.training import train_in_turn
from topklass.train.engine import LAST
from topklass.train.trainer import Interrupted

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and TensorBoard
EXPERIMENT = EXPERIMENTS["review"]
BARE, CENTRED = "summation, not centred", "summation, centred"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("difftopk")
    folder = tmp_path_factory.mktemp("review")
    torch.manual_seed(0)
    EXPERIMENT.run(Request("smoke", folder))
    return folder


@pytest.fixture
def record(folder: Path) -> dict:
    return json.loads((folder / "review-smoke.json").read_text())


def text(record: dict) -> str:
    console = Console(width=200)
    with console.capture() as shown:
        for table in EXPERIMENT.show(record):
            console.print(table)
    return shown.get()


@pytest.mark.slow
def test_smoke(record):
    assert list(record) == list(RECORD)
    assert record["not_run"] == []
    methods = [row["method"] for row in record["rows"]]
    assert {name: methods.count(name) for name in methods} == {
        **dict.fromkeys((BARE, CENTRED, PUBLISHED, "topklass"), 2),
        "cross-entropy": 1,
    }
    for row in record["rows"]:
        assert row["timed"]["seconds"] > 0 < row["timed"]["ratio"]
        assert row["timed"]["hardware"] == row["hardware"]
        assert row["timed"]["commit"] == row["commit"]


@pytest.mark.slow
def test_summation_overflows_where_it_should_and_ours_does_not(record):
    steps = 20 * 8 // 40
    for row in record["rows"]:
        found = row["not_finite"]
        if row["method"] == "cross-entropy":
            assert found is None
            continue
        assert found["calls"] == steps
        overflows = row["method"] in (BARE, CENTRED) and row["settings"]["tau"] < 1
        assert (found["first"], found["losses"] > 0) == ((1, True) if overflows else (0, False))


@pytest.mark.slow
def test_where_nothing_overflows_they_train_alike(record):
    warm = {row["method"]: row for row in record["rows"] if row["settings"]["tau"] == 1}
    assert warm[BARE]["training"] == warm["topklass"]["training"]
    assert warm[CENTRED]["training"] == warm["topklass"]["training"]


@pytest.mark.slow
def test_tables_and_figures(record, tmp_path):
    shown = text(record)
    lines = [line.split("│")[1:-1] for line in shown.splitlines() if "│" in line]
    cells = [[cell.strip() for cell in line] for line in lines]
    assert [BARE, "0.001", "0", "1", "160", "0", "100 %"] in cells
    assert ["topklass", "1", "0", "–", "0", "0", "0 %"] in cells
    drawn = EXPERIMENT.draw(record, tmp_path)
    assert [path.name for path in drawn] == ["review-accuracy.svg"]


def test_before_anything_is_run():
    shown = text(EXPERIMENT.begin("fast"))
    assert "not run" in shown
    assert "because they were not finite" not in shown


@pytest.mark.slow
def test_a_finished_one_is_left_as_it_is(folder, record, monkeypatch):
    monkeypatch.setattr(review, "time_methods", lambda *_: pytest.fail("timed again"))
    assert EXPERIMENT.run(Request("smoke", folder))["rows"] == record["rows"]


@pytest.mark.slow
def test_without_the_published_code_its_runs_are_not_run(folder, record, tmp_path, monkeypatch):
    shutil.copytree(folder, tmp_path / "some")
    kept = copy.deepcopy(record)
    kept["rows"] = [row for row in kept["rows"] if row["method"] != PUBLISHED]
    (tmp_path / "some" / "review-smoke.json").write_text(json.dumps(kept))
    monkeypatch.setattr(peers, "available", lambda package: False)
    found = EXPERIMENT.run(Request("smoke", tmp_path / "some"))
    assert found["rows"] == kept["rows"]
    assert [row["method"] for row in found["not_run"]] == [PUBLISHED] * 2
    assert "not run" in text(found)


@pytest.mark.slow
def test_times_of_before_stay_with_their_hardware(folder, record, tmp_path, monkeypatch):
    """Even without the published code; if a method has no time, all that can be are timed."""
    for row in record["rows"]:
        row["timed"] |= {"seconds": 99.0, "hardware": "an old one"}
    again = [row for row in record["rows"] if row["method"] == "topklass"]
    del again[0]["timed"]
    shutil.copytree(folder, tmp_path / "some")
    (tmp_path / "some" / "review-smoke.json").write_text(json.dumps(record))
    monkeypatch.setattr(peers, "available", lambda package: False)
    found = EXPERIMENT.run(Request("smoke", tmp_path / "some"))
    assert {row["timed"]["seconds"] for row in found["rows"]} == {99.0}
    del again[1]["timed"]
    (tmp_path / "some" / "review-smoke.json").write_text(json.dumps(record))
    found = EXPERIMENT.run(Request("smoke", tmp_path / "some"))
    for row in found["rows"]:
        assert (row["timed"]["seconds"] == 99.0) == (row["method"] == PUBLISHED)
        assert (row["timed"]["hardware"] == "an old one") == (row["method"] == PUBLISHED)
    assert f"{PUBLISHED} (an old one, " in text(found)


def test_counts_are_in_the_record_when_a_run_ends(tmp_path, monkeypatch):
    """Whatever happens to the next one: it may be the last thing that is written."""
    monkeypatch.setattr(training, "train_in_turn", first_and_then_nothing)
    with pytest.raises(Interrupted):
        EXPERIMENT.run(Request("smoke", tmp_path))
    (row,) = json.loads((tmp_path / "review-smoke.json").read_text())["rows"]
    assert row["not_finite"]["calls"] > 0


def first_and_then_nothing(runs, request, keep):
    train_in_turn(dict(list(runs.items())[:1]), request, keep)
    raise Interrupted("stopped")


@pytest.mark.parametrize("preset", ["paper", "fast"])
def test_what_real_presets_train(preset):
    runs = planned_runs(EXPERIMENT.plan, preset)
    found = {(run.method, run.recipe.tau) for run in runs}
    assert found == {
        ("cross-entropy", None),
        *((m, tau) for m in (BARE, CENTRED, PUBLISHED, "topklass") for tau in (1.0, 0.1, 0.01)),
    }
    assert all(run.recipe.k == 5 for run in runs)
    setting = timed_setting(runs[0].recipe, preset)
    assert (setting.model, setting.batch) == (runs[0].recipe.model, runs[0].recipe.batch_size)
    assert setting.steps > 10
    others = planned_runs(without(EXPERIMENT.plan, PUBLISHED), preset)
    assert [run.name for run in others] == [r.name for r in runs if r.method != PUBLISHED]


def test_a_part_of_it(tmp_path):
    """Without cross-entropy there is nothing to compare times with."""
    record = EXPERIMENT.run(Request("smoke", tmp_path, most=1))
    assert len(record["rows"]) == 1
    assert "timed" not in record["rows"][0]
    assert "not_finite" in record["rows"][0]


@pytest.mark.slow
def test_a_run_without_its_checkpoints_has_no_counts(folder, record, tmp_path):
    """And does not end the others."""
    shutil.copytree(folder, tmp_path / "some")
    (tmp_path / "some" / "review-smoke.json").unlink()
    bare = record["rows"][0]["run"]
    last = tmp_path / "some" / bare / LAST
    for checkpoint in last.parent.glob(f"{last.name}*"):
        checkpoint.unlink()
    found = EXPERIMENT.run(Request("smoke", tmp_path / "some"))
    assert [row["run"] for row in found["rows"] if "not_finite" not in row] == [bare]
    text(found)
