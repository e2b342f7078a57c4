"""From a checkpoint to the network of its run; one of another run is an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from topklass.train.details import RESULT
from topklass.train.files import find_checkpoint, versions_of
from topklass.train.problem import naming_recipe
from topklass.train.recipe import HARDWARE, Recipe, changes, load_recipe, parse_recipe
from topklass.train.records import BrokenFileError, naming
from topklass.train.signature import Signature, build_network

LAST, BEST = "checkpoints/last.ckpt", "checkpoints/best.ckpt"
RECIPE = "recipe.yaml"
OF_TRAINING = ("global_step", "optimizer_states", "epochs", "seconds", "metrics")
"""What a checkpoint has besides weights."""
MAY_CHANGE = ("data", *(s.name for s in fields(Recipe) if s.metadata["group"] == HARDWARE))
"""Settings that may be changed in the recipe of a run: where the data and the devices are."""


def read_recipe(run: Path) -> Recipe:
    """The recipe of a run, or an error if there is none."""
    if not (run / RECIPE).exists():
        raise FileNotFoundError(f"there is no run in {run}: it has no {RECIPE}")
    return load_recipe(run / RECIPE)


def resumable(last: Path) -> Path | None:
    """The path of the last checkpoint, if it or its predecessor exists."""
    return last if any(each.exists() for each in versions_of(last)) else None


def load_best(run: Path, recipe: Recipe, signature: Signature) -> nn.Module:
    """The network of a run's best epoch, on the CPU."""
    if resumable(run / BEST) is None:
        raise FileNotFoundError(
            f"{run} has no checkpoint {BEST}, which is written after the first epoch: continue "
            f"with topklass train --resume --folder {run}"
        )
    with naming_recipe(run / RECIPE):
        network = build_network(recipe, signature)
    needed = ("epoch",)
    checkpoint = load_from(run / BEST, recipe, network, needed, predecessor=False)[1]
    if not (run / RESULT).exists():
        best = checkpoint["epoch"] + 1
        warnings.warn(
            f"{run} is not finished: its best weights so far are of epoch {best} of "
            f"{recipe.epochs}; continue with topklass train --resume --folder {run}",
            stacklevel=3,
        )
    return network


def load_from(
    path: Path,
    recipe: Recipe,
    network: nn.Module,
    needed: Iterable[str] = OF_TRAINING,
    *,
    predecessor: bool = True,
) -> tuple[Path, dict[str, Any]]:
    """Load weights of a run's checkpoint.

    Args:
        path: of the checkpoint.
        recipe: of the run.
        network: what takes the weights.
        needed: what else the checkpoint has to have.
        predecessor: take that if the checkpoint is broken; that of the best is of another epoch.

    Returns:
        The path of the one that is whole, and its contents.
    """
    found, checkpoint = find_checkpoint(path, predecessor=predecessor)
    with naming(found, "restore it, or train again", "is not a checkpoint of this run"):
        if absent := [name for name in ("state_dict", *needed) if name not in checkpoint]:
            raise ValueError(f"it has no {absent[0]}")
        if "recipe" in checkpoint:
            differing = changes(recipe, parse_recipe(checkpoint["recipe"]), MAY_CHANGE)
            if differing:
                raise BrokenFileError(
                    f"{path.parent.parent / RECIPE} is not what {found.name} was trained with: "
                    f"{differing}; change it back"
                )
        load_weights(network, checkpoint)
    return found, checkpoint


def load_weights(network: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Load a network's weights from a checkpoint: their moving average, if the recipe has one."""
    prefix, state = "network.", checkpoint["state_dict"]
    network.load_state_dict(
        {name.removeprefix(prefix): v for name, v in state.items() if name.startswith(prefix)}
    )
