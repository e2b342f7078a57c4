"""Records of experiments: from finished runs, in parts, and to tables and figures."""

import copy
import json

import pytest
from matplotlib.figure import Figure
from toy_plans import TOY, cells, finish, toy_plan, write_toys

from experiments import training as training_module
from experiments.catalogue import EXPERIMENTS
from experiments.experiment import RECORD, Request, load_record, record_path, save_record
from experiments.figures import _line
from experiments.grid import planned_runs
from experiments.training import ROW, TrainingExperiment
from topklass.train.statistics import Estimate
from topklass.train.trainer import Interrupted


@pytest.fixture
def experiment():
    return TrainingExperiment(toy_plan())


@pytest.fixture
def data(tmp_path):
    return write_toys(tmp_path / "toys.npz")


@pytest.fixture
def no_training(monkeypatch):
    """Training that is interrupted at once; the list of runs that were asked for."""
    asked = []

    def stop(recipe, folder, **_):
        asked.append(folder.name)
        raise Interrupted("stopped")

    monkeypatch.setattr(training_module, "train", stop)
    return asked


def test_rows_of_finished_runs(experiment, data, tmp_path):
    runs = finish(tmp_path / "runs", experiment, data, list(range(13)))
    record = experiment.run(Request("paper", tmp_path / "runs", data))
    assert tuple(record) == RECORD
    assert not record["not_run"]
    assert [row["run"] for row in record["rows"]] == [run.name for run in runs]
    row = record["rows"][0]
    assert (row["method"], row["seed"], row["classes"]) == ("cross-entropy", 0, 6)
    assert row["test"]["micro"][:2] == [0.25, 0.5]
    assert len(row["test"]["macro"]) == 6
    assert row["validation"] == {"1": 0.5, "2": 0.5}
    assert row["training"] == {"1": 0.5, "2": 0.5}
    assert row["gradient"] == [0.5, 0.5, 0.5]
    assert row["curves"] == {"train/top2": [0.16667, 0.33333, 0.5]}
    assert (row["epoch"], row["epochs"], row["seconds"]) == (3, 3, 12.3)
    assert str(tmp_path) not in json.dumps(record)
    assert load_record(record_path(tmp_path / "runs", "toy", "paper")) == record


def test_an_interruption_loses_nothing(experiment, data, tmp_path, no_training):
    runs = finish(tmp_path / "runs", experiment, data, [0, 3])
    with pytest.raises(Interrupted):
        experiment.run(Request("paper", tmp_path / "runs", data))
    record = load_record(tmp_path / "runs" / "toy-paper.json")
    assert [row["run"] for row in record["rows"]] == [runs[0].name, runs[3].name]
    assert len(record["not_run"]) == 11
    assert record["not_run"][0] == runs[1].row
    assert no_training == [runs[1].name]


def test_every_run_is_kept_when_it_ends(experiment, data, tmp_path, monkeypatch):
    """What the second run fails at does not cost the others."""
    asked = trained_at_once(monkeypatch, experiment, data, tmp_path / "runs", broken=1)
    with pytest.raises(ChildProcessError, match=r"1 of 13 runs failed: .*: the disk is full"):
        experiment.run(Request("paper", tmp_path / "runs", data))
    assert asked == list(range(13))
    assert len(load_record(tmp_path / "runs" / "toy-paper.json")["rows"]) == 12


def trained_at_once(monkeypatch, experiment, data, folder, broken=None):
    """Training that takes no time; the list of runs that were asked for, by number."""
    runs, asked = planned_runs(experiment.plan, "paper", data), []

    def train(recipe, run, **_):
        asked.append([each.name for each in runs].index(run.name))
        if asked[-1] == broken:
            raise RuntimeError("the disk is full")
        finish(folder, experiment, data, asked[-1:])

    monkeypatch.setattr(training_module, "train", train)
    monkeypatch.setattr(training_module, "result_line", str)
    return asked


def test_some_runs_at_a_time(experiment, data, tmp_path, monkeypatch):
    asked = trained_at_once(monkeypatch, experiment, data, tmp_path / "runs")
    for done in (5, 10, 13):
        record = experiment.run(Request("paper", tmp_path / "runs", data, most=5))
        assert len(record["rows"]) == done
    assert asked == list(range(13))


def test_a_record_tells_how_its_rows_were_made(experiment, data, tmp_path, monkeypatch):
    """Not how those of today are."""
    finish(tmp_path / "runs", experiment, data, [0])
    trained_at_once(monkeypatch, experiment, data, tmp_path / "runs")
    record = experiment.run(Request("paper", tmp_path / "runs", data, most=1))
    for row in record["rows"]:
        row |= {"hardware": "abacus", "commit": "aaaaaaa", "versions": {"torch": "0.1"}}
    save_record(record, tmp_path / "runs")
    record = experiment.run(Request("paper", tmp_path / "runs", data, most=1))
    assert record["hardware"] == f"abacus; {record['rows'][-1]['hardware']}"
    assert record["versions"]["torch"].startswith("0.1; ")
    assert record["commit"].startswith("aaaaaaa; ")
    assert experiment.begin("paper", tmp_path / "runs")["commit"] == record["commit"]


