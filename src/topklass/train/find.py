"""A short grid for a parameter of the loss, judged on the validation images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from topklass.train.criterion import unknown_options
from topklass.train.engine import train
from topklass.train.finished import format_value, read_run
from topklass.train.recipe import Recipe
from topklass.train.restore import RECIPE
from topklass.train.several import is_finished

GRIDS = {"tau": (0.01, 0.1, 1.0, 10.0), "epsilon": (0.1, 0.2, 0.5, 1.0, 2.0)}
SHARE = 5
"""A trial has one epoch for so many of the recipe,"""
LEAST = 3
"""and at least so many."""


class Trial(NamedTuple):
    """What a value of the parameter came to in a short training."""

    value: float
    train: float
    """Top-k accuracy of the last epoch on the training images: whether it learns at all."""
    validation: float
    """The best one on the validation images."""


def find_parameter(
    recipe: Recipe,
    name: str,
    folder: Path,
    *,
    values: Sequence[float] | None = None,
    console: Console | None = None,
) -> list[Trial]:
    r"""Train for a fifth of the epochs with each value of a parameter of the loss.

    Berrada et al. 2018, section D.1.4, set the temperature first, to a low value with which the
    network learns on the training images, and everything else after it: how well it learns is
    therefore shown beside the accuracy on the validation images, which decides. Test images are not
    looked at. Trials that are finished are not repeated, and interrupted ones are continued.

    Args:
        recipe: all other settings.
        name: ``"tau"`` or ``"epsilon"``.
        folder: for the trials.
        values: to be tried; 0.01 … 10 for τ and 0.1 … 2 for ε unless given.
        console: where progress is shown; None for silence.

    Returns:
        A trial for each value; :func:`best` chooses.
    """
    check_can_find(recipe, name)
    trials = []
    for value in GRIDS[name] if values is None else values:
        epochs = min(recipe.epochs, max(LEAST, recipe.epochs // SHARE))
        tried = recipe.with_changes({name: value, "epochs": epochs, "patience": None})
        run = folder / f"{name}-{value:g}"
        if console is not None:
            console.print(f"Trial of {name} {value:g}")
        if not is_finished(run, tried):
            train(tried, run, resume=(run / RECIPE).exists(), console=console)
        finished = read_run(run)
        learned, judged = (
            list(finished.curve(f"{split}/top{recipe.k}").values())
            for split in ("train", "validation")
        )
        trials.append(Trial(value, learned[-1], max(judged)))
    return trials


def check_can_find(recipe: Recipe, name: str) -> None:
    """Require a loss that has the parameter, no value of it, and one process."""
    if (value := getattr(recipe, name)) is not None:
        raise ValueError(f"{name}={value:g} is given: leave it out to find it")
    if wrong := unknown_options(recipe.loss, [name]):
        raise ValueError(f"there is no {name} to find: the loss {recipe.loss!r} has no {wrong}")
    if recipe.devices * recipe.nodes > 1:
        raise ValueError(f"find {name} with one device, then train with --{name} on all of them")


def best(trials: Sequence[Trial]) -> Trial:
    """The trial with the best validation accuracy; of equal ones the smallest value."""
    return max(trials, key=lambda trial: (trial.validation, -trial.value))


def trials_table(name: str, k: int, trials: Sequence[Trial]) -> Table:
    """The trials, with the best marked."""
    table = Table(name, f"top-{k}, training images", f"top-{k}, validation images")
    chosen = best(trials)
    for trial in trials:
        cells = (
            format_value(trial.value),
            f"{100 * trial.train:.1f} %",
            f"{100 * trial.validation:.1f} %",
        )
        table.add_row(*cells, style="bold" if trial is chosen else "")
    return table
