"""Runs side by side: those that differ in nothing but the seed are one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from topklass.train.criterion import LOSSES
from topklass.train.finished import FinishedRun, NotFinished, format_value, read_run
from topklass.train.recipe import AROUND_LOSS, LOSS_OPTIONS
from topklass.train.statistics import Difference, Estimate, difference, estimate, pooled

BASE = "cross-entropy"
OF_LOSS = ("loss", *LOSS_OPTIONS, *AROUND_LOSS)
TRAINING_DATA = ("noise", "noise_kind", "subset", "imbalance")
"""Settings that make another problem of the same data set."""


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ in nothing but the seed, by seed."""

    runs: tuple[FinishedRun, ...]

    @property
    def first(self) -> FinishedRun:
        """The run of the smallest seed."""
        return self.runs[0]

    @property
    def settings(self) -> dict[str, Any]:
        """All settings that matter but the seed."""
        return self.first.settings

    def accuracies(self, k: int, average: str) -> list[float]:
        """Test accuracy of lists of length k, of each seed."""
        return [run.accuracy(k, average).item() for run in self.runs]

    def accuracy(self, k: int, average: str) -> Estimate:
        """The same over seeds."""
        return estimate(self.accuracies(k, average))

    def curve(self, name: str) -> dict[int, Estimate]:
        """What was logged under a name, over seeds, by epochs that all of them have."""
        curves = [run.curve(name) for run in self.runs]
        common = [epoch for epoch in curves[0] if all(epoch in curve for curve in curves)]
        return {epoch: estimate([curve[epoch] for curve in curves]) for epoch in common}


