"""The review of Berrada et al. (2018): how do standard methods compare in training?

Rows whose loss or gradient is not finite are left out of the step and counted, see
:mod:`experiments.study_losses`. The number of the first such step says where training would
have ended otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from rich.table import Table

from experiments import peers
from experiments.cells import named
from experiments.experiment import Record, Request, device, save_record
from experiments.grid import Planned, planned_runs
from experiments.plan import Plan
from experiments.step_time import HOW_TIMED, Loss, Setting, epoch_seconds, ratio
from experiments.study_losses import COUNTS, CountedLoss
from experiments.training import TrainingExperiment, fill
from topklass._provenance import commit
from topklass.train.criterion import build_loss
from topklass.train.details import hardware
from topklass.train.files import load_checkpoint
from topklass.train.recipe import Recipe
from topklass.train.restore import LAST, resumable

PUBLISHED, BASE = "published", "cross-entropy"
TIMED: dict[str, dict[str, int]] = {
    "paper": {"images": 6_400, "rounds": 5},
    "fast": {"images": 12_800, "rounds": 9},
    "smoke": {"images": 8, "batch": 4, "size": 16, "rounds": 1},
}
"""Training runs may share the device, so epochs are timed separately."""


class Review(TrainingExperiment):
    """Four evaluations of one loss, and cross-entropy."""

    def run(self, request: Request) -> Record:
        """Train what the record lacks, and time all in one process."""
        trained = self if peers.available("difftopk") else Review(without(self.plan, PUBLISHED))
        record = TrainingExperiment.run(trained, request)
        folder, runs = request.folder, planned_runs(self.plan, request.preset)
        fill(record, runs, {(row["method"], row["run"]): row for row in record["rows"]})
        there = {row["method"] for row in record["rows"]}
        timed = times(record)
        can = {run.method for run in planned_runs(trained.plan, request.preset)} & there
        if BASE in there and can - set(timed):
            request.say("Timing epochs of all methods.")
            timed |= time_methods([run for run in runs if run.method in can], request)
        for row in record["rows"]:
            if row["method"] in timed:
                row["timed"] = timed[row["method"]]
        save_record(record, folder)
        return record

    def row(self, run: Planned, finished: Path) -> Record:
        """With what was not finite, by the last checkpoint if that is there."""
        row = super().row(run, finished)
        return {**row, "not_finite": counts(finished)} if resumable(finished / LAST) else row

    def show(self, record: Record) -> list[Table]:
        """Accuracies, rows that were not finite, and times."""
        tables = super().show(record)
        more = [overflow_table(record), time_table(record)]
        return [*tables, *(table for table in more if table.row_count)]


def without(plan: Plan, method: str) -> Plan:
    """A plan that does not train a method."""
    presets = {}
    for name, preset in plan.presets.items():
        grids = [
            {**grid, "methods": [m for m in grid.get("methods", plan.methods) if m != method]}
            for grid in preset.grids
        ]
        presets[name] = replace(preset, grids=grids)
    return replace(plan, presets=presets)


def counts(run: Path) -> dict[str, int] | None:
    """What a run's loss counted, by its last checkpoint; None for a loss that counts nothing."""
    state = load_checkpoint(run / LAST)["state_dict"]
    for place in ("criterion", "criterion.loss"):  # as it is, or times k
        if all(f"{place}.{name}" in state for name in COUNTS):
            return {name: int(state[f"{place}.{name}"]) for name in COUNTS}
    return None


def times(record: Record) -> dict[str, Record]:
    """What :func:`time_methods` found for a record."""
    return {row["method"]: row["timed"] for row in record["rows"] if "timed" in row}


def time_methods(runs: list[Planned], request: Request) -> dict[str, Record]:
    """Seconds of an epoch with each method, how many times cross-entropy's that is, and where."""
    first = {run.method: run.recipe for run in reversed(runs)}
    setting = timed_setting(next(iter(first.values())), request.preset)
    losses = {name: criterion(recipe) for name, recipe in first.items()}
    seconds = epoch_seconds(setting, losses, request.track)
    where = {"images": setting.images, "hardware": hardware(device()), "commit": commit()}
    return {
        name: {
            "seconds": round(median(found), 5),
            "ratio": round(ratio(found, [seconds[BASE]]), 4),
            **where,
        }
        for name, found in seconds.items()
    }


def timed_setting(recipe: Recipe, preset: str) -> Setting:
    """What is timed: the network and the batch of the recipe, with CIFAR's images and classes."""
    how = TIMED[preset]
    return Setting(
        recipe.model,
        how.get("batch", recipe.batch_size),
        how["images"],
        classes=100,
        size=how.get("size", 32),
        precision=recipe.precision,
        compile=recipe.compile,
        rounds=how["rounds"],
    )


def criterion(recipe: Recipe) -> Loss:
    """The loss of a recipe; counting is not timed."""
    loss = build_loss(recipe.loss, recipe.k, torch.ones(100), recipe.loss_options())
    if isinstance(loss, CountedLoss):
        rows = loss.rows
        return lambda logits, labels: rows(logits.float(), labels).mean()
    return loss


def overflow_table(record: Record) -> Table:
    """Rows of batches that were left out."""
    head = ("method", "τ", "seed", "first step", "losses not finite", "gradients not finite")
    table = Table(*head, "of rows", title="Rows left out of training because they were not finite")
    table.caption = (
        "If they were not left out, training would end at the first such step. Gradients are those "
        "of rows whose loss is finite."
    )
    batch = record["protocol"]["batch_size"]
    for row in record["rows"]:
        found = row.get("not_finite")
        if found is not None:
            cells = [row["method"], named(row["settings"]["tau"], "tau"), str(row["seed"])]
            cells += [f"{found['first']:,}" if found["first"] else "–"]
            cells += [f"{found[each]:,}" for each in ("losses", "gradients")]
            share = (found["losses"] + found["gradients"]) / (found["calls"] * batch)
            table.add_row(*cells, f"{100 * share:.3g} %")
    return table


def time_table(record: Record) -> Table:
    """Epochs beside those with cross-entropy."""
    table = Table("method", "seconds", "cross-entropy = 1", title="Time of an epoch")
    timed = times(record)
    if BASE in timed:
        base = timed[BASE]
        table.caption = (
            f"{base['images']:,} images, all steps on one batch {HOW_TIMED}; {base['hardware']}, "
            f"commit {base['commit']}."
        )
    for name, each in timed.items():
        other = f" ({each['hardware']}, {each['commit']})" if differs(each, timed) else ""
        table.add_row(name + other, f"{each['seconds']:.4g}", f"{each['ratio']:.3g}")
    return table


def differs(one: Record, timed: dict[str, Record]) -> bool:
    """Whether a method was timed elsewhere than cross-entropy, beside cross-entropy there."""
    return any(one[key] != timed.get(BASE, one)[key] for key in ("hardware", "commit"))
