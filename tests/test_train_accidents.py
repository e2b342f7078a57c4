"""Accidents to runs: what is broken is named, what is whole is used, and nothing is lost."""

import csv
import errno
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile, is_zipfile

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from image_folders import write_folder
from test_cli import npz, run, settings  # noqa: F401 a fixture
from test_train_engine import (
    RECIPE,
    assert_same_weights,
    stop_at,
    toy,
    train_until,
    whole,  # noqa: F401 a fixture
)
from topklass.data import load
from topklass.train import Interrupted, files, load_run, train
from topklass.train.details import read_details, read_result
from topklass.train.file_batches import FileEvaluationBatches, naming_lost_workers
from topklass.train.files import SafeCheckpoints, load_checkpoint
from topklass.train.recipe import has_changed, load_recipe
from topklass.train.records import BrokenFileError
from topklass.train.signature import load_signature
from topklass.train.trainer import AfterEpochs, ModelCheckpoint, StopAfterStep

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and TensorBoard
LAST, BEST = Path("checkpoints/last.ckpt"), Path("checkpoints/best.ckpt")


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file, or of a checkpoint's largest tensor.

    Between tensors there is padding, where it changes nothing.
    """
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    if is_zipfile(path):
        with ZipFile(path) as parts:
            tensor = parts.read(max(parts.infolist(), key=lambda part: part.file_size))
        middle = content.index(tensor) + len(tensor) // 2
    content[middle] ^= 1
    path.write_bytes(content)


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def stopped(tmp_path, monkeypatch) -> Path:
    """A run that was stopped in its last epoch."""
    train_until(monkeypatch, 15, RECIPE, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def finished(whole, tmp_path) -> Path:  # noqa: F811 a fixture
    """A copy of a finished run."""
    return shutil.copytree(whole, tmp_path / "finished")


def test_the_table_of_epochs_is_continued(whole, stopped):  # noqa: F811 a fixture
    assert [row["epoch"] for row in table(stopped)] == ["1", "2"]
    train(RECIPE, stopped, dataset=toy(), resume=True)
    assert table(stopped) == table(whole)
    assert [row["epoch"] for row in table(whole)] == ["1", "2", "3"]
    assert all(float(row["validation/top2"]) <= 1 for row in table(whole))


def test_rows_without_a_checkpoint_are_replaced(whole, tmp_path, monkeypatch):  # noqa: F811
    """As if the process was killed when it had written the second row, not its checkpoint."""
    real, other = ModelCheckpoint.on_train_epoch_end, tmp_path / "run"

    def killed(self, trainer, module):
        if isinstance(self, AfterEpochs) and trainer.current_epoch == 1:
            raise ZeroDivisionError
        real(self, trainer, module)

    with monkeypatch.context() as patched:
        patched.setattr(ModelCheckpoint, "on_train_epoch_end", killed)
        with pytest.raises(ZeroDivisionError):
            train(RECIPE, other, dataset=toy())
    assert len(table(other)) == 2
    assert load_checkpoint(other / LAST)["epoch"] == 0
    train(RECIPE, other, dataset=toy(), resume=True)
    assert table(other) == table(whole)


def test_a_flipped_bit_in_the_last_checkpoint(whole, stopped):  # noqa: F811 a fixture
    flip(stopped / LAST)
    with pytest.warns(UserWarning, match=r"last\.ckpt is broken: .*last\.ckpt\.before taken"):
        train(RECIPE, stopped, dataset=toy(), resume=True)
    assert_same_weights(whole, stopped)


def test_a_flipped_bit_in_the_best_checkpoint(finished):
    """The one that was best before is another network, so it is not used."""
    shutil.copy(finished / BEST, finished / f"{BEST}.before")
    flip(finished / BEST)
    with pytest.raises(BrokenFileError, match=r"best\.ckpt is broken.*train again"):
        load_run(finished, toy())


def test_a_result_is_never_of_another_epoch(finished):
    """As the one before the best would be, if the best is broken when training ends."""
    (finished / "result.json").unlink()
    shutil.copy(finished / BEST, finished / f"{BEST}.before")
    flip(finished / BEST)
    with pytest.raises(BrokenFileError, match=r"best\.ckpt is broken.*train again"):
        train(RECIPE, finished, dataset=toy(), resume=True)
    assert not (finished / "result.json").exists()


def test_a_network_that_there_is_not_names_the_recipe(stopped):
    other = RECIPE.with_changes({"model": "conrnet"})
    other.save(stopped / "recipe.yaml")
    message = r"recipe\.yaml cannot be used: there is no network 'conrnet'"
    with pytest.raises(BrokenFileError, match=message):
        train(other, stopped, dataset=toy(), resume=True)
    with pytest.raises(BrokenFileError, match=message):
        load_run(stopped, toy())


def test_other_data_are_not_continued(stopped):
    data, signature = toy(), stopped / "signature.json"
    content = signature.read_bytes()
    images = 255 - data.train.images
    other = replace(data, train=replace(data.train, images=images))
    with pytest.raises(ValueError, match=r"changed since .*signature\.json .*: mean was \(0\."):
        train(RECIPE, stopped, dataset=other, resume=True)
    assert signature.read_bytes() == content
    signature.write_bytes(content[:100])  # it is made again
    train(RECIPE, stopped, dataset=data, resume=True)
    assert signature.read_bytes() == content


def test_data_options_that_do_not_fit_name_the_recipe(stopped):
    path = stopped / "recipe.yaml"
    path.write_text(path.read_text().replace("data_options: {}", "data_options: {classds: 10}"))
    recipe = load_recipe(path)
    with pytest.raises(BrokenFileError, match=r"recipe\.yaml cannot be used.*no option classds"):
        train(recipe, stopped, resume=True)


def test_data_that_are_not_there_name_the_recipe(stopped):
    moved = RECIPE.with_changes({"data": "elsewhere"})
    moved.save(stopped / "recipe.yaml")
    message = r"recipe\.yaml cannot be used: there is no data 'elsewhere'.*change `data`"
    with pytest.raises(BrokenFileError, match=message):
        train(moved, stopped, resume=True)
    with pytest.raises(BrokenFileError, match=message):
        load_run(stopped)


@pytest.mark.parametrize(
    ("first", "raised"), [(KeyboardInterrupt, Interrupted), (ZeroDivisionError, OSError)]
)
def test_a_logger_that_ctrl_c_has_closed(monkeypatch, tmp_path, first, raised):
    """It is an interruption; any other error of a file is an error."""

    def closed(*_):
        try:
            raise first
        finally:
            raise OSError("Writer is closed")

    monkeypatch.setattr(StopAfterStep, "on_train_batch_end", closed)
    with pytest.raises(raised):
        train(RECIPE, tmp_path / "run", dataset=toy())


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), OSError, "free some space.*--resume"),
        (RuntimeError("DataLoader worker (pid 7) is killed"), ChildProcessError, "--resume"),
        (ZeroDivisionError("of a number"), ZeroDivisionError, "of a number"),
    ],
)
def test_errors_while_lightning_logs(monkeypatch, tmp_path, error, raised, message):
    """TensorBoard tells of a full disk there, and the end of a reader may fall into it."""

    def fail(*_):
        raise error

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", fail)
    with pytest.raises(raised, match=message):
        train(RECIPE, tmp_path / "run", dataset=toy())


def test_what_a_killed_process_had_begun(stopped):
    left = [stopped / "result.json.17.part", stopped / f"{LAST}.new.17.part"]
    for path in left:
        path.touch()
    train(RECIPE, stopped, dataset=toy(), resume=True)
    assert not list(stopped.rglob("*.part"))


def test_a_checkpoint_that_was_not_put_in_place(finished):
    """Killed between the two renames at the very end, then continued."""
    (finished / LAST).rename(finished / f"{LAST}.new")
    (finished / "result.json").unlink()
    train(RECIPE, finished, dataset=toy(), resume=True)
    assert (finished / LAST).exists()
    assert not (finished / f"{LAST}.new").exists()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("result.json", flip),
        ("details.json", Path.unlink),
        ("signature.json", lambda path: path.write_text("")),
        ("metrics.csv", flip),
    ],
)
def test_records_are_made_again(whole, finished, name, damage):  # noqa: F811 a fixture
    damage(finished / name)
    if name == "metrics.csv":  # nobody reads it: it is made again with the others
        damage(finished / "result.json")
    train(RECIPE, finished, dataset=toy(), resume=True)
    assert read_result(finished)["test"] == read_result(whole)["test"]
    assert read_details(finished) == read_details(whole)
    assert load_signature(finished / "signature.json") == load_signature(whole / "signature.json")
    assert table(finished) == table(whole)
    assert_same_weights(whole, finished)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold settings"),
        ("k: [", "ParserError"),
        ("k: 2\nepochs: 3\nloss: cross-entropy\n", "is not what .* trained with: .*loss cross-ent"),
    ],
)
def test_another_recipe_in_the_folder(stopped, text, message):
    """Also one that is cut off: what is missing would have its default."""
    (stopped / "recipe.yaml").write_text(text)
    with pytest.raises(BrokenFileError, match=rf"recipe\.yaml .*{message}"):
        load_run(stopped, toy())


def test_a_changed_recipe_is_not_continued(stopped):
    changed = RECIPE.with_changes({"learning_rate": 0.03})
    changed.save(stopped / "recipe.yaml")
    expected = r"recipe\.yaml is not what last\.ckpt was .*: learning_rate 0\.03 instead of 0\.02"
    with pytest.raises(BrokenFileError, match=expected):
        train(changed, stopped, dataset=toy(), resume=True)


def test_a_changed_recipe_without_a_checkpoint(tmp_path):
    """It cannot be compared with that of a checkpoint, but has a checksum."""
    run, path = tmp_path / "run", tmp_path / "run" / "recipe.yaml"
    run.mkdir()
    RECIPE.save(path)
    content = path.read_text()
    path.write_text(content.replace("weight_decay: 0.0005", "weight_decay: 0.0004"))
    with pytest.raises(BrokenFileError, match=r"recipe\.yaml has changed .* without --resume"):
        train(load_recipe(path), run, dataset=toy(), resume=True)
    path.write_text(content)
    assert train(RECIPE, run, dataset=toy(), resume=True)
    path.write_text("weight_decay: 0.0004")
    assert not has_changed(path)


def test_data_and_devices_may_move(stopped):
    moved = RECIPE.with_changes({"data": "elsewhere", "workers": 3})
    moved.save(stopped / "recipe.yaml")
    train(moved, stopped, dataset=toy(), resume=True)


def foreign(folder: Path, changes: dict[str, object]) -> None:
    """The checkpoints of another recipe in a run."""
    other = folder.with_name("other")
    train(RECIPE.with_changes({"epochs": 1, **changes}), other, dataset=toy())
    for path in (LAST, BEST):
        (folder / f"{path}.before").unlink(missing_ok=True)
        checkpoint = load_checkpoint(other / path)
        del checkpoint["recipe"]  # of an older version, which kept none
        SafeCheckpoints().remove_checkpoint(folder / path)
        SafeCheckpoints().save_checkpoint(checkpoint, folder / path)


def test_a_checkpoint_of_another_network(stopped):
    foreign(stopped, {"head": "cosine"})
    for use in (
        lambda: load_run(stopped, toy()),
        lambda: train(RECIPE, stopped, dataset=toy(), resume=True),
    ):
        with pytest.raises(BrokenFileError, match=r"\.ckpt is not a checkpoint of this run: Runt"):
            use()


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ({"model": {}}, "it has no state_dict"),
        ({"state_dict": {}, "epoch": 1}, "it has no global_step"),
        ([1, 2], "it has a list, not a checkpoint"),
    ],
)
def test_a_checkpoint_of_another_program(stopped, checkpoint, message):
    (stopped / f"{LAST}.before").unlink()
    torch.save(checkpoint, stopped / LAST)
    with pytest.raises(BrokenFileError, match=rf"last\.ckpt is .*{message}"):
        train(RECIPE, stopped, dataset=toy(), resume=True)


def test_runs_that_are_not_finished(stopped, tmp_path, monkeypatch):
    with pytest.warns(UserWarning, match=r"is not finished: .* epoch [12] of 3; .*--resume"):
        load_run(stopped, toy())
    train_until(monkeypatch, 2, RECIPE, tmp_path / "short")
    with pytest.raises(FileNotFoundError, match=r"no checkpoint .*best\.ckpt.*--resume --folder"):
        load_run(tmp_path / "short", toy())


def test_a_limit_of_file_sizes(monkeypatch, capsys, npz, tmp_path):  # noqa: F811 a fixture
    """As a full disk: one sentence, and the run can be continued."""
    resource = pytest.importorskip("resource")
    folder = tmp_path / "run"
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, previous[1]))
    try:
        assert run(monkeypatch, "train", *settings(npz), "--folder", str(folder)) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)
    expected = (
        f"Error: cannot write {folder / BEST}.new: File too large; raise the limit of file sizes "
        "(ulimit -f), and continue with --resume\n"
    )
    assert capsys.readouterr().err == expected
    assert run(monkeypatch, "train", "--resume", "--folder", str(folder)) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal(monkeypatch, capsys, npz, tmp_path, number):  # noqa: F811 a fixture
    """The exit status is that of shells; the handlers are those before."""
    folder = tmp_path / "run"
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patched:
        stop_at(patched, 3, None, lambda: os.kill(os.getpid(), number))
        status = run(patched, "train", *settings(npz), "--folder", str(folder))
    assert status == 128 + number
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    said = capsys.readouterr()
    assert f"stopped after step 3; continue with --resume --folder {folder}" in said.out
    assert not said.err


@pytest.mark.parametrize(
    ("number", "write"), [(signal.SIGINT, 1), (signal.SIGTERM, 20), (signal.SIGINT, 60)]
)
def test_a_signal_twice_in_a_checkpoint(monkeypatch, capsys, npz, tmp_path, number, write):  # noqa: F811
    """Wherever it is written; the one before stays whole, and PyTorch's own error is not shown."""
    folder, real = tmp_path / "run", torch.save

    def interrupted(checkpoint, file):
        if checkpoint["global_step"] < 8:
            return real(checkpoint, file)
        count, put = 0, file.write

        def signals(data):
            nonlocal count
            count += 1
            if count == write:
                os.kill(os.getpid(), number)
                os.kill(os.getpid(), number)
            return put(data)

        file.write = signals
        return real(checkpoint, file)

    with monkeypatch.context() as patched:
        patched.setattr(files.torch, "save", interrupted)
        assert run(patched, "train", *settings(npz), "--folder", str(folder)) == 128 + number
    said = capsys.readouterr()
    assert f"continue from the last checkpoint with --resume --folder {folder}" in said.out
    assert not said.err
    assert load_checkpoint(folder / LAST)["global_step"] == 5
    assert not list(folder.rglob("*.part"))
    assert run(monkeypatch, "train", "--resume", "--folder", str(folder)) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals of POSIX")