def test_other_images_are_an_error(experiment, data, tmp_path, no_training):
    finish(tmp_path / "runs", experiment, data, [0])
    path = tmp_path / "runs" / "toy-paper.json"
    with pytest.raises(Interrupted):
        experiment.run(Request("paper", tmp_path / "runs", data))
    record = load_record(path)
    record["rows"][0]["images"] = "0123456789abcdef"
    save_record(record, tmp_path / "runs")
    with pytest.raises(ValueError, match="was tested on other images"):
        experiment.run(Request("paper", tmp_path / "runs", data))


def test_rows_of_another_protocol_do_not_join_a_cell(experiment, data, tmp_path):
    """Also of a seed that is not planned."""
    finish(tmp_path / "runs", experiment, data, list(range(13)))
    record = experiment.run(Request("paper", tmp_path / "runs", data))
    row = record["rows"][0]
    other = {**row, "seed": 7, "run": "other", "settings": {**row["settings"], "epochs": 300}}
    save_record({**record, "rows": [*record["rows"], other]}, tmp_path / "runs")
    with pytest.raises(ValueError, match="epochs was 300 and is 3"):
        experiment.run(Request("paper", tmp_path / "runs", data))
    gone = {**row, "settings": {**row["settings"], "augment": 1}}
    save_record({**record, "rows": [gone]}, tmp_path / "runs")
    with pytest.raises(ValueError, match="augment was 1 and is gone"):
        experiment.run(Request("paper", tmp_path / "runs", data))
    more = {**row, "seed": 7, "run": "more"}
    save_record({**record, "rows": [*record["rows"], more]}, tmp_path / "runs")
    assert len(experiment.run(Request("paper", tmp_path / "runs", data))["rows"]) == 14


def test_a_record_of_something_else(experiment, data, tmp_path):
    finish(tmp_path / "runs", experiment, data, [0])
    record = experiment.begin("paper")
    path = save_record({**record, "experiment": "level-sets"}, tmp_path / "runs")
    path.rename(tmp_path / "runs" / "toy-paper.json")
    with pytest.raises(ValueError, match="is a record of level-sets, preset paper"):
        experiment.run(Request("paper", tmp_path / "runs", data))


def test_a_broken_run_is_named(experiment, data, tmp_path):
    (first, *_) = finish(tmp_path / "runs", experiment, data, [0])
    (tmp_path / "runs" / first.name / "details.json").write_text("{")
    with pytest.raises(ValueError, match=r"seed=0/details.json is broken.*makes it again"):
        experiment.run(Request("paper", tmp_path / "runs", data))


def test_several_at_once(experiment, data, tmp_path, monkeypatch):
    """The record grows by every run, also if another one fails in the end."""
    runs = finish(tmp_path / "runs", experiment, data, [0])
    sizes = []

    def train_all(left, names, *, at_once, console, finished, callbacks):
        assert at_once == 2
        assert list(names.values()) == [path.name for path in left]
        assert list(left) == [tmp_path / "runs" / run.name for run in runs[1:]]
        for number in (3, 1):
            finish(tmp_path / "runs", experiment, data, [number])
            finished(tmp_path / "runs" / runs[number].name)
            sizes.append(len(load_record(tmp_path / "runs" / "toy-paper.json")["rows"]))
        raise ChildProcessError("10 of 12 runs failed")

    monkeypatch.setattr(training_module, "train_all", train_all)
    with pytest.raises(ChildProcessError, match="failed"):
        experiment.run(Request("paper", tmp_path / "runs", data, at_once=2))
    assert sizes == [2, 3]
    record = load_record(tmp_path / "runs" / "toy-paper.json")
    assert [row["run"] for row in record["rows"]] == [runs[n].name for n in (0, 1, 3)]


def test_a_record_is_enough_to_go_on(experiment, data, tmp_path, no_training):
    """Runs that are in the record are not repeated on another machine, wherever the data is."""
    runs = finish(tmp_path / "runs", experiment, data, list(range(12)))
    with pytest.raises(Interrupted):
        experiment.run(Request("paper", tmp_path / "runs", data))
    (tmp_path / "new").mkdir()
    record = tmp_path / "runs" / "toy-paper.json"
    moved = data.rename(tmp_path / "moved.npz")
    (tmp_path / "new" / record.name).write_text(record.read_text())
    no_training.clear()
    with pytest.raises(Interrupted):
        experiment.run(Request("paper", tmp_path / "new", moved))
    assert no_training == [runs[12].name]
    assert load_record(tmp_path / "new" / record.name)["rows"] == load_record(record)["rows"]


