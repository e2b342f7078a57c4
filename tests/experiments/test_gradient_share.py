"""The share of logits with a gradient: measured in training, also over an interruption."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from experiments.gradient_share import GradientShare
from test_train_engine import RECIPE, assert_same_weights, stop_at, toy
from topklass.train import Interrupted, Recipe, train

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and TensorBoard


def shares(run: Path) -> list[float]:
    epochs = json.loads((run / "details.json").read_text())["epochs"]
    return [row["train/gradient"] for row in epochs]


def test_the_same_after_an_interruption(tmp_path, monkeypatch):
    """It changes nothing in training."""
    recipe = RECIPE.with_changes({"cutmix": 0.5})
    whole, part, plain = tmp_path / "whole", tmp_path / "part", tmp_path / "plain"
    train(recipe, whole, dataset=toy(), callbacks=[GradientShare()])
    assert all(0 < share < 1 for share in shares(whole))
    with monkeypatch.context() as patched:
        stop_at(patched, 8, None)
        with pytest.raises(Interrupted):
            train(recipe, part, dataset=toy(), callbacks=[GradientShare()])
    train(recipe, part, dataset=toy(), callbacks=[GradientShare()], resume=True)
    assert shares(part) == shares(whole)
    train(recipe, plain, dataset=toy())
    assert_same_weights(whole, plain)


@pytest.mark.parametrize("saved", [{}, {"gradient_share": {"mean_value": torch.ones(())}}], ids=str)
def test_checkpoints_without_the_means(saved):
    """Of a run without the callback, or of an older version: all means begin anew."""
    share = GradientShare()
    share.on_load_checkpoint(SimpleNamespace(is_global_zero=True), None, saved)
    assert not any(mean.update_called or mean.weight for mean in share.means.values())


@pytest.mark.parametrize(("loss", "most"), [("cross-entropy", 1.0), ("hinge", 2 / 6)])
def test_what_is_counted(tmp_path, loss, most):
    """All logits for cross-entropy, at most label and rival for the hinge."""
    recipe = Recipe(loss=loss, k=2, epochs=1, batch_size=16, pad=1, learning_rate=0.01)
    train(recipe, tmp_path / "run", dataset=toy(), callbacks=[GradientShare()])
    (share,) = shares(tmp_path / "run")
    assert 0 < share <= most + torch.finfo().eps
    assert loss == "hinge" or share == 1
