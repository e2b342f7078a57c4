"""``python -m experiments``: the list, all training experiments in small, errors in a sentence."""

import json
import sys
from pathlib import Path

import pytest

from experiments import training as training_module
from experiments.__main__ import main
from experiments.catalogue import BY_RECIPE, EXPERIMENTS
from experiments.experiment import RECORD
from experiments.grid import planned_runs
from experiments.plan import load_plan
from topklass._files import lock_folder
from topklass.train.trainer import Interrupted

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and TensorBoard

RECORDS = str(Path(__file__).parents[2] / "benchmarks/results/reproduce")
BELOW_A_FILE = str(Path(__file__) / "nowhere")
"""Where no system can make a folder."""


def run(monkeypatch, *arguments: str) -> int:
    """The exit status of ``python -m experiments arguments…``."""
    monkeypatch.setattr(sys, "argv", ["experiments", *arguments])
    with pytest.raises(SystemExit) as exit:
        main()
    return exit.value.code or 0


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_RECIPE)
def test_smoke(monkeypatch, capsys, tmp_path, name):
    folder = tmp_path / name
    command = (name, "--preset", "smoke", "--folder", str(folder))
    assert run(monkeypatch, *command) == 0
    record = json.loads((folder / f"{name}-smoke.json").read_text())
    searched = bool(load_plan(name).presets["smoke"].search)
    assert tuple(record) == (*RECORD, *(["chosen"] if searched else []))
    assert record["experiment"] == name
    assert not record["not_run"]
    assert len(record["rows"]) == len(planned_runs(load_plan(name), "smoke"))
    assert ("views" in record["rows"][0]) == (name == "imagenet-subsets")
    capsys.readouterr()
    assert run(monkeypatch, *command) == 0  # nothing is left to be trained
    again = capsys.readouterr().out
    assert f"{len(record['rows'])} of {len(record['rows'])} runs are done" in again
    assert "epoch 1/" not in again
    shown = tmp_path / "shown"
    show = ("--show", str(folder / f"{name}-smoke.json"), "--folder", str(shown))
    assert run(monkeypatch, *show) == 0
    assert (
        capsys.readouterr().out.count("Drew") == again.count("Drew") == len(list(shown.iterdir()))
    )


def test_list(monkeypatch, capsys):
    for arguments in ((), ("--list",)):
        assert run(monkeypatch, *arguments) == 0
        shown = capsys.readouterr().out
        assert all(name in shown for name in EXPERIMENTS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cifar100-nois"], "Did you mean 'cifar100-noise'"),
        (["cifar100-noise", "--preset", "slow"], "must be one of paper, fast, smoke"),
        (["cifar100-noise", "--at-once", "0"], "at_once=0"),
        (["cifar100-noise", "--most", "0"], "most=0"),
        (["cifar100-noise"], "cifar-100-python.tar.gz"),
        (["imagenet-subsets", "--preset", "paper"], "ILSVRC2012_img_train.tar"),
        (["plantnet"], "plantnet_300K.zip"),
        (["longtail", "--data", "nowhere"], "there is no nowhere"),
        (["longtail", "--data", "."], "cifar-100-python.tar.gz"),
        (["review", "--show", f"{RECORDS}/level-sets-fast.json"], "is a record of level-sets"),
        (["--show", "nothing.json"], "there is no record nothing.json"),
        (["--show", "."], "is a folder: give the record in it"),
        (["--list", "--most", "2"], "--most are for experiments that run: name one"),
        (["--show", f"{RECORDS}/review-fast.json", "--data", "x"], "for experiments that run"),
        (
            ["--show", f"{RECORDS}/review-fast.json", "--folder", BELOW_A_FILE],
            f"cannot write into {BELOW_A_FILE}",
        ),
        (["longtail", "--preset", "smoke", "--data", "x"], "its own images: leave --data out"),
        (["level-sets", "--most", "2"], "level-sets does not take --most: leave it out"),
        (["epoch-time", "--data", "x"], "epoch-time does not take --data"),
    ],
)
def test_errors(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error:")
    assert message in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "status"), [(Interrupted("x"), 130), (ChildProcessError("broke"), 1)]
)
def test_a_part_is_shown(monkeypatch, capsys, tmp_path, error, status):
    def fail(*_):
        raise error

    monkeypatch.setattr(training_module, "train_in_turn", fail)
    command = ("cifar100-samples", "--preset", "smoke", "--folder", str(tmp_path))
    assert run(monkeypatch, *command) == status
    shown = capsys.readouterr().out
    assert "not run" in shown
    assert "Not run: 3 of 3 parts." in " ".join(shown.split())
    assert ("continues from there" if status == 130 else "broke") in shown


def test_one_process_at_a_time(monkeypatch, capsys, tmp_path):
    """A second one would write into the same runs."""
    monkeypatch.setattr(EXPERIMENTS["level-sets"], "draw", lambda record, folder: [])
    command = ("level-sets", "--preset", "smoke", "--folder", str(tmp_path / "here"))
    with lock_folder(tmp_path / "here"):
        assert run(monkeypatch, *command) == 2
    assert "another process works in" in " ".join(capsys.readouterr().err.split())
    assert run(monkeypatch, *command) == 0


def test_a_folder_that_will_not_do(monkeypatch, capsys, tmp_path):
    """It is told before anything is measured."""
    monkeypatch.setattr(EXPERIMENTS["epoch-time"], "run", lambda request: pytest.fail("measured"))
    (tmp_path / "file").touch()
    command = ("epoch-time", "--preset", "smoke", "--folder")
    assert run(monkeypatch, *command, str(tmp_path / "file")) == 2
    assert "is a file: choose a folder" in capsys.readouterr().err
    assert run(monkeypatch, *command, BELOW_A_FILE) == 2
    assert f"cannot write into {BELOW_A_FILE}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "what"), [("review", "continues from there"), ("level-sets", "starts again")]
)
def test_ctrl_c_says_how_to_go_on(monkeypatch, capsys, tmp_path, name, what):
    def interrupted(request):
        raise KeyboardInterrupt

    monkeypatch.setattr(EXPERIMENTS[name], "run", interrupted)
    command = (name, "--preset", "smoke", "--folder", str(tmp_path / "new"))
    assert run(monkeypatch, *command) == 130
    assert f"the same command {what}" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