def test_another_protocol_is_an_error(experiment, data, tmp_path):
    finish(tmp_path / "runs", experiment, data, list(range(13)))
    experiment.run(Request("paper", tmp_path / "runs", data))
    changed = TrainingExperiment(toy_plan(TOY.replace("epochs: 3", "epochs: 4")))
    with pytest.raises(ValueError, match=r"another protocol .*epochs was 3 and is 4.*--folder"):
        changed.run(Request("paper", tmp_path / "runs", data))


def test_a_larger_or_smaller_plan_keeps_rows(experiment, data, tmp_path, no_training):
    finish(tmp_path / "runs", experiment, data, list(range(13)))
    whole = experiment.run(Request("paper", tmp_path / "runs", data))
    fewer = TrainingExperiment(
        toy_plan(TOY.replace("noise: [0.0, 0.5], noise_kind: [block, superclass]", "noise: 0.0"))
    )
    record = fewer.run(Request("paper", tmp_path / "runs", data))
    assert {row["run"] for row in record["rows"]} == {row["run"] for row in whole["rows"]}
    more = TrainingExperiment(
        toy_plan(TOY.replace("seeds: [0, 2]", "seeds: [0, 2], epochs: [3, 4]"))
    )
    with pytest.raises(Interrupted):
        more.run(Request("paper", tmp_path / "runs", data))
    kept = load_record(tmp_path / "runs" / "toy-paper.json")
    assert len(kept["rows"]) == 13
    assert len(no_training) == 1
    assert "epochs=4" in no_training[0]
    assert cells(experiment, kept, 0) == cells(experiment, whole, 0)


def test_tables_show_ours_beside_the_papers(experiment, data, tmp_path):
    finish(tmp_path / "runs", experiment, data, list(range(13)))
    experiment.run(Request("paper", tmp_path / "runs", data))
    shown = cells(experiment, load_record(tmp_path / "runs" / "toy-paper.json"), 0)
    assert shown == {
        ("0", "cross-entropy"): ["55.00 ± 7.07 (2)", "40.00 a ▲ +15.00"],
        ("0", "smooth"): ["55.00 ± 7.07 (2)"],
        ("0.5", "cross-entropy"): ["45.00 ± 7.07 (2)", "30.00 ± 0.50 a ▲ +15.00"],
        ("0.5", "smooth"): ["50.00 ± 10.00 (3)", "60.00 a ▼ −10.00"],
        ("1", "cross-entropy"): [""],
        ("1", "smooth"): ["not run", "20.00 a"],
    }
    metrics = cells(experiment, load_record(tmp_path / "runs" / "toy-paper.json"), 1)
    assert metrics["smooth", "best validation top-1"] == ["55.00 ± 7.07 (2)"]
    assert metrics["cross-entropy", "training top-2"] == ["55.00 ± 7.07 (2)"]
    assert metrics["smooth", "non-zero gradients"] == ["3.00 ± 0.00 (2)"]
    caption = experiment.show(load_record(tmp_path / "runs" / "toy-paper.json"))[0].caption
    assert "a: Someone 2018, Table 1." in caption


def test_tables_of_a_part(experiment):
    record = experiment.begin("paper")
    shown = cells(experiment, record, 0)
    assert shown["0.5", "cross-entropy"] == ["not run", "30.00 ± 0.50 a"]
    assert shown["0", "smooth"] == ["not run"]
    assert "Not run with the preset paper" in experiment.show(record)[0].caption


def test_no_table_of_methods_that_a_preset_does_not_have():
    experiment = EXPERIMENTS["cifar100-noise"]
    titles = {
        preset: [table.title for table in experiment.show(experiment.begin(preset))]
        for preset in ("paper", "fast")
    }
    (without,) = set(titles["fast"]) - set(titles["paper"])
    assert "without CutMix" in without


def test_no_figure_of_methods_that_a_preset_does_not_have(tmp_path):
    """Without numbers of the papers there is nothing else to draw, either."""
    text = TOY.replace("file: noise, title", "file: noise, methods: [other], title")
    text = text.replace("methods:\n", "methods:\n  other: {loss: focal}\n", 1)
    grids = "grids: [{noise: 0.0, methods: [smooth]}]"
    text = text.replace("grids: [{noise: 0.0}]", grids)
    experiment = TrainingExperiment(toy_plan(text))
    assert experiment.draw(experiment.begin("smoke"), tmp_path) == []


