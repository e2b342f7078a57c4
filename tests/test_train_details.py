"""What a run leaves for comparisons: ranks, counts, gradients, epochs despite interruptions."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from test_train_engine import CLASSES, RECIPE, toy, train_until
from topklass.data import Dataset
from topklass.train import Recipe, compare, train
from topklass.train.criterion import build_loss
from topklass.train.details import details
from topklass.train.module import Classifier

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and TensorBoard


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    train(RECIPE, run, dataset=toy())
    return run


def epochs(run: Path) -> list[dict[str, float]]:
    found: list[dict[str, float]] = json.loads((run / "details.json").read_text())["epochs"]
    return found


def test_accuracies_of_ranks(whole):
    result = json.loads((whole / "result.json").read_text())
    (run,) = compare([whole]).runs
    for average, accuracy in result["test"].items():
        for k, share in accuracy.items():
            assert run.accuracy(int(k), average).item() == pytest.approx(share)
    assert run.counts.tolist() == toy().counts.tolist()
    assert run.classes == tuple("abcdef")


def test_all_epochs(whole):
    found = epochs(whole)
    assert [row["epoch"] for row in found] == [1, 2, 3]
    names = {f"{split}/{what}" for split in ("train", "validation") for what in ("top1", "top2")}
    assert all(names < row.keys() for row in found)
    best = json.loads((whole / "result.json").read_text())["epoch"]
    assert found[best]["validation/top2"] == max(row["validation/top2"] for row in found)


def test_epochs_before_an_interruption_are_kept(whole, tmp_path, monkeypatch):
    """Lightning's own log forgets them, and the first steps of the one that was broken off."""
    run = tmp_path / "run"
    train_until(monkeypatch, 14, RECIPE, run)
    train(RECIPE, run, dataset=toy(), resume=True)
    assert epochs(run) == epochs(whole)


def test_the_step_scales_the_loss():
    criterion = build_loss("smooth", 2, torch.ones(CLASSES), {})
    recipe = Recipe(loss="smooth", k=2)
    module = Classifier(nn.Flatten(), criterion, recipe, CLASSES, steps=1, loss_scale=3.0)
    logits, labels = torch.randn(16, CLASSES), torch.arange(16) % CLASSES
    loss = module.training_step((logits, labels), 0)
    torch.testing.assert_close(loss, 3 * criterion(logits, labels))
    torch.testing.assert_close(module.train_loss.compute(), criterion(logits, labels))


def test_names_that_are_not_unicode():
    """As folders may have them; they must not spoil the record at the end of training."""
    data = toy()
    odd = Dataset("toy", data.train, data.test, ("caf\udce9", *"abcde"))
    record = details(odd, torch.zeros(len(odd.test), CLASSES), [])
    assert record["classes"][0] == "caf?"
    json.dumps(record, ensure_ascii=False).encode()
