"""Runs: trained, interrupted, continued to the same weights, and recorded."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from topklass import topk_accuracy
from topklass._files import lock_folder
from topklass.data import Dataset, Split, hold_out
from topklass.train import Interrupted, Recipe, load_run, train
from topklass.train.details import read_result
from topklass.train.engine import predictions
from topklass.train.files import load_checkpoint
from topklass.train.module import Classifier
from topklass.train.restore import load_weights
from topklass.train.signature import build_network, signature_of
from topklass.train.trainer import MovingAverage, StopAfterStep

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and TensorBoard
CLASSES = 6
RECIPE = Recipe(k=2, epochs=3, batch_size=16, pad=1, learning_rate=0.02, loss="noised", samples=3)


def toy() -> Dataset:
    """Six noisy patterns of 8×8 pixels."""
    stream = torch.Generator().manual_seed(0)
    patterns = torch.randint(0, 256, (CLASSES, 1, 8, 8), generator=stream)

    def split(count: int) -> Split:
        labels = torch.arange(count) % CLASSES
        noise = 50 * torch.randn(count, 1, 8, 8, generator=stream)
        return Split((patterns[labels] + noise).clamp(0, 255).to(torch.uint8), labels)

    return hold_out(Dataset("toy", split(120), split(60), tuple("abcdef")), 24)


def weights(run: Path) -> dict[str, Tensor]:
    return load_checkpoint(run / "checkpoints" / "last.ckpt")["state_dict"]


def assert_same_weights(first: Path, second: Path) -> None:
    one, other = weights(first), weights(second)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def count_samples(**expected: int) -> None:
    """See that the steps of a process have so many samples."""
    for name, count in expected.items():
        real = getattr(Classifier, f"{name}_step")

        def checked(self, batch, index, real=real, count=count):
            assert len(batch[1]) == count
            return real(self, batch, index)

        setattr(Classifier, f"{name}_step", checked)


def stop_at(
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    error: type[Exception] | None,
    ask: Callable[[], object] | None = None,
) -> None:
    """Ask to stop in a step, or crash there."""
    real = StopAfterStep.on_train_batch_end

    def ends(self, trainer, *rest):
        if trainer.global_step == step:
            if error is not None:
                raise error
            if ask is None:
                self.asked = True
            else:
                ask()
        real(self, trainer, *rest)

    monkeypatch.setattr(StopAfterStep, "on_train_batch_end", ends)


TOY = toy()


def train_until(
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    recipe: Recipe,
    run: Path,
    dataset: Dataset | None = TOY,
) -> None:
    """Train, and be asked to stop in a step."""
    with monkeypatch.context() as patched:
        stop_at(patched, step, None)
        with pytest.raises(Interrupted, match="--resume"):
            train(recipe, run, dataset=dataset)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    train(RECIPE, run, dataset=toy())
    return run


def test_what_a_run_leaves(whole):
    result = json.loads((whole / "result.json").read_text())
    assert result["recipe"]["loss"] == "noised"
    accuracy = list(result["test"]["micro"].values())
    assert accuracy == sorted(accuracy)
    assert len(accuracy) == CLASSES
    assert accuracy[-1] == 1.0
    assert (whole / "recipe.yaml").exists()
    lines = (whole / "metrics.csv").read_text().splitlines()
    assert "validation/top2" in lines[0]
    assert any((whole / "tensorboard").iterdir())


def test_the_same_recipe_gives_the_same_weights(whole, tmp_path):
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    train(RECIPE, tmp_path / "again", dataset=toy())
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert_same_weights(whole, tmp_path / "again")


def test_learns(tmp_path):
    recipe = RECIPE.with_changes({"loss": "smooth", "samples": None, "epochs": 12})
    result = train(recipe, tmp_path / "run", dataset=toy())
    assert result["test"]["micro"]["2"] > 0.6  # by chance: one third


@pytest.mark.parametrize("step", [1, 6, 17])
def test_continued_after_an_interruption(whole, tmp_path, monkeypatch, step):
    """In the first step, at the end of an epoch, just before the end."""
    run = tmp_path / "run"
    train_until(monkeypatch, step, RECIPE, run)
    assert not (run / "result.json").exists()
    train(RECIPE, run, dataset=toy(), resume=True)
    assert_same_weights(whole, run)
    results = [json.loads((r / "result.json").read_text())["test"] for r in (whole, run)]
    assert results[0] == results[1]
    first, second = (json.loads((r / "details.json").read_text())["epochs"] for r in (whole, run))
    validation = [name for name in first[0] if name.startswith("validation")]
    assert len(first) == len(second) == RECIPE.epochs
    for one, other in zip(first, second, strict=True):
        assert [one[name] for name in validation] == [other[name] for name in validation]


def test_epochs_of_one_step_can_be_interrupted(tmp_path, monkeypatch):
    recipe = RECIPE.with_changes({"batch_size": 96})
    train(recipe, tmp_path / "whole", dataset=toy())
    with monkeypatch.context() as patched:
        stop_at(patched, 1, None)
        with pytest.raises(Interrupted, match="after step 1;"):
            train(recipe, tmp_path / "run", dataset=toy())
    train(recipe, tmp_path / "run", dataset=toy(), resume=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "run")


def test_a_stop_in_the_last_step_finishes(whole, tmp_path, monkeypatch):
    stop_at(monkeypatch, 18, None)
    train(RECIPE, tmp_path / "run", dataset=toy())
    assert_same_weights(whole, tmp_path / "run")


def test_continued_in_another_folder(tmp_path, monkeypatch):
    """The best checkpoint stays the best, and the times of both parts add up."""
    recipe, run = RECIPE.with_changes({"epochs": 2}), tmp_path / "run"
    perfect = torch.tensor(1.0)
    with monkeypatch.context() as patched:
        real = Classifier.log_dict
        patched.setattr(
            Classifier, "log_dict", lambda s, d, **o: real(s, dict.fromkeys(d, perfect), **o)
        )
        stop_at(patched, 8, None)
        with pytest.raises(Interrupted):
            train(recipe, run, dataset=toy())
    last = run / "checkpoints" / "last.ckpt"
    torch.save({**load_checkpoint(last), "seconds": 1000.0}, last)
    moved = shutil.move(run, tmp_path / "moved")
    result = train(recipe, moved, dataset=toy(), resume=True)
    assert result["epoch"] == 0
    assert 1000 <= result["seconds"] < 1500  # a tenth of a second may be all


def test_a_finished_run_is_left_as_it_is(whole):
    result = (whole / "result.json").read_text()
    assert train(RECIPE, whole, dataset=toy(), resume=True) == read_result(whole)
    assert (whole / "result.json").read_text() == result


def test_a_crash_between_an_epoch_and_its_validation(whole, tmp_path, monkeypatch):
    """The last checkpoint is the one before, though it was time for another."""
    run = tmp_path / "run"

    def crash(self):
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr("topklass.train.trainer.KEEP_EVERY", timedelta(microseconds=1))
        patched.setattr(Classifier, "on_validation_start", crash)
        with pytest.raises(ZeroDivisionError):
            train(RECIPE, run, dataset=toy())
    assert load_checkpoint(run / "checkpoints" / "last.ckpt")["global_step"] == 5
    train(RECIPE, run, dataset=toy(), resume=True)
    assert_same_weights(whole, run)


def test_continued_after_a_crash(whole, tmp_path, monkeypatch):
    """From the last checkpoint, that of the epoch before."""
    run = tmp_path / "run"
    with monkeypatch.context() as patched:
        stop_at(patched, 10, ZeroDivisionError)
        with pytest.raises(ZeroDivisionError):
            train(RECIPE, run, dataset=toy())
    train(RECIPE, run, dataset=toy(), resume=True)
    assert_same_weights(whole, run)


def test_averaged_weights(tmp_path, monkeypatch):
    """They are what is tested and kept, also over an interruption."""
    recipe = RECIPE.with_changes({"ema": 0.9, "cutout": 2})
    whole, run = tmp_path / "whole", tmp_path / "run"
    record = train(recipe, whole, dataset=toy())
    train_until(monkeypatch, 8, recipe, run)
    assert record["test"] == train(recipe, run, dataset=toy(), resume=True)["test"]
    assert_same_weights(whole, run)
    best = load_checkpoint(whole / "checkpoints" / "best.ckpt")
    averaged, current = best["state_dict"], best["current_model_state"]
    assert any(not torch.equal(value, current[name]) for name, value in averaged.items())
    loaded = load_run(whole, toy())
    for name, value in loaded.network.state_dict().items():
        assert torch.equal(value.cpu(), averaged[f"network.{name}"]), name
    logits = predictions(recipe, loaded.network, loaded.dataset.test)
    found = topk_accuracy(logits, loaded.dataset.test.labels, 2).item()
    assert record["test"]["micro"]["2"] == found
    validated = predictions(recipe, loaded.network, loaded.dataset.validation)
    top2 = topk_accuracy(validated, loaded.dataset.validation.labels, 2).item()
    epochs = json.loads((whole / "details.json").read_text())["epochs"]
    assert top2 == pytest.approx(epochs[best["epoch"]]["validation/top2"])


def test_mixed_images(whole, tmp_path, monkeypatch):
    """Some are, and the same after an interruption."""
    recipe = RECIPE.with_changes({"cutmix": 0.3, "mixup": 0.3})
    run, other = tmp_path / "run", tmp_path / "other"
    seen = []
    real = Classifier._mixed

    def mixed(module: Classifier, images: Tensor, labels: Tensor):
        images, target = real(module, images, labels)
        seen.append(1.0 if isinstance(target, Tensor) else float(target.weights[0, 0]))
        return images, target

    monkeypatch.setattr(Classifier, "_mixed", mixed)
    train(recipe, run, dataset=toy())
    shares = list(seen)
    assert 0 < sum(share < 1 for share in shares) < len(shares)
    train_until(monkeypatch, 8, recipe, other)
    train(recipe, other, dataset=toy(), resume=True)
    assert seen[len(shares) :] == shares
    assert_same_weights(run, other)
    assert any(not torch.equal(each, weights(whole)[name]) for name, each in weights(run).items())


@pytest.mark.parametrize("mixing", [{}, {"cutmix": 1.0}, {"mixup": 1.0}], ids=str)
@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("cross-entropy", {}),
        ("topk-cross-entropy", {"first_guess": 0.3}),
        ("smooth", {"label_smoothing": 0.1}),
        ("smooth", {"logit_adjustment": 1.0}),
    ],
)
def test_the_loss_of_mixed_images(loss, options, mixing):
    """Against that of class probabilities."""
    recipe = Recipe(loss=loss, k=2, **options, **mixing)
    criterion = recipe.criterion(torch.arange(1, CLASSES + 1))
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, CLASSES))
    module = Classifier(network, criterion, recipe, CLASSES, 1)
    module.log = lambda *_, **__: None
    images, labels = torch.randn(9, 1, 8, 8), torch.arange(9) % CLASSES
    found = module.training_step((images, labels), 0)
    mixed, target = module._mixed(images, labels)
    soft = (
        target.to_dense(CLASSES) if mixing else torch.nn.functional.one_hot(labels, CLASSES) + 0.0
    )
    torch.testing.assert_close(found, criterion(network(mixed), soft))
    assert torch.equal(target.indices[:, 0] if mixing else target, labels)
    pixels = (images.unsqueeze(1) - mixed).abs().amin(1) < 1e-6
    assert pixels.all() == (not recipe.mixup)  # each is one of the images, unless they are blended


def test_a_moving_average():
    """Against the recurrence, for weights and counts."""
    network = torch.nn.BatchNorm1d(2)
    averaging = MovingAverage(0.5)
    averaged = torch.optim.swa_utils.AveragedModel(network, use_buffers=True, **averaging._kwargs)
    expected = 0.0  # the first update copies
    for step in range(30):
        with torch.no_grad():
            network.weight.fill_(float(step))
            network.num_batches_tracked.fill_(step)
        averaged.update_parameters(network)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
        assert averaged.module.weight[0].item() == pytest.approx(expected)
        assert averaged.module.num_batches_tracked == step


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_two_processes(tmp_path):
    """Their validation accuracy is that of one process with the same weights, and they agree."""
    run, script = tmp_path / "run", tmp_path / "script.py"
    script.write_text(
        "import warnings; warnings.simplefilter('ignore')\n"
        "from pathlib import Path\n"
        "import test_train_engine as t\n"
        "t.count_samples(training=8, validation=12)\n"
        "recipe = t.RECIPE.with_changes({'devices': 2, 'strategy': 'ddp'})\n"
        f"t.train(recipe, Path({str(run)!r}), dataset=t.toy())\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, str(script)], env={**os.environ, "PYTHONPATH": path}, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    checkpoint = load_checkpoint(run / "checkpoints" / "last.ckpt")
    assert checkpoint["global_step"] == 18
    dataset = toy()
    network = build_network(RECIPE, signature_of(RECIPE, dataset))
    load_weights(network, checkpoint)
    logits, labels = predictions(RECIPE, network, dataset.validation), dataset.validation.labels
    with (run / "metrics.csv").open() as file:
        logged = [row["validation/top2"] for row in csv.DictReader(file)]
    last = [float(value) for value in logged if value][-1]
    assert last == pytest.approx(topk_accuracy(logits, labels, 2).item())


def test_errors(whole, tmp_path):
    with pytest.raises(FileExistsError, match="--resume"):
        train(RECIPE, whole, dataset=toy())
    with pytest.raises(
        ValueError, match="another recipe than the one given, epochs 5 instead of 3:"
    ):
        train(RECIPE.with_changes({"epochs": 5}), whole, dataset=toy(), resume=True)
    with pytest.raises(FileNotFoundError, match="no run to continue"):
        train(RECIPE, tmp_path / "none", dataset=toy(), resume=True)


def test_data_of_ones_own(tmp_path):
    """Validation images are held out; the run is not mistaken for one on the recipe's data."""
    whole = toy()
    run = str(tmp_path / "run")
    record = train(RECIPE, run, dataset=Dataset("mine", whole.train, whole.test, whole.classes))
    assert record["data"]["name"] == "mine"
    assert load_run(Path(run), whole).network is not None
    other = Dataset("other", whole.train, whole.test, tuple("ABCDEF"))
    with pytest.raises(ValueError, match="other classes than other has"):
        load_run(Path(run), other)