def test_a_loss_without_k_that_is_trained_once_stands_for_every_k():
    grids = "grids: [{k: 2}, {k: 1, methods: [smooth]}]"
    text = TOY.replace(
        "fast: {settings: {}, grids: [{noise: 0.0}]}", f"fast: {{settings: {{}}, {grids}}}"
    )
    text = text.replace("rows: noise", "rows: k").replace("[test top-2]", "[test top-k]")
    experiment = TrainingExperiment(toy_plan(text))
    record = experiment.begin("fast")
    measured = {"test": {"micro": [0.5, 0.75]}, "hardware": "", "commit": ""}
    others = {key: {} for key in ("validation", "training", "gradient", "curves")}
    record["rows"] = [{**row, **measured, **others} for row in record["not_run"][:2]]
    record["not_run"] = record["not_run"][2:]
    assert cells(experiment, record, 0) == {
        ("1", "cross-entropy"): ["50.00 (1)"],
        ("2", "cross-entropy"): ["75.00 (1)"],
        ("1", "smooth"): ["not run"],
        ("2", "smooth"): ["75.00 (1)"],
    }


def test_other_data_has_no_published_numbers(experiment):
    assert cells(experiment, experiment.begin("smoke"), 0) == {
        ("0", "cross-entropy"): ["not run"],
        ("0", "smooth"): ["not run"],
    }


def test_figures(experiment, data, tmp_path, monkeypatch):
    finish(tmp_path / "runs", experiment, data, list(range(13)))
    record = experiment.run(Request("paper", tmp_path / "runs", data))
    names = ("noise", "methods", "curve", "gradient")
    for folder in ("a", "b"):
        files = experiment.draw(load_record(save_record(record, tmp_path)), tmp_path / folder)
        assert [f.name for f in files] == [f"toy-{n}.svg" for n in names]
    for name in names:
        text = (tmp_path / "a" / f"toy-{name}.svg").read_text()
        assert text == (tmp_path / "b" / f"toy-{name}.svg").read_text()
    drawn = (tmp_path / "a" / "toy-noise.svg").read_text()
    assert "Someone 2018" in drawn
    assert "ours: preset paper, resnet18, 3 epochs" in drawn
    assert "noise p" in drawn
    assert experiment.draw(experiment.begin("paper"), tmp_path / "c") == []


def test_lines_break_where_nothing_was_run():
    axes = Figure().subplots()
    points = [(0.0, Estimate(1.0, None, 1)), (1.0, None), (2.0, Estimate(3.0, 0.5, 2))]
    _line(axes, points, "a", {"color": "red"})
    (line,) = axes.lines
    assert str(line.get_ydata().tolist()) == "[1.0, nan, 3.0]"
    _line(axes, [(0.0, None)], "b", {"color": "red"})
    assert len(axes.lines) == 1


def test_bad_records(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no record"):
        load_record(tmp_path / "none.json")
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_record(tmp_path / "a.json")
    for content in ("[]", '{"experiment": "toy"}'):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(ValueError, match="not a record of python -m experiments: it lacks"):
            load_record(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rows", None, "its rows is None"),
        ("protocol", [], r"its protocol is \[\]"),
        ("preset", "quick", "there is no preset 'quick'"),
    ],
)
def test_damaged_records(experiment, tmp_path, key, value, message):
    path = save_record(experiment.begin("paper"), tmp_path)
    path.write_text(json.dumps({**load_record(path), key: value}))
    with pytest.raises(ValueError, match=f"not a record of python -m experiments: {message}"):
        load_record(path)


def test_damaged_rows(experiment, data, tmp_path, no_training):
    finish(tmp_path / "runs", experiment, data, [0, 1])
    with pytest.raises(Interrupted):
        experiment.run(Request("paper", tmp_path / "runs", data))
    whole = load_record(tmp_path / "runs" / "toy-paper.json")
    for key in ROW:
        record = copy.deepcopy(whole)
        del record["rows"][1][key]
        save_record(record, tmp_path / "runs")
        damaged = f"record of toy, preset paper, is damaged: its row 2 lacks {key}"
        with pytest.raises(ValueError, match=damaged):
            experiment.show(record)
        with pytest.raises(ValueError, match=f"{damaged}. If you move it away, runs"):
            experiment.begin("paper", tmp_path / "runs")


def test_data_that_is_missing(experiment, tmp_path, data):
    with pytest.raises(ValueError, match=r"needs --data PATH, the place of Toys: get toys.zip"):
        experiment.run(Request("paper", tmp_path))
    with pytest.raises(FileNotFoundError, match=r"nowhere; Toys is: toys.zip"):
        experiment.run(Request("paper", tmp_path, tmp_path / "nowhere"))
    other = TrainingExperiment(toy_plan(TOY.replace("classes: 6", "classes: 7")))
    with pytest.raises(ValueError, match=r"Toys has 7 classes, .*toys.npz has 6: get toys.zip"):
        other.run(Request("paper", tmp_path, data))
