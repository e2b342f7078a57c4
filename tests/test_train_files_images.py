"""Runs on image folders: trained, interrupted, continued to the same weights, evaluated."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from image_folders import CLASSES, write_folder
from test_train_engine import assert_same_weights, stop_at
from topklass.data import IMAGENET, Dataset, Split, read_image_folder
from topklass.train import Interrupted, Recipe, evaluate, load_run, prepare_data, train
from topklass.train.engine import predictions, training_batches
from topklass.train.files import load_checkpoint
from topklass.train.signature import build_network, load_signature, signature_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, TensorBoard and few cores
RECIPE = Recipe(
    k=2, epochs=3, batch_size=18, crop=12, resize=14, learning_rate=0.02, flip=False, workers=1
)


def recipe_for(folder: Path, **changes: object) -> Recipe:
    return RECIPE.with_changes({"data": str(folder), **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("images") / "toy")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    train(recipe_for(folder), run)
    return run


@pytest.mark.slow
def test_learns(folder, tmp_path):
    result = train(recipe_for(folder, epochs=5, workers=0), tmp_path / "run")
    assert result["test"]["micro"]["2"] > 0.6  # by chance: one third


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, pytest.param(6, marks=pytest.mark.slow)])
def test_continued_after_an_interruption(folder, whole, tmp_path, monkeypatch, step):
    """In the first step, at the end of an epoch, in the middle of one."""
    run = tmp_path / "run"
    with monkeypatch.context() as patched:
        stop_at(patched, step, None)
        with pytest.raises(Interrupted):
            train(recipe_for(folder), run)
    train(recipe_for(folder), run, resume=True)
    assert_same_weights(whole, run)


@pytest.mark.slow
def test_a_broken_training_image_costs_little(folder, whole, tmp_path):
    """It is named; replaced, the run goes on to the same weights."""
    original = folder / "train" / "class 3" / "7.png"
    content = original.read_bytes()
    run = tmp_path / "run"
    try:
        original.write_bytes(content[:100])
        with pytest.raises(ValueError, match=r"class 3.7\.png cannot be read .*--resume"):
            train(recipe_for(folder), run)
    finally:
        original.write_bytes(content)
    train(recipe_for(folder), run, resume=True)
    assert_same_weights(whole, run)


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_broken_test_image_is_found_before_training(tmp_path, split):
    folder = write_folder(tmp_path / "toy", train=4, others=1)
    (folder / split / "class 3" / "0.png").write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"class 3.0\.png cannot be read"):
        train(recipe_for(folder, workers=0), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_test_image_that_breaks_later_does_not_cost_the_run(tmp_path, monkeypatch):
    """The weights are there, and --resume finishes what is left."""
    folder, run = write_folder(tmp_path / "toy", train=4, others=2), tmp_path / "run"
    recipe = recipe_for(folder, epochs=1, workers=0)
    broken = folder / "test" / "class 0" / "0.png"
    content = broken.read_bytes()
    monkeypatch.setattr(
        "topklass.train.engine.require_readable", lambda *_: broken.write_bytes(b"")
    )
    with pytest.raises(ValueError, match=r"0\.png cannot be read .*--resume"):
        train(recipe, run)
    before = load_checkpoint(run / "checkpoints" / "last.ckpt")
    broken.write_bytes(content)
    assert train(recipe, run, resume=True)["test"]["micro"]["6"] == 1.0
    after = load_checkpoint(run / "checkpoints" / "last.ckpt")
    assert before["global_step"] == after["global_step"] == 1


def test_evaluate(folder, whole):
    result = json.loads((whole / "result.json").read_text())
    run = load_run(whole)
    record = evaluate(run)
    assert record["accuracy"]["micro"] == list(result["test"]["micro"].values())
    assert record["views"]["number"] == 5
    mirrored = evaluate(run._replace(recipe=run.recipe.with_changes({"flip": True})))
    assert mirrored["views"]["number"] == 10
    assert mirrored["views"]["one"] == pytest.approx(result["test"]["micro"]["2"])


def test_views_are_averaged(folder, whole):
    """By hand, with all logits at once."""
    from topklass.data import fixed_views

    run = load_run(whole)
    test, k = run.dataset.test, run.recipe.k
    views = torch.stack([fixed_views(picture, resize=14, crop=12)[:5] for picture, _ in test])
    with torch.no_grad():
        logits = run.network(views.flatten(0, 1)).unflatten(0, views.shape[:2])
    lists = logits.softmax(-1).mean(1).topk(k).indices
    share = (lists == test.labels[:, None]).any(1).float().mean().item()
    assert evaluate(run)["views"]["softmax"] == pytest.approx(share)


def test_the_signature(folder, whole):
    signature = load_signature(whole / "signature.json")
    assert signature == signature_of(recipe_for(folder), read_image_folder(folder))
    assert signature.classes == tuple(f"class {label}" for label in range(CLASSES))
    assert (signature.channels, signature.height, signature.width) == (3, 12, 12)
    assert signature.resize == 14
    torch.testing.assert_close(
        torch.tensor([signature.mean, signature.std]), torch.tensor(IMAGENET)
    )
    with pytest.raises(FileNotFoundError, match=r"there is no .*none\.json"):
        load_signature(whole / "none.json")


def test_grey_pictures():
    class Pictures:
        def __len__(self):
            return 12

        def __getitem__(self, index):
            return torch.full((1, 16, 16), 20 * index, dtype=torch.uint8)

        def take(self, indices):
            return self

    split = Split(Pictures(), torch.arange(12) % CLASSES)
    dataset = Dataset("grey", split, split, tuple("abcdef"), split)
    recipe = RECIPE.with_changes({"workers": 0})
    signature = signature_of(recipe, dataset)
    assert signature.channels == 1
    assert signature.mean == pytest.approx((0.449,), abs=1e-3)
    logits = predictions(recipe, build_network(recipe, signature_of(recipe, dataset)), split)
    assert logits.shape == (12, CLASSES)


def test_a_network_that_cannot_take_the_crops(folder, tmp_path):
    with pytest.raises(ValueError, match="cannot take images of 12×12"):
        train(recipe_for(folder, model="alexnet"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_held_out_subsets_and_noise_of_files(tmp_path):
    folder = write_folder(tmp_path / "toy")
    for image in (folder / "val").rglob("*.png"):
        image.unlink()
    for each in sorted((folder / "val").iterdir()):
        each.rmdir()
    (folder / "val").rmdir()
    recipe = recipe_for(folder, noise=0.5, noise_kind="symmetric", subset=36, validation=12)
    dataset = prepare_data(recipe)
    assert [len(split) for split in dataset.splits.values()] == [36, 12, 24]
    images, labels = next(iter(training_batches(recipe, dataset.train)))
    assert (images.shape, labels.shape) == ((18, 3, 12, 12), (18,))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_leaves_a_checkpoint(folder, whole, tmp_path, number):
    """Ctrl-C reaches the workers too; they read on until the main process has ended the step."""
    run = tmp_path / "run"
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import time\n"
        "from pathlib import Path\n"
        "import test_train_files_images as t\n"
        "from topklass.train.module import Classifier\n"
        "real = Classifier.training_step\n"
        "def slow(self, batch, index):\n"
        f"    Path({str(tmp_path / 'began')!r}).touch()\n"
        "    time.sleep(0.5)\n"
        "    return real(self, batch, index)\n"
        "Classifier.training_step = slow\n"
        f"t.train(t.recipe_for(Path({str(folder)!r})), Path({str(run)!r}))\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
        stderr=subprocess.PIPE,
    )
    until = time.monotonic() + 120
    while not (tmp_path / "began").exists() and time.monotonic() < until:
        time.sleep(0.02)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=120)
    assert "Interrupted: stopped after step" in errors.decode()
    assert "DataLoader worker" not in errors.decode()
    train(recipe_for(folder), run, resume=True)
    assert_same_weights(whole, run)
