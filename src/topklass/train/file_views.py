"""What a network sees of pictures in files, by a recipe."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from torch import Tensor

from topklass.data import fixed_views, random_view
from topklass.train.file_batches import View
from topklass.train.recipe import Recipe

MOST_WORKERS = 16


def training_view(recipe: Recipe) -> View:
    """A random crop, mirrored half of the time unless the recipe forbids it."""
    flip = mirrored(recipe)
    return partial(random_view, resize=recipe.shorter_side, crop=recipe.crop, flip=flip)


def centre_view(recipe: Recipe) -> View:
    """The crop at the centre, (channels, crop, crop)."""
    return partial(centre, resize=recipe.shorter_side, crop=recipe.crop)


def several_views(recipe: Recipe) -> View:
    """Corners, centre, and their mirror images if training mirrors: (10 or 5, channels, …)."""
    number = 10 if mirrored(recipe) else 5
    return partial(first_views, number=number, resize=recipe.shorter_side, crop=recipe.crop)


def centre(picture: Any, *, resize: int, crop: int) -> Tensor:
    """The crop at the centre of a resized picture."""
    return fixed_views(picture, resize=resize, crop=crop, ten=False)[0]


def first_views(picture: Any, *, number: int, resize: int, crop: int) -> Tensor:
    """The first of ten crops."""
    return fixed_views(picture, resize=resize, crop=crop)[:number]


def mirrored(recipe: Recipe) -> bool:
    """Whether pictures in files are mirrored; they are, unless the recipe forbids it."""
    return recipe.flip is not False


def worker_count(recipe: Recipe) -> int:
    """The recipe's number of workers, or one for each core of a device, at most 16."""
    if recipe.workers is not None:
        return recipe.workers
    return max(1, min(MOST_WORKERS, core_count() // recipe.devices))


def core_count() -> int:
    """How many cores this process may use."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1
