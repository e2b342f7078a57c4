"""A small experiment, and finished runs of it without training."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.experiment import Record
from experiments.grid import Planned, planned_runs
from experiments.plan import Plan, parse_plan
from experiments.training import TrainingExperiment
from finished_runs import CLASSES, write_run

TOY = f"""
# python -m experiments toy
title: a toy
papers: [Someone 2018, Table 1]
data: {{name: Toys, classes: {len(CLASSES)}, get: toys.zip from the shop}}
always: {{k: 2, epochs: 3}}
methods:
  cross-entropy: {{loss: cross-entropy}}
  smooth: {{loss: smooth, tau: 1.0}}
presets:
  paper:
    settings: {{model: resnet18}}
    methods: {{smooth: {{learning_rate: 0.5}}}}
    grids:
      - {{noise: [0.0, 0.5], noise_kind: [block, superclass], seeds: [0, 1]}}
      - {{noise: 0.5, noise_kind: block, methods: [smooth], seeds: [0, 2]}}
  fast: {{settings: {{}}, grids: [{{noise: 0.0}}]}}
  smoke: {{settings: {{data: glyphs}}, grids: [{{noise: 0.0}}]}}
curves: [train/top2]
published:
  - source: Someone 2018, Table 1
    metric: test top-2
    where: {{noise_kind: block}}
    by: noise
    values: {{cross-entropy: {{0.0: 40.0, 0.5: [30.0, 0.5]}}, smooth: {{0.5: 60.0, 1.0: 20.0}}}}
tables:
  - title: blocks
    where: {{noise_kind: block}}
    rows: noise
    columns: method
    metrics: [test top-2]
  - title: methods
    where: {{noise: 0.0}}
    rows: method
    metrics: [test macro top-k, validation top-1, training top-2, non-zero gradients]
figures:
  - {{file: noise, title: noise, where: {{noise_kind: block}}, x: noise, metric: test top-2}}
  - {{file: methods, title: methods, where: {{noise: 0.0}}, x: method, metric: test top-2}}
  - {{file: curve, title: curve, curve: train/top2}}
  - {{file: gradient, title: gradient, where: {{noise: 0.0}}, curve: gradient}}
"""


def toy_plan(text: str = TOY) -> Plan:
    return parse_plan("toy", text)


def finish(
    folder: Path, experiment: TrainingExperiment, data: Path, chosen: list[int]
) -> list[Planned]:
    """Write some of the planned runs of the preset paper; seed 1 is right more often."""
    runs = planned_runs(experiment.plan, "paper", data)
    for number in chosen:
        run = runs[number]
        write_run(folder / run.name, run.recipe, 0.5 + 0.1 * run.seed - 0.2 * run.recipe.noise)
    return runs


def cells(experiment: TrainingExperiment, record: Record, number: int) -> dict[str, Any]:
    """The lines of each cell of a table, by row and column."""
    table = experiment.show(record)[number]
    first, *others = table.columns
    return {
        (row, column.header): cell.replace("\xa0", " ").split("\n")
        for column in others
        for row, cell in zip(first.cells, column.cells, strict=True)
    }


def write_toys(path: Path) -> Path:
    """A data file with as many classes as the toy needs."""
    images, labels = np.zeros((len(CLASSES), 8, 8), np.uint8), np.arange(len(CLASSES))
    np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=labels)
    return path