@dataclass(frozen=True, eq=False)
class Comparison:
    """Groups of runs on one test set.

    Args:
        groups: by training data, then by loss.
        left_out: a sentence for each run that was left out.
    """

    groups: tuple[Group, ...]
    left_out: tuple[str, ...]

    @property
    def runs(self) -> tuple[FinishedRun, ...]:
        """All runs."""
        return tuple(run for group in self.groups for run in group.runs)

    @property
    def data(self) -> str:
        """Name of the data set."""
        return str(self.groups[0].first.result["data"]["name"])

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.groups[0].first.classes

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of lists to report on: 1, and k of every recipe."""
        return tuple(sorted({1, *(group.settings["k"] for group in self.groups)}))

    @property
    def averages(self) -> tuple[str, ...]:
        """Averages to report: one if the test set is balanced, where micro is macro."""
        present = torch.bincount(self.groups[0].first.labels)
        present = present[present > 0]
        return ("micro",) if (present == present[0]).all() else ("micro", "macro")

    @property
    def average(self) -> str:
        """The average that all recipes chose by; micro if they do not agree or all are one."""
        chosen = {group.settings["average"] for group in self.groups}
        return chosen.pop() if len(chosen) == 1 and len(self.averages) > 1 else "micro"

    @property
    def differing(self) -> tuple[str, ...]:
        """Settings that differ between groups, besides the loss and its parameters."""
        names = dict.fromkeys(name for group in self.groups for name in group.settings)
        values = {name: {format_value(g.settings.get(name)) for g in self.groups} for name in names}
        return tuple(name for name in names if len(values[name]) > 1 and name not in OF_LOSS)

    def title(self, group: Group) -> str:
        """What tells a group from the others: loss, parameters, and settings that differ."""
        differences = [
            f"{name} {format_value(group.settings.get(name))}" for name in self.differing
        ]
        return ", ".join([group.first.title, *differences])

    def base(self, group: Group) -> Group | None:
        """The best cross-entropy on the same training data, by the longest lists."""
        found = [
            other
            for other in self.groups
            if other.settings["loss"] == BASE and training_data(other) == training_data(group)
        ]
        if not found or group.settings["loss"] == BASE:
            return None
        return max(found, key=lambda other: other.accuracy(self.lengths[-1], self.average).mean)

    def gain(self, group: Group, k: int) -> Difference | None:
        """How much a group is above cross-entropy; None where there is none."""
        base = self.base(group)
        if base is None:
            return None
        alike = [each for each in self.groups if training_data(each) == training_data(group)]
        spread = pooled(each.accuracies(k, self.average) for each in alike)
        return difference(
            group.accuracies(k, self.average), base.accuracies(k, self.average), spread
        )

    @property
    def compared(self) -> int:
        """How many groups are compared with cross-entropy."""
        return sum(self.base(group) is not None for group in self.groups)

    def clear(self, gain: Difference) -> bool:
        """Whether seeds do not explain a difference: p < 0.05, by Bonferroni for all groups."""
        return gain.p is not None and gain.p * self.compared < 0.05


def compare(runs: Iterable[Path]) -> Comparison:
    """Compare finished runs on the same test set.

    A run that is not finished, is broken or repeats another is left out, with a sentence in
    ``left_out``. No finished run is an error, and so are runs on different test sets.

    Args:
        runs: their folders.
    """
    finished: dict[Path, FinishedRun] = {}
    left_out = []
    for folder in dict.fromkeys(Path(run) for run in runs):
        try:
            finished.setdefault(folder.resolve(), read_run(folder))
        except NotFinished as reason:
            left_out.append(f"{reason}.")
    if not finished:
        raise ValueError(" ".join(["there is no finished run to compare.", *left_out]))
    _check_test_set(list(finished.values()))
    groups, repeated = _grouped(finished.values())
    return Comparison(groups, (*left_out, *repeated))


def training_data(group: Group) -> tuple[Any, ...]:
    """What makes training data of the data set."""
    options = {n: v for n, v in group.settings.items() if n.startswith("data ")}
    return (*(group.settings[name] for name in TRAINING_DATA), options)


def _check_test_set(runs: Sequence[FinishedRun]) -> None:
    found: dict[Any, list[FinishedRun]] = {}
    for run in runs:
        name, labels = run.result["data"]["name"], tuple(run.labels.tolist())
        key = (name, run.classes, labels, run.images)
        found.setdefault(key, []).append(run)
    if len(found) == 1:
        return
    described = [
        f"{', '.join(str(run.folder) for run in members)} ({name}, {len(classes)} classes, "
        f"{len(labels)} test images)"
        for (name, classes, labels, _), members in found.items()
    ]
    raise ValueError(
        "runs on different test sets cannot be compared; compare these each by themselves: "
        + "; ".join(described)
    )


def _grouped(runs: Iterable[FinishedRun]) -> tuple[tuple[Group, ...], list[str]]:
    """Groups in their order, and a sentence for each run whose recipe and seed another has."""
    members: dict[str, dict[int, FinishedRun]] = {}
    repeated = []
    for run in runs:
        seeds = members.setdefault(repr(sorted(run.settings.items())), {})
        same = seeds.setdefault(run.recipe.seed, run)
        if same is not run:
            repeated.append(
                f"{run.folder} has the same recipe and seed as {same.folder}, so it counts once."
            )
    groups = [Group(tuple(seeds[seed] for seed in sorted(seeds))) for seeds in members.values()]
    problems = [repr(training_data(group)) for group in groups]
    losses = list(dict.fromkeys([*LOSSES, *(group.settings["loss"] for group in groups)]))

    def place(group: Group) -> tuple[int, int]:
        return problems.index(repr(training_data(group))), losses.index(group.settings["loss"])

    return tuple(sorted(groups, key=place)), repeated


def besides_the_loss(one: Group, other: Group) -> list[str]:
    """Settings besides those of the loss in which two groups differ."""
    names = dict.fromkeys((*one.settings, *other.settings))
    return [
        name
        for name in names
        if name not in (*OF_LOSS, "match") and one.settings.get(name) != other.settings.get(name)
    ]
