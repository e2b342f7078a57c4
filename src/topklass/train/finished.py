"""Finished runs as they lie on the disk, read without data or network."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from topklass.functional.accuracy import among_largest, averaged, count_by_class
from topklass.train.details import DETAILS, RESULT, read_details, read_result
from topklass.train.recipe import AROUND_LOSS, LOSS_OPTIONS, Recipe
from topklass.train.records import REMAKE, BrokenFileError, naming
from topklass.train.restore import RECIPE

NOT_COMPARED = ("seed", "workers")
"""Settings in which the runs of a group may differ: workers change no result."""


class NotFinished(Exception):
    """There is no finished run, and this sentence says why."""


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """A run and all that it recorded.

    Args:
        folder: where it lies.
        recipe: its settings.
        result: of ``result.json``.
        classes: their names.
        counts: training images of each class, (C).
        labels: of the test images, (N).
        ranks: how many classes have larger scores than the label, (N).
        images: a hash of the test images, if they were in memory.
        epochs: what was logged in each.
    """

    folder: Path
    recipe: Recipe
    result: dict[str, Any]
    classes: tuple[str, ...]
    counts: Tensor
    labels: Tensor
    ranks: Tensor
    images: str | None
    epochs: tuple[dict[str, float], ...]

    def accuracy(self, k: int, average: str = "micro") -> Tensor:
        """Test accuracy of lists of length k; with "none" that of each class, (C)."""
        right = among_largest(self.ranks, (k,))
        hits, samples = count_by_class(right, self.labels, len(self.classes), -100)
        return averaged(hits, samples, average)[0]

    def curve(self, name: str) -> dict[int, float]:
        """What was logged under a name, by epoch; nothing if it was not."""
        return {int(row["epoch"]): row[name] for row in self.epochs if name in row}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings that matter but the seed, those of the data set one by one."""
        settings = asdict(self.recipe)
        options = settings.pop("data_options")
        kept = {name: value for name, value in settings.items() if name not in NOT_COMPARED}
        return {**kept, **{f"data {name}": value for name, value in options.items()}}

    @property
    def title(self) -> str:
        """The loss and its parameters that were set."""
        given = {name: self.settings[name] for name in (*LOSS_OPTIONS, *AROUND_LOSS)}
        given_options = [
            f"{name.replace('_', ' ')} {format_value(value)}"
            for name, value in given.items()
            if value is not None
        ]
        return ", ".join([self.recipe.loss, *given_options])


def format_value(value: object) -> str:
    """A value of a setting, for people."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(format_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def read_run(folder: Path) -> FinishedRun:
    """Read the records of a run, or raise :class:`NotFinished`."""
    if not (folder / RECIPE).exists():
        raise NotFinished(f"{folder} holds no run: it has no {RECIPE}")
    if not (folder / RESULT).exists():
        raise NotFinished(
            f"{folder} is not finished: continue it with topklass train --resume --folder {folder}"
        )
    if not (folder / DETAILS).exists():
        raise NotFinished(
            f"{folder} has no {DETAILS}: an older topklass trained it; train it again"
        )
    try:
        result, details = read_result(folder), read_details(folder)
        with naming(folder / RESULT, REMAKE.format(folder)):
            recipe = Recipe().with_changes(result["recipe"])
    except (BrokenFileError, OSError) as error:
        raise NotFinished(str(error)) from error
    return FinishedRun(
        folder,
        recipe,
        result,
        tuple(details["classes"]),
        torch.tensor(details["counts"]),
        torch.tensor(details["labels"]),
        torch.tensor(details["ranks"]),
        details.get("images"),
        tuple(details["epochs"]),
    )
