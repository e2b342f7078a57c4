"""Short grids: what is tried, what is chosen, what is kept; and the demo on a small problem."""

import pytest
import yaml

import topklass
from test_cli import run
from test_train_engine import stop_at
from test_train_several import toy_recipe
from topklass.train import Interrupted, demo, load_recipe
from topklass.train.find import GRIDS, Trial, best, find_parameter
from topklass.train.finished import read_run

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and TensorBoard


@pytest.fixture
def recipe(tmp_path):
    return toy_recipe(tmp_path).with_changes({"loss": "smooth", "epochs": 10, "patience": 1})


@pytest.mark.slow
def test_trials(recipe, tmp_path):
    """Three epochs, a fifth if that is more; accuracies are those logged."""
    trials = find_parameter(recipe, "tau", tmp_path / "trials", values=(0.1, 3.0))
    assert [trial.value for trial in trials] == [0.1, 3.0]
    for trial in trials:
        tried = read_run(tmp_path / "trials" / f"tau-{trial.value:g}")
        assert tried.recipe == recipe.with_changes(
            {"tau": trial.value, "epochs": 3, "patience": None}
        )
        assert trial.train == tried.curve("train/top2")[3]
        assert trial.validation == max(tried.curve("validation/top2").values())


def test_trials_are_not_repeated_but_continued(recipe, tmp_path, monkeypatch):
    folder = tmp_path / "trials"
    with monkeypatch.context() as patched:
        stop_at(patched, 8, None)
        with pytest.raises(Interrupted):
            find_parameter(recipe, "tau", folder, values=(0.1, 3.0))
    trials = find_parameter(recipe, "tau", folder, values=(0.1, 3.0))
    written = (folder / "tau-0.1" / "result.json").stat().st_mtime_ns
    assert trials == find_parameter(recipe, "tau", folder, values=(0.1, 3.0))
    assert written == (folder / "tau-0.1" / "result.json").stat().st_mtime_ns
    assert trials == find_parameter(recipe, "tau", tmp_path / "again", values=(0.1, 3.0))


def test_best():
    """By validation accuracy; the smallest of equal ones."""
    trials = [Trial(0.1, 0.9, 0.5), Trial(1.0, 0.2, 0.7), Trial(0.5, 0.1, 0.7)]
    assert best(trials).value == 0.5


@pytest.mark.parametrize(
    ("loss", "name"), [(topklass.SmoothTopKLoss, "tau"), (topklass.NoisedTopKLoss, "epsilon")]
)
def test_grids(loss, name):
    """The default is among the values, and neither the smallest nor the largest."""
    assert getattr(loss(), name) in sorted(GRIDS[name])[1:-1]


def test_nothing_to_find(recipe, tmp_path):
    with pytest.raises(ValueError, match=r"tau=0.5 is given"):
        find_parameter(recipe.with_changes({"tau": 0.5}), "tau", tmp_path)
    with pytest.raises(ValueError, match=r"no epsilon to find.*'smooth'.*takes tau"):
        find_parameter(recipe, "epsilon", tmp_path)
    with pytest.raises(ValueError, match="one device"):
        find_parameter(recipe.with_changes({"devices": 2}), "tau", tmp_path)


@pytest.mark.parametrize(("loss", "name"), [("smooth", "tau"), ("noised", "epsilon")])
def test_command(recipe, tmp_path, monkeypatch, capsys, loss, name):
    """Trains with what was found, and says so."""
    path, folder = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.with_changes({"loss": loss, "epochs": 1}).save(path)
    monkeypatch.setattr("topklass.train.find.GRIDS", {name: (0.1, 3.0)})
    arguments = ("--recipe", str(path), "--folder", str(folder), f"--find-{name}")
    assert run(monkeypatch, "train", *arguments) == 0
    output = capsys.readouterr().out
    found = yaml.safe_load((folder / "recipe.yaml").read_text())[name]
    assert found in (0.1, 3.0)
    assert f"Training with --{name} {found:g}" in output
    assert "validation images" in output


def test_command_checks_before_it_trains(recipe, tmp_path, monkeypatch, capsys):
    path, folder = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.save(path)
    arguments = ("--recipe", str(path), "--folder", str(folder), "--find-tau", "--find-epsilon")
    assert run(monkeypatch, "train", *arguments) == 2
    assert "no epsilon to find" in capsys.readouterr().err
    assert not folder.exists()


def test_command_says_how_to_go_on(recipe, tmp_path, monkeypatch, capsys):
    path, folder = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.save(path)
    arguments = ("train", "--recipe", str(path), "--folder", str(folder), "--find-tau")
    monkeypatch.setattr("topklass.train.find.GRIDS", {"tau": (0.1, 3.0)})
    with monkeypatch.context() as patched:
        stop_at(patched, 8, None)
        assert run(patched, *arguments) == 130
    assert f"the same command with --folder {folder}" in capsys.readouterr().out
    assert run(monkeypatch, *arguments) == 0
    assert load_recipe(folder / "recipe.yaml").tau in (0.1, 3.0)


def test_runs_of_the_demo_differ_in_loss_and_seed_alone(tmp_path):
    real = demo.demo_runs(tmp_path)
    assert len({(each.loss, each.seed) for each in real.values()}) == len(real) == 8
    same = {"loss": "smooth", "seed": 0}
    assert len({repr(each.with_changes(same)) for each in real.values()}) == 1


@pytest.mark.slow
def test_demo(tmp_path, monkeypatch, capsys):
    """Runs are compared; a second time nothing is trained."""
    sizes = {"classes": 100, "per_class": 2, "validation_per_class": 1, "test_per_class": 1}
    small = demo.PROBLEM.with_changes({"epochs": 1, "data_options": sizes})
    monkeypatch.setattr(demo, "PROBLEM", small)
    folder = tmp_path / "demo"
    monkeypatch.setattr(demo, "SEEDS", (4,))
    assert run(monkeypatch, "demo", "--folder", str(folder)) == 0
    output = capsys.readouterr().out
    assert "cross-entropy: top-1" in output
    assert "top-5 gain" in output
    assert (folder / "report.html").exists()
    assert run(monkeypatch, "demo", "--folder", str(folder)) == 0
    assert "4 of 4 runs are finished already" in capsys.readouterr().out
