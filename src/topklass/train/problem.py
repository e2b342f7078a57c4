"""A recipe's data: loaded, divided, and made as hard as it says."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from topklass.data import (
    Dataset,
    balanced_subset,
    block_noise,
    hold_out,
    load,
    long_tail,
    superclass_noise,
    symmetric_noise,
)
from topklass.train.recipe import Recipe
from topklass.train.records import naming

NOISE: dict[str, Callable[..., Dataset]] = {
    "superclass": superclass_noise,
    "block": block_noise,
    "symmetric": symmetric_noise,
}


def prepare_data(recipe: Recipe) -> Dataset:
    """The data set of a recipe; test labels are clean, validation labels unless it says otherwise.

    The order is: a validation set is held out, the training set becomes smaller or long-tailed,
    and then its labels noisy.

    Example:
        >>> options = {"classes": 100, "per_class": 2, "cache": False}
        >>> data = prepare_data(Recipe(data="glyphs", data_options=options, noise=0.4))
        >>> [step["step"] for step in data.record["steps"]]
        ['superclass_noise']
    """
    return harder(load(recipe.data, **recipe.data_options), recipe)


def harder(dataset: Dataset, recipe: Recipe) -> Dataset:
    """A data set with validation samples, fewer samples and label noise, as a recipe says."""
    classes = len(dataset.classes)
    if recipe.k >= classes:
        raise ValueError(f"k={recipe.k} must be less than the {classes} classes of {dataset.name}")
    dataset = with_validation(dataset, recipe)
    if recipe.subset is not None:
        dataset = balanced_subset(dataset, recipe.subset, recipe.seed)
    if recipe.imbalance is not None:
        dataset = long_tail(dataset, recipe.imbalance, seed=recipe.seed)
    if recipe.noise:
        add_noise = NOISE[recipe.noise_kind]
        dataset = add_noise(dataset, recipe.noise, recipe.seed, validation=recipe.noisy_validation)
    return dataset


@contextmanager
def naming_recipe(path: Path) -> Iterator[None]:
    """Name the recipe of a run whose data or network it cannot make."""
    advice = "restore it and its data, or change `data` in it if they have moved"
    with naming(path, advice, "cannot be used"):
        try:
            yield
        except FileNotFoundError as error:  # of the data, not of the recipe
            raise ValueError(str(error)) from error


def with_validation(dataset: Dataset, recipe: Recipe) -> Dataset:
    """A data set with validation images: its own, or held out of its training images."""
    if dataset.validation is not None:
        return dataset
    if not recipe.validation:
        return hold_out(dataset, _tenth(dataset), recipe.seed)
    if recipe.validation >= len(dataset.train):
        raise ValueError(
            f"validation must be less than the {len(dataset.train)} training images of "
            f"{dataset.name}, got {recipe.validation}"
        )
    return hold_out(dataset, recipe.validation, recipe.seed)


def _tenth(dataset: Dataset) -> int:
    """About a tenth of the training images, at most half of those of the smallest class."""
    classes, counts = len(dataset.classes), dataset.counts
    fewest, rarest = int(counts.min()), dataset.classes[int(counts.argmin())]
    if fewest < 2:
        raise ValueError(
            f"{dataset.name} has no validation images, and to hold some out takes two training "
            f"images of each class: {rarest!r} has {fewest}. Add validation images or images of "
            "that class, or set validation to the number of images to hold out anyway"
        )
    return classes * max(1, min(len(dataset.train) // (10 * classes), fewest // 2))
