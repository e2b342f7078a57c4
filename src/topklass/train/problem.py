"""A recipe's data: loaded, divided, and made as hard as it says."""

from collections.abc import Callable

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

NOISE: dict[str, Callable[..., Dataset]] = {
    "superclass": superclass_noise,
    "block": block_noise,
    "symmetric": symmetric_noise,
}


def prepare_data(recipe: Recipe) -> Dataset:
    """The data set of a recipe; test labels are clean, validation labels unless it says otherwise.

    The order is: a validation set is held out, the training set becomes smaller or long-tailed,
    and then its labels noisy.
    """
    dataset = load(recipe.data, **recipe.data_options)
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


def with_validation(dataset: Dataset, recipe: Recipe) -> Dataset:
    """A data set with validation images: its own, or held out of its training images."""
    if dataset.validation is not None:
        return dataset
    classes = len(dataset.classes)
    tenth = classes * max(1, len(dataset.train) // (10 * classes))
    return hold_out(dataset, recipe.validation or tenth, recipe.seed)
