"""The command line: a run from a file, continued, listed; errors are one sentence."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from topklass import cli, train
from topklass.cli import FILE_ONLY
from topklass.train.criterion import LOSSES
from topklass.train.recipe import Recipe

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and TensorBoard


@pytest.fixture
def npz(tmp_path):
    """Data in the format of users."""
    return write_patterns(tmp_path / "toy.npz", noise=40)


def write_patterns(path: Path, noise: float, **more: np.ndarray) -> Path:
    """Six patterns of 8×8 pixels."""
    stream = np.random.default_rng(0)
    patterns = stream.integers(0, 256, (6, 8, 8))
    arrays = {}
    for split, count in (("train", 96), ("test", 36)):
        labels = np.arange(count) % 6
        noisy = patterns[labels] + stream.normal(0, noise, (count, 8, 8))
        arrays |= {f"x_{split}": noisy.clip(0, 255).astype(np.uint8), f"y_{split}": labels}
    np.savez(path, **arrays, **more)
    return path


def run(monkeypatch, *arguments: str) -> int:
    """The exit status of ``topklass arguments…``."""
    monkeypatch.setattr(sys, "argv", ["topklass", *arguments])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    return exit.value.code or 0


def settings(npz) -> list[str]:
    return f"--data {npz} --epochs 2 --batch-size 16 --pad 1 --k 2 --learning-rate 0.02".split()


def test_train(monkeypatch, capsys, npz, tmp_path):
    folder = tmp_path / "run"
    assert (
        run(monkeypatch, "train", *settings(npz), "--folder", str(folder), "--first-guess", "0.5")
        == 0
    )
    output = capsys.readouterr().out
    assert "epoch 2/2" in output
    assert "top-5" in output
    result = json.loads((folder / "result.json").read_text())
    assert result["recipe"]["first_guess"] == 0.5
    assert result["test"]["micro"]["6"] == 1.0


def test_recipe_and_overriding_options(monkeypatch, npz, tmp_path):
    path, folder = tmp_path / "recipe.yaml", tmp_path / "run"
    path.write_text(f"data: {npz}\nepochs: 1\nbatch_size: 16\npad: 0\nk: 2\nloss: cross-entropy\n")
    arguments = (
        "--recipe",
        str(path),
        "--folder",
        str(folder),
        "--loss",
        "noised",
        "--samples",
        "0",
    )
    assert run(monkeypatch, "train", *arguments) == 0
    recipe = json.loads((folder / "result.json").read_text())["recipe"]
    assert (recipe["loss"], recipe["epochs"], recipe["samples"]) == ("noised", 1, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loss", "smoth"], "Did you mean 'smooth'"),
        (["--model", "convnte"], "convnet"),
        (["--k", "6"], "k=6 must be less than the 6 classes"),
        (["--data", "nowhere"], "nowhere"),
        (["--gamma", "2"], "'short-list' has no gamma"),
        (["--loss", "topk-cross-entropy", "--first-guess", "1"], "first_guess must be at least 0"),
        (["--resume"], "--resume needs --folder"),
        (["--option", "classes"], "NAME=VALUE"),
        (["--batch-size", "1000"], "lower the batch size"),
    ],
)
def test_errors(monkeypatch, capsys, npz, tmp_path, arguments, message):
    folder = [] if "--resume" in arguments else ["--folder", str(tmp_path / "run")]
    assert run(monkeypatch, "train", *settings(npz), *folder, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error:")
    assert not (tmp_path / "run").exists()
    assert message in error
    assert "Traceback" not in error


def test_lists(monkeypatch, capsys):
    assert run(monkeypatch, "losses") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in LOSSES)
    assert run(monkeypatch, "models") == 0
    assert "resnet18" in capsys.readouterr().out
    assert run(monkeypatch, "data") == 0
    assert "glyphs" in capsys.readouterr().out


def test_evaluate(monkeypatch, capsys, npz, tmp_path):
    folder = tmp_path / "run"
    assert run(monkeypatch, "train", *settings(npz), "--folder", str(folder)) == 0
    result = json.loads((folder / "result.json").read_text())["test"]
    capsys.readouterr()
    assert run(monkeypatch, "evaluate", str(folder), "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["accuracy"]["micro"] == list(result["micro"].values())
    assert record["views"]["one"] == pytest.approx(result["micro"]["2"])
    assert record["views"]["number"] == 5
    assert run(monkeypatch, "evaluate", str(folder)) == 0
    assert "marginals" in capsys.readouterr().out
    assert run(monkeypatch, "evaluate", str(tmp_path)) == 2
    assert "there is no run in" in capsys.readouterr().err


def test_the_command_begins_without_what_is_slow_to_import():
    """Lightning alone takes longer than all of topklass, and most commands do without."""
    slow = {"lightning", "torchmetrics", "matplotlib", "PIL", "torchvision"}
    script = (
        "import sys, topklass.cli, topklass.data, topklass.train\n"
        f"assert not {slow} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert all(hasattr(train, name) for name in train.__all__)
    assert {*train.__all__} == {*train.MODULE_OF} <= {*dir(train)}
    assert not hasattr(train, "nothing")


def test_help_groups_the_options(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert run(monkeypatch, "train", "--help") == 0
    text = capsys.readouterr().out
    assert "…" not in text  # no name is cut off
    for setting in fields(Recipe):
        if setting.name not in FILE_ONLY:
            assert f"--{setting.name.replace('_', '-')} " in text
    headings = [line.split()[1] for line in text.splitlines() if line.startswith("╭")]
    assert headings == ["Options", "Run", "Data", "Network", "Loss", "Training", "Hardware"]
