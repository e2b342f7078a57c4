"""Evaluation of runs: views by hand, superclasses by hand."""

import pytest
import torch

from topklass.train.evaluation import by_superclass, in_list, views
from topklass.train.recipe import Recipe


def test_views():
    images = torch.randint(1, 256, (3, 1, 8, 8), dtype=torch.uint8)
    shifted = views(images, Recipe(pad=4, border="zero"))
    assert len(shifted) == 5
    assert torch.equal(shifted[4], images)
    assert torch.equal(shifted[0][..., 2:, 2:], images[..., :-2, :-2])
    assert (shifted[0][..., :2, :] == 0).all()
    edge = views(images, Recipe(pad=4, border="edge"))
    assert torch.equal(edge[0][..., 0, 2:], images[..., 0, :-2])
    mirrored = views(images, Recipe(pad=4, flip=True))
    assert len(mirrored) == 10
    assert torch.equal(mirrored[9], images.flip(-1))
    assert len(views(images, Recipe(pad=0))) == 1


def test_by_superclass():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 0.0]])
    labels = torch.tensor([0, 2, 1])
    rows = by_superclass(logits, labels, torch.tensor([0, 0, 1, 2]), ("a", "b", "c"), 2)
    assert [row["name"] for row in rows] == ["a", "b"]
    assert [row["samples"] for row in rows] == [2, 1]
    assert [row["top1"] for row in rows] == [0.5, 0.0]
    assert [row["topk"] for row in rows] == [1.0, 1.0]


def test_in_list():
    shown = torch.tensor([[0, 1], [2, 3], [4, 5]])
    assert in_list(shown, torch.tensor([1, 0, 4])) == pytest.approx(2 / 3)