def test_a_reader_that_is_killed(tmp_path):
    folder = write_folder(tmp_path / "toy")
    pictures = load(str(folder)).train.images
    labels = torch.zeros(len(pictures), dtype=torch.int64)
    batches = FileEvaluationBatches(pictures, labels, 2, killing_view, workers=1)
    with pytest.raises(ChildProcessError, match=r"has ended.*DataLoader worker.*--workers"):
        list(batches)


def test_a_reader_without_shared_memory(tmp_path):
    """The reason is the last line of the worker's traceback."""
    pictures = load(str(write_folder(tmp_path / "toy"))).train.images
    labels = torch.zeros(len(pictures), dtype=torch.int64)
    batches = FileEvaluationBatches(pictures, labels, 2, failing_view, workers=1)
    with pytest.raises(ChildProcessError, match=r"\(RuntimeError: unable to resize\): take fewer"):
        list(batches)


@pytest.mark.parametrize("error", [ConnectionResetError(104, "reset by peer"), EOFError()])
def test_a_reader_that_has_just_ended(error):
    """PyTorch has not noticed yet."""
    message = r"reads images has ended.*(peer|EOFError).*--workers"
    with pytest.raises(ChildProcessError, match=message), naming_lost_workers():
        raise error
    with pytest.raises(FileNotFoundError), naming_lost_workers():
        raise FileNotFoundError


