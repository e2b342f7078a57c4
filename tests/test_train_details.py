"""What a run leaves for comparisons: ranks, counts, gradients, epochs despite interruptions."""

import json
from pathlib import Path

import pytest
import torch

from test_train_engine import CLASSES, RECIPE, toy
from topklass.data import Dataset, long_tail
from topklass.functional import target_rank
from topklass.train import Recipe, compare, train
from topklass.train.details import details
from topklass.train.engine import accuracies, predictions
from topklass.train.files import load_checkpoint
from topklass.train.module import Classifier, RankAccuracy, metric_state
from topklass.train.restore import BEST, LAST, load_weights
from topklass.train.signature import build_network, signature_of

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


@pytest.mark.parametrize(("best_by", "best"), [("top-k", 1), ("both", 2)])
def test_the_best_epoch_by_lists_or_by_both_accuracies(tmp_path, monkeypatch, best_by, best):
    accuracies = [(0.1, 0.5), (0.2, 0.9), (0.8, 0.8), (0.3, 0.7)]
    of_epochs = iter(torch.tensor(accuracies).repeat_interleave(2, 0))  # training and validation
    computed = lambda _: dict(zip(("top1", "top2"), next(of_epochs), strict=True))  # noqa: E731
    monkeypatch.setattr(RankAccuracy, "compute", computed)
    recipe = RECIPE.with_changes({"best_by": best_by, "epochs": 4})
    assert train(recipe, tmp_path, dataset=toy())["epoch"] == best
    logged = [row.get("validation/both") for row in epochs(tmp_path)]
    means = [pytest.approx(sum(each) / 2) for each in accuracies]
    assert logged == ([None] * 4 if best_by == "top-k" else means)


def test_the_epoch_is_told_to_the_criterion(tmp_path):
    """Classes are weighted after the first of two epochs: the second one trains otherwise."""
    tailed = long_tail(toy(), 4.0)
    recipe = RECIPE.with_changes({"epochs": 2, "batch_size": 8, "schedule": "constant"})
    train(recipe, tmp_path / "never", dataset=tailed)
    train(recipe.with_changes({"reweight_from": 0.5}), tmp_path / "late", dataset=tailed)
    late, never = epochs(tmp_path / "late"), epochs(tmp_path / "never")
    assert late[0]["train/loss"] == never[0]["train/loss"]
    assert late[1]["train/loss"] != never[1]["train/loss"]


def test_the_mean_loss_is_the_same_in_any_order():
    """Two processes that are continued go on from the sum of both."""
    network = torch.nn.Linear(1, CLASSES)
    recipe = Recipe(loss="cross-entropy", k=2)
    one, other = (Classifier(network, network, recipe, CLASSES, 1).train_loss for _ in range(2))
    losses = 3 * torch.rand(1000)
    for loss in losses:
        one.update(loss)
    for loss in losses.flip(0):
        other.update(loss)
    state = metric_state(other)
    other.reset()
    other.load_state_dict(state)
    assert float(one.compute().float()) == float(other.compute().float())


def test_names_that_are_not_unicode():
    """As folders may have them; they must not spoil the record at the end of training."""
    data = toy()
    odd = Dataset("toy", data.train, data.test, ("caf\udce9", *"abcde"))
    record = details(odd, torch.zeros(len(odd.test)), [])
    assert record["classes"][0] == "caf?"
    json.dumps(record, ensure_ascii=False).encode()


@pytest.mark.parametrize("best", [0, 2])
def test_accuracies_of_the_last_weights(tmp_path, best):
    """Beside those of the best epoch, which is the last one or an earlier one."""
    train(RECIPE, tmp_path, dataset=toy())
    last, chosen = (load_checkpoint(tmp_path / path) for path in (LAST, BEST))
    other = last if best == 2 else {**last, "epoch": 0}
    if best == 0:
        state = last["state_dict"]
        other["state_dict"] = {name: -value for name, value in state.items()}
    assert chosen.keys() == other.keys()
    torch.save(other, tmp_path / BEST)
    (tmp_path / "result.json").unlink()
    result = train(RECIPE, tmp_path, dataset=toy(), resume=True)
    network = build_network(RECIPE, signature_of(RECIPE, toy()))
    for name, checkpoint in (("test", other), ("test_last", last)):
        load_weights(network, checkpoint)
        logits = predictions(RECIPE, network, toy().test)
        ranks = target_rank(logits, toy().test.labels)
        assert result[name] == accuracies(ranks, toy())
    assert (result["test"] == result["test_last"]) == (best == 2)
