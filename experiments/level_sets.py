"""Level sets of the losses on the simplex, Garcin et al. (2022), Figures 1, 4, 5 and 6."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from experiments.experiment import (
    Experiment,
    Record,
    Request,
    check_rows,
    new_record,
    save_record,
)
from experiments.landscapes import landscape, rescaled, simplex

GRIDS = {"paper": 60, "fast": 40, "smoke": 12}
"""Steps along an edge."""
REPLICATIONS = {"paper": 100, "fast": 100, "smoke": 2}
DIGITS = 1000
"""Rescaled losses are kept in thousandths."""

SAMPLES, MANY_SAMPLES = 30, 50
LOSSES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("zero-one", {}),
    ("cross-entropy", {}),
    ("hinge", {}),
    ("calibrated-hinge", {}),
    ("convex-hinge", {}),
    ("smooth", {"tau": 0.1}),
    ("smooth", {"tau": 1.0}),
    ("noised", {"epsilon": 0.3, "samples": SAMPLES}),
    ("noised", {"epsilon": 1.0, "samples": SAMPLES}),
    ("noised", {"epsilon": 1.0, "samples": SAMPLES, "margin": 2.0}),
)
"""Panels a to j of Figures 1 and 6; the last one is the imbalanced loss of a rare class."""
BY_SAMPLES = (1, 10, 100, None)
BY_EPSILON = (0.1, 0.3, 0.5, 1.0)
"""For K = 2 the exact loss is 0 on the whole simplex from about ε = 2 on."""


class LevelSets(Experiment):
    """Loss landscapes, with the exact expectation as the limit of infinitely many samples."""

    name = "level-sets"
    title = "Level sets of all losses on the simplex, for three labels"
    papers = ("Garcin 2022, Figures 1, 4, 5 and 6",)
    resumes = False

    def run(self, request: Request) -> Record:
        """Compute all panels, in seconds; there is nothing to continue."""
        preset = request.preset
        points = simplex(GRIDS[preset])
        protocol = {
            "what": "losses of s in 2·Δ3, the label in the upper corner, rescaled from 0 to 1 and "
            f"kept as integers up to {DIGITS}; margins of 1; float64; the noised loss in Figures 1 "
            "and 6 is the mean over replications",
            "grid": GRIDS[preset],
            "replications": REPLICATIONS[preset],
            "seed": 0,
            "differs": "the parameters under the paper's panels were not at hand: τ, ε and B are "
            "chosen here, but ε = 1 in Figure 4 and B = 50 in Figure 5, which its text gives",
        }
        record = new_record(self.name, preset, protocol)
        for figure, k, loss, options in panels():
            more = {}
            if figure in ("1", "6") and loss == "noised":
                more["replications"] = REPLICATIONS[preset]
            values = landscape(loss, k, points, **options, **more)
            record["rows"].append(
                {"figure": figure, "k": k, "loss": loss, **options, **packed(values)}
            )
        save_record(record, request.folder)
        return record

    def show(self, record: Record) -> list[Table]:
        """The range of each loss, and how much of the simplex is at the minimum."""
        check_rows(record, ("figure", "k", "loss", "low", "high"))
        table = Table("figure", "K", "loss", "parameters", "lowest", "highest", "at the lowest")
        for row in record["rows"]:
            share = (unpacked(row) == 0).double().mean().item()
            cells = (row["figure"], str(row["k"]), row["loss"], parameters(row))
            ends = (f"{row['low']:.3f}", f"{row['high']:.3f}", f"{100 * share:.0f} %")
            table.add_row(*cells, *ends)
        return [table]

    def draw(self, record: Record, folder: Path) -> list[Path]:
        """One figure for each of the paper's."""
        from experiments.level_sets_figures import draw

        return draw(record, folder)


def panels() -> Iterator[tuple[str, int, str, dict[str, Any]]]:
    """Figure, k, loss and options of all panels."""
    for figure, k in (("1", 2), ("6", 1)):
        for loss, options in LOSSES:
            yield figure, k, loss, options
    for k in (1, 2):
        for samples in BY_SAMPLES:
            yield "4", k, "noised", {"epsilon": 1.0, "samples": samples}
    for k in (1, 2):
        for samples in (MANY_SAMPLES, None):
            for epsilon in BY_EPSILON:
                yield "5", k, "noised", {"epsilon": epsilon, "samples": samples}


def packed(values: Tensor) -> dict[str, Any]:
    """Values as one short string, with their range.

    Example:
        >>> packed(torch.tensor([1.0, 2.0, 5.0]))
        {'low': 1.0, 'high': 5.0, 'values': '0 250 1000'}
    """
    whole = (DIGITS * rescaled(values)).round().long().tolist()
    ends = {"low": round(values.min().item(), 6), "high": round(values.max().item(), 6)}
    return {**ends, "values": " ".join(map(str, whole))}


def unpacked(row: Record) -> Tensor:
    """Rescaled values of a panel, (P).

    Example:
        >>> unpacked({"values": "0 250 1000"})
        tensor([0.0000, 0.2500, 1.0000], dtype=torch.float64)
    """
    return torch.tensor([int(word) for word in row["values"].split()]).double() / DIGITS


def parameters(row: Record) -> str:
    """Those of a panel's loss, in the paper's letters.

    Example:
        >>> parameters({"epsilon": 1.0, "samples": None})
        'ε = 1, exact'
    """
    parts = []
    for key, letter in (("tau", "τ"), ("epsilon", "ε"), ("samples", "B"), ("margin", "m")):
        if key in row:
            parts.append("exact" if row[key] is None else f"{letter} = {row[key]:g}")
    return ", ".join(parts)