def failing_view(picture: object) -> torch.Tensor:
    """A view that there is no memory for."""
    raise RuntimeError("unable to resize")


def killing_view(picture: object) -> torch.Tensor:
    """A view that ends the process which takes it."""
    os.kill(os.getpid(), signal.SIGKILL)
    return torch.empty(0)


@pytest.mark.slow
def test_more_devices_than_there_are(monkeypatch, tmp_path):
    def missing(**_: object) -> None:
        raise MisconfigurationException("You requested gpu: [0, 1]\n But your machine has: [0]")

    monkeypatch.setattr("lightning.Trainer", missing)
    with pytest.raises(ValueError, match=r"requested gpu: \[0, 1\] But your machine has"):
        train(RECIPE, tmp_path / "run", dataset=toy())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs signals of POSIX")
def test_ctrl_c_twice_in_a_process_of_its_own(npz, tmp_path):  # noqa: F811 a fixture
    """In the start, in training and at the end; never a traceback after the first imports."""
    command = [sys.executable, "-m", "topklass", "train", *settings(npz), "--epochs", "40"]
    for wait in (1, 2, 5, 30):
        folder = tmp_path / str(wait)
        process = subprocess.Popen(
            [*command, "--folder", str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(wait)]
        for _ in range(2):
            process.send_signal(signal.SIGINT)
        output = "".join([*lines, process.communicate(timeout=60)[0]])
        assert "Traceback" not in output
        assert process.returncode == 130
