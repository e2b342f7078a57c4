"""Several runs at once: the same as one by one, continued, and none lost by another's failure."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from test_train_engine import assert_same_weights, toy, train_until
from topklass.train import Interrupted, Recipe, several, train
from topklass.train.several import differences, is_finished, raise_failed, train_all

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and TensorBoard
posix = pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups of POSIX")


def toy_recipe(folder: Path) -> Recipe:
    """A recipe on a file, which processes of their own can read."""
    dataset, arrays = toy(), {}
    for name in ("train", "test"):
        split = getattr(dataset, name)
        arrays[f"x_{name}"], arrays[f"y_{name}"] = split.images[:, 0].numpy(), split.labels.numpy()
    file = folder / "toy.npz"
    np.savez(file, **arrays)
    return Recipe(data=str(file), k=2, epochs=3, batch_size=16, pad=1, learning_rate=0.02)


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> list[Recipe]:
    base = toy_recipe(tmp_path_factory.mktemp("data"))
    return [base, base.with_changes({"loss": "noised", "samples": 3, "seed": 1})]


@pytest.fixture(scope="module")
def whole(recipes: list[Recipe], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("whole")
    for number, recipe in enumerate(recipes):
        train(recipe, folder / str(number))
    return [folder / str(number) for number in range(len(recipes))]


def in_folders(recipes: list[Recipe], folder: Path) -> dict[Path, Recipe]:
    return {folder / str(number): recipe for number, recipe in enumerate(recipes)}


def test_finished_runs_are_left_as_they_are(recipes, whole):
    written = [(run / "result.json").stat().st_mtime_ns for run in whole]
    train_all(dict(zip(whole, recipes, strict=True)))
    assert written == [(run / "result.json").stat().st_mtime_ns for run in whole]


def test_another_recipe_is_not_overwritten(recipes, whole):
    with pytest.raises(FileExistsError, match="another recipe"):
        train_all({whole[0]: recipes[1]})


def test_differences():
    base = Recipe(loss="smooth")
    assert differences([base]) == [""]
    others = [base.with_changes({"tau": 0.5}), base.with_changes({"epochs": 3})]
    assert differences([base, *others]) == ["epochs 30", "tau 0.5, epochs 30", "epochs 3"]


def test_failed_runs_are_named():
    raise_failed({}, 2)
    with pytest.raises(ChildProcessError, match="1 of 2 runs failed: a: no disk"):
        raise_failed({Path("a"): OSError("no disk")}, 2)


def test_a_traceback_is_kept(recipes, tmp_path):
    """In the folder, where there can be one, until the run succeeds."""
    _, theirs = multiprocessing.Pipe(duplex=False)
    wrong = recipes[0].with_changes({"batch_size": 1000})
    file = tmp_path / "file"
    file.touch()
    in_run, in_file = (
        several._train(theirs, wrong, folder, []).error for folder in (tmp_path / "run", file)
    )
    error = tmp_path / "run" / "error.txt"
    assert "lower the batch size" in in_run
    assert in_run.endswith(f" (traceback in {error})")
    assert "Traceback" in error.read_text(encoding="utf-8")
    assert in_file == f"{file} is a file: choose a folder"
    right = recipes[0].with_changes({"epochs": 1})
    assert several._train(theirs, right, tmp_path / "run", []) == several.Ended()
    assert (tmp_path / "run" / "result.json").exists()
    assert not error.exists()


def test_progress_is_sent(recipes, tmp_path, monkeypatch):
    """If nobody is left to receive it, the run stops with a checkpoint."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    clock = iter(range(0, 10_000, 2))
    monkeypatch.setattr(several, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    train(recipes[0], tmp_path / "heard", callbacks=[several._SendProgress(theirs, 2)])
    received = []
    while ours.poll():
        received.append(ours.recv())
    assert [share for share, _ in received] == sorted(share for share, _ in received)
    assert received[-1][0] == 1.0
    assert "validation loss" in received[-1][1]
    ours.close()
    with pytest.raises(Interrupted, match="stopped after step 1"):
        train(recipes[0], tmp_path / "alone", callbacks=[several._SendProgress(theirs, 2)])
    assert (tmp_path / "alone" / "checkpoints" / "last.ckpt").exists()


@pytest.mark.slow
def test_the_same_as_one_by_one(recipes, whole, tmp_path, monkeypatch):
    """Also if a run was interrupted before, or follows one that failed in the same process."""
    wrong = recipes[0].with_changes({"batch_size": 1000})
    runs = in_folders([wrong, *recipes], tmp_path)
    _, first, _ = runs
    train_until(monkeypatch, 8, recipes[0], first, dataset=None)
    assert not is_finished(first, recipes[0])
    ended: list[Path] = []
    with pytest.raises(ChildProcessError, match=r"1 of 3 runs failed: .*0: .*lower the batch size"):
        train_all(runs, at_once=2, finished=ended.append)
    assert sorted(ended) == list(runs)[1:]
    for one, other in zip(whole, sorted(ended), strict=True):
        assert_same_weights(one, other)


@pytest.mark.slow
def test_an_error_here_stops_the_runs(recipes, tmp_path):
    """As if the disk were full when a run is recorded: the error arrives, and nothing trains on."""

    def full(folder: Path) -> None:
        raise OSError("no space")

    longer = recipes[0].with_changes({"epochs": 1000, "seed": 2})
    runs = in_folders([recipes[0], longer], tmp_path)
    of_other_tests = set(multiprocessing.active_children())
    with pytest.raises(OSError, match="no space"):
        train_all(runs, at_once=2, finished=full)
    assert [(run / "result.json").exists() for run in runs] == [True, False]
    assert set(multiprocessing.active_children()) <= of_other_tests


def in_group(runs: dict[Path, Recipe], script: Path) -> subprocess.Popen[bytes]:
    """A process with a group of its own that trains two runs at once."""
    script.write_text(
        "import os, signal, time, warnings; warnings.simplefilter('ignore')\n"
        "if __name__ == '__main__':\n"  # ignored in the background of a shell
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "else:\n"  # a process that starts
        "    os.write(1, b'starting\\n')\n"  # at once, as two of them may write
        "    time.sleep(0.5)\n"
        "from pathlib import Path\n"
        "from topklass.train import several\n"
        "from topklass.train.recipe import Recipe\n"
        "if __name__ == '__main__':\n"
        f"    runs = {{Path(folder): Recipe().with_changes(settings) for folder, settings in "
        f"{[(str(folder), vars(recipe)) for folder, recipe in runs.items()]!r}}}\n"
        "    try:\n"
        "        several.train_all(runs, at_once=2)\n"
        "    except several.Interrupted as stopped:\n"
        "        print(stopped)\n"
    )
    command = [sys.executable, str(script)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


@pytest.mark.slow
@posix
@pytest.mark.parametrize("to_all", [True, False])
def test_ctrl_c_while_processes_start(recipes, tmp_path, to_all):
    """Nothing is begun, and they end without a word; also if the first process alone hears it."""
    runs = in_folders(recipes, tmp_path / "runs")
    process = in_group(runs, tmp_path / "script.py")
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in runs] == [b"starting\n"] * len(runs)
    (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert output == b"stopped; the same command continues from there\n"
    assert process.returncode == 0
    assert not any(run.exists() for run in runs)


@pytest.fixture(scope="module")
def longer(recipes, tmp_path_factory):
    """Runs that take a while, finished."""
    runs = in_folders(
        [recipe.with_changes({"epochs": 30}) for recipe in recipes],
        tmp_path_factory.mktemp("longer"),
    )
    for run, recipe in runs.items():
        train(recipe, run)
    return runs


@pytest.mark.slow
@posix
@pytest.mark.parametrize("killed", [False, True])
def test_ctrl_c(longer, tmp_path, killed):
    """All runs stop with a checkpoint, also if the process that began them is killed.

    The same call goes on, to the same weights.
    """
    runs = in_folders(list(longer.values()), tmp_path)
    recipe = next(iter(runs.values()))
    waiting = in_folders([recipe.with_changes({"seed": 2})], tmp_path / "waiting")
    everything = {**runs, **waiting}
    process = in_group(everything, tmp_path / "script.py")
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        if all((run / "checkpoints" / "last.ckpt").exists() for run in runs):
            break
        time.sleep(0.01)
    if killed:
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)  # the runs have its output, and end with it
    assert killed or b"the same command continues" in output
    assert not any((run / "result.json").exists() for run in runs)
    assert not any(run.exists() for run in waiting)
    train_all(runs, at_once=2)
    for run, whole in zip(runs, longer, strict=True):
        assert_same_weights(run, whole)
