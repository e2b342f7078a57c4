"""Rows of a record: what is kept of a finished run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments.grid import Planned
from topklass.train.engine import LENGTHS
from topklass.train.finished import FinishedRun, NotFinished, read_run
from topklass.train.records import write_json

VIEWS = "views.json"


def row_of(run: Planned, folder: Path, curves: Iterable[str], views: bool) -> dict[str, Any]:
    """The row of a finished run.

    Args:
        run: what was planned.
        folder: that of the run.
        curves: what to keep of every epoch, besides gradients.
        views: whether to measure the average over views.

    Returns:
        What ``Planned.row`` has; ``test``: accuracies, micro and macro, for lists of 1, 2, …;
        ``test_last``: the same by the weights of the last epoch, where the run measured it;
        ``validation``: the best of all epochs by length of the list; ``training``: that of the last
        epoch; ``gradient``: share of the scores with a gradient, by epoch; ``curves``; ``views``;
        ``classes``, ``epoch`` (of the checkpoint that was tested, the first is 1), ``epochs``,
        ``seconds``, ``hardware``, ``versions``, ``commit``; ``images``: a hash of the test images.
    """
    try:
        finished = read_run(folder)
    except NotFinished as reason:
        raise ValueError(str(reason)) from reason
    lengths = [k for k in LENGTHS if k <= len(finished.classes)]
    row = {
        **run.row,
        "test": {
            average: [short(finished.accuracy(k, average).item()) for k in lengths]
            for average in ("micro", "macro")
        },
        "validation": _by_length(finished, "validation", max),
        "training": _by_length(finished, "train", lambda values: values[-1]),
        "gradient": curve(finished, "train/gradient"),
        "curves": {name: curve(finished, name) for name in curves},
        "classes": len(finished.classes),
        "epoch": finished.result["epoch"] + 1,
        "epochs": len(finished.epochs),
        "seconds": finished.result["seconds"],
        "hardware": finished.result["hardware"],
        "versions": finished.result["versions"],
        "commit": finished.result.get("commit", "unknown"),
        "images": finished.images,
    }
    if "test_last" in finished.result:
        row["test_last"] = {
            average: [short(shares[str(k)]) for k in lengths]
            for average, shares in finished.result["test_last"].items()
        }
    if views:
        row["views"] = views_of(folder)
    return row


def views_of(folder: Path) -> dict[str, float]:
    """Top-k test accuracies by the average over views, measured once and kept with the run."""
    path = folder / VIEWS
    if not path.exists():
        from topklass.train.evaluation import evaluate, load_run

        write_json(path, evaluate(load_run(folder))["views"])
    found: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return {name: short(each) for name, each in found.items()}


def curve(finished: FinishedRun, name: str) -> list[float]:
    """What was logged in each epoch."""
    return [short(each) for each in finished.curve(name).values()]


def short(number: float) -> float:
    """Few digits, for a small file."""
    return round(number, 5)


def _by_length(finished: FinishedRun, split: str, chosen: Any) -> dict[str, float]:
    lengths = dict.fromkeys((1, finished.recipe.k))
    found = {k: curve(finished, f"{split}/top{k}") for k in lengths}
    return {str(k): chosen(values) for k, values in found.items() if values}
