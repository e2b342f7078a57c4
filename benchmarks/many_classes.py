"""Training with 2,000 classes: the last layer apart from the loss, in one with it, and split.

Each run is a command ``topklass train`` with two processes; a finished one is not repeated.
"""

import os
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from benchmarks.environment import describe, write
from benchmarks.markdown import hardware, table

FOLDER = Path("runs/many-classes")
SEEDS = (0, 1, 2, 3)
WAYS = {
    "layer, then loss": [],
    "layer and loss in one": ["--fused-head"],
    "classes split over two processes": ["--shard-classes"],
}
DATA = "classes=2000 per_class=10 validation_per_class=1 test_per_class=4 size=16"
RECIPE = (
    "--data glyphs --pad 2 --border edge --loss smooth --learning-rate 0.8 --epochs 8 "
    "--batch-size 250 --devices 2"
)
QUICK = ["--option", "classes=100", "--epochs", "1"]


def main(quick: bool) -> None:
    rows = [row(way, seed, quick) for seed in SEEDS for way in WAYS]
    protocol = {"data": DATA, "recipe": RECIPE}
    write("many-classes", {**describe(torch.device("cpu")), **protocol, "rows": rows}, quick)


def row(way: str, seed: int, quick: bool) -> dict[str, Any]:
    """Train, if that is not done yet, and read the result."""
    from topklass.train.details import read_result  # needs topklass[train]

    name = f"{list(WAYS).index(way)}-{seed}" + ("-quick" if quick else "")
    run = FOLDER / name
    options = [word for each in DATA.split() for word in ("--option", each)]
    command = [*RECIPE.split(), *options, *WAYS[way], "--seed", str(seed)]
    if quick:
        command += QUICK
    if (run / "recipe.yaml").exists():
        command = ["--resume"]
    print(f"{way}, seed {seed}", flush=True)
    if not (run / "result.json").exists():
        subprocess.run(
            [sys.executable, "-m", "topklass", "train", "--folder", str(run), *command],
            check=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
    accuracy = read_result(run)["test"]["micro"]
    return {"way": way, "seed": seed, "top1": accuracy["1"], "top5": accuracy["5"]}


def accuracies(record: dict[str, Any]) -> str:
    """One line a way: means and standard deviations over seeds."""
    rows = []
    for way in WAYS:
        found = [each for each in record["rows"] if each["way"] == way]
        cells = [[100 * each[name] for each in found] for name in ("top1", "top5")]
        rows.append((way, *(f"{mean(cell):.2f} ± {stdev(cell):.2f}" for cell in cells)))
    return (
        table(("", "top-1, %", "top-5, %"), rows)
        + f"\n\n{len(SEEDS)} seeds, mean ± standard deviation (`{record['recipe']}`, "
        f"{record['data']}; {hardware(record)})."
    )