def test_a_start_that_failed_can_be_repeated(tmp_path):
    wrong = RECIPE.with_changes({"strategy": "no such"})
    with pytest.raises(ValueError, match="no such"):
        train(wrong, tmp_path / "run", dataset=toy())
    train(RECIPE, tmp_path / "run", dataset=toy())


def test_says_what_is_trained(tmp_path):
    console = Console(record=True, width=200)
    train(RECIPE, tmp_path / "run", dataset=toy(), console=console)
    said = console.export_text()
    assert "toy: 6 classes; 96 training, 24 validation, 60 test images; convnet, 0.28 M" in said
    assert said.count("validation loss") == RECIPE.epochs


def test_a_new_run_does_not_continue_what_lies_there(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole / "checkpoints", run / "checkpoints")
    train(RECIPE.with_changes({"seed": 1}), run, dataset=toy())
    old = weights(whole)
    assert any(not torch.equal(value, old[name]) for name, value in weights(run).items())


def test_one_process_at_a_time(tmp_path):
    """Two would write the same checkpoints."""
    with lock_folder(tmp_path / "run"), pytest.raises(OSError, match="another process works in"):
        train(Recipe(), tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="no run to continue"):
        train(Recipe(), tmp_path / "some" / "where", resume=True)
    assert not list(tmp_path.iterdir())
