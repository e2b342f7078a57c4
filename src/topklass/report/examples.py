"""Test images with the guesses of each model, chosen where models differ."""

from __future__ import annotations

import base64
from collections import Counter
from dataclasses import dataclass
from io import BytesIO
from itertools import cycle
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from topklass import predict_topk
from topklass.data import Dataset
from topklass.prediction import TopK
from topklass.train.comparison import Comparison, Group
from topklass.train.details import printable
from topklass.train.engine import predictions
from topklass.train.evaluation import load_run
from topklass.train.prediction import scale_of
from topklass.train.problem import prepare_data

IMAGES, MODELS, GUESSES = 12, 4, 5
LARGEST = 160
"""Pixels of a picture's longer side; larger ones are made smaller."""
COARSE = 64


@dataclass(frozen=True)
class Guess:
    """A class of a list."""

    name: str
    probability: float
    right: bool


@dataclass(frozen=True)
class Example:
    """An image, its label, and the lists of the models."""

    image: str
    """A PNG in base64."""
    coarse: bool
    """Whether it has so few pixels that one should see them."""
    label: str
    lists: list[list[Guess]]


@dataclass(frozen=True)
class Examples:
    """Models, images with their guesses, and a sentence on how they were chosen."""

    models: list[str]
    images: list[Example]
    note: str


def examples(comparison: Comparison) -> Examples:
    """Images with guesses; none, and a sentence that says why, if the data are not at hand."""
    k, average = comparison.lengths[-1], comparison.average
    best = sorted(comparison.groups, key=lambda group: -group.accuracy(k, average).mean)[:MODELS]
    groups = [group for group in comparison.groups if group in best]
    right = torch.stack([group.first.ranks < k for group in groups])
    chosen, differ = choose(right, groups[0].first.labels)
    try:
        found = _with_guesses(comparison, groups, chosen)
    except Exception as reason:  # whatever is missing, the rest of the report is there
        return Examples([], [], f"There are no test images here: {reason}")
    titles = [f"{comparison.title(group)}, seed {group.first.recipe.seed}" for group in groups]
    return Examples(titles, found, _note(comparison, groups, k, differ))


def choose(right: Tensor, labels: Tensor) -> tuple[list[int], bool]:
    """Images on which the models differ, in turn from every way to differ, of many classes.

    Args:
        right: whether each model's list holds the label, (models, images).
        labels: of the images.

    Returns:
        At most ``IMAGES`` indices, and whether the models differ on them; if they differ on none,
        images that all have right or all have wrong, in turn.
    """
    differ = right.any(0) & ~right.all(0)
    pool = differ.nonzero().flatten() if differ.any() else torch.arange(len(labels))
    ways: dict[tuple[bool, ...], list[int]] = {}
    for index in pool.tolist():
        ways.setdefault(tuple(right[:, index].tolist()), []).append(index)
    seen: Counter[int] = Counter()
    chosen: list[int] = []
    turns = cycle([members for _, members in sorted(ways.items())])
    while len(chosen) < min(IMAGES, len(pool)):
        if members := next(turns):
            index = min(members, key=lambda each: seen[int(labels[each])])
            members.remove(index)
            chosen.append(index)
            seen[int(labels[index])] += 1
    return sorted(chosen), bool(differ.any())


def _with_guesses(comparison: Comparison, groups: list[Group], chosen: list[int]) -> list[Example]:
    dataset = _dataset(groups[0])
    split = dataset.test.take(torch.tensor(chosen))
    number = min(GUESSES, len(dataset.classes) - 1)
    lists = []
    for group in groups:
        run = load_run(group.first.folder, dataset)
        logits = predictions(run.recipe, run.network, split)
        scale = scale_of(run.recipe, len(dataset.classes))
        lists.append(predict_topk(logits, number, **scale))
    names = comparison.classes
    return [
        Example(*png(picture), names[label], [_guesses(names, top, at, label) for top in lists])
        for at, (picture, label) in enumerate(split)
    ]


def _guesses(names: tuple[str, ...], top: TopK, at: int, label: int) -> list[Guess]:
    found = zip(top.labels[at].tolist(), top.probabilities[at].tolist(), strict=True)
    return [Guess(names[index], share, index == label) for index, share in found]


def _dataset(group: Group) -> Dataset:
    """The data of a group's first run, if they are still the same."""
    run = group.first
    dataset = prepare_data(run.recipe)
    same = tuple(printable(dataset.classes)) == run.classes
    if not same or not torch.equal(dataset.test.labels.cpu(), run.labels):
        raise ValueError(f"the data set {dataset.name} is not the same as when it was trained on.")
    return dataset


def png(picture: Any) -> tuple[str, bool]:
    """A picture or a tensor of bytes as PNG in base64, and whether it is coarse."""
    image = to_pil_image(picture.cpu()) if isinstance(picture, Tensor) else picture.convert("RGB")
    image.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    file = BytesIO()
    image.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode(), max(image.size) < COARSE


def _note(comparison: Comparison, groups: list[Group], k: int, differ: bool) -> str:
    which = f"the {MODELS} best recipes" if len(groups) < len(comparison.groups) else "the recipes"
    what = "their first guess" if k == 1 else f"their lists of {k}"
    how = (
        f"These images were chosen because {which} differ: the label is in some of {what}, not in "
        "all. So they do not show how often that happens; the table does."
        if differ and len(groups) > 1
        else f"These images were chosen such that the label is in {what} for half of them, as far "
        "as there are such; the table shows how often that happens."
    )
    number = min(GUESSES, len(comparison.classes) - 1)
    return (
        f"{how} Percentages are those of topklass predict: after a top-k loss the probability of "
        f"belonging to the top {number}, else that of being the class."
    )
