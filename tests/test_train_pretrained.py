"""Weights of ImageNet: asked for when training begins, and not again."""

from typing import Any

import pytest
from torch import nn

from test_train_engine import toy
from topklass import models
from topklass.train import Recipe, train

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and TensorBoard

RECIPE = Recipe(k=2, epochs=1, batch_size=16, pad=1, pretrained=True)


@pytest.mark.parametrize("pretrained", [True, False])
def test_only_when_training_begins(tmp_path, monkeypatch, pretrained):
    build, asked = models.build, []

    def without_weights(*arguments: Any, pretrained: bool, **options: Any) -> nn.Module:
        asked.append(pretrained)
        return build(*arguments, **options)

    monkeypatch.setattr(models, "build", without_weights)
    train(RECIPE.with_changes({"pretrained": pretrained}), tmp_path / "run", dataset=toy())
    assert asked == [pretrained, False]


def test_a_network_without_weights(tmp_path):
    with pytest.raises(ValueError, match="convnet has no pretrained weights"):
        train(RECIPE, tmp_path / "run", dataset=toy())
    assert not (tmp_path / "run").exists()
