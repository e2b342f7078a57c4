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


@pytest.mark.parametrize("loss", ["cross-entropy", "hinge", "noised", "smooth"])
def test_share_of_gradients(loss, monkeypatch):
    """That of the gradient by autograd at the same noise; it draws no random numbers."""
    recipe = Recipe(loss=loss, k=2)
    criterion = build_loss(loss, 2, torch.ones(CLASSES), {})
    module = Classifier(nn.Flatten(), criterion, recipe, CLASSES, steps=1, loss_scale=3.0)
    monkeypatch.setattr(module, "log", lambda *_, **__: None)
    logits = 5 * torch.randn(16, CLASSES, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(16) % CLASSES
    torch.manual_seed(0)
    given = logits.clone().requires_grad_()
    module.training_step((given, labels), 0).backward()
    after = torch.get_rng_state()
    torch.manual_seed(0)
    wanted = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(criterion(wanted, labels), wanted)
    assert torch.equal(after, torch.get_rng_state())
    assert module.share == (gradient != 0).float().mean()
    assert torch.allclose(given.grad, 3 * gradient, atol=1e-6)
    if loss == "hinge":
        assert 0 < module.share <= 2 / CLASSES
    if loss == "cross-entropy":
        assert module.share == 1


def test_share_is_logged(whole):
    shares = [row["train/gradient"] for row in epochs(whole)]
    assert all(0 < share < 1 for share in shares)


def test_names_that_are_not_unicode():
    """As folders may have them; they must not spoil the record at the end of training."""
    data = toy()
    odd = Dataset("toy", data.train, data.test, ("caf\udce9", *"abcde"))
    record = details(odd, torch.zeros(len(odd.test), CLASSES), [])
    assert record["classes"][0] == "caf?"
    json.dumps(record, ensure_ascii=False).encode()
