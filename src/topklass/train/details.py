"""What a finished run leaves for comparisons: ranks of test labels, class counts, all epochs."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from topklass._provenance import processor
from topklass.data import Dataset, Split
from topklass.train.records import REMAKE, naming, read_record

RESULT, DETAILS = "result.json", "details.json"


class Data(TypedDict):
    """The data set of a result."""

    name: str


class Result(TypedDict):
    """What readers of ``result.json`` rely on; it has more."""

    recipe: dict[str, Any]
    data: Data
    epoch: int
    test: dict[str, dict[str, float]]
    seconds: float
    versions: dict[str, str]
    hardware: str


class Details(TypedDict):
    """What readers of ``details.json`` rely on; it may have more."""

    classes: list[str]
    counts: list[int]
    labels: list[int]
    ranks: list[int]
    epochs: list[dict[str, float]]


def read_result(run: Path) -> dict[str, Any]:
    """The result of a finished run."""
    return read_record(run / RESULT, Result)


def read_details(run: Path) -> dict[str, Any]:
    """The details of a finished run."""
    record = read_record(run / DETAILS, Details)
    classes, labels, ranks = (record[name] for name in ("classes", "labels", "ranks"))
    with naming(run / DETAILS, REMAKE.format(run)):
        if len(record["counts"]) != len(classes):
            raise ValueError(f"it has {len(record['counts'])} counts of {len(classes)} classes")
        if not len(labels) == len(ranks) > 0:
            raise ValueError(f"it has {len(ranks)} ranks of {len(labels)} labels")
        if not all(0 <= number < len(classes) for number in (*labels, *ranks)):
            raise ValueError(f"labels and ranks must be from 0 to {len(classes) - 1}")
        if not all(isinstance(row.get("epoch"), int) for row in record["epochs"]):
            raise ValueError("an epoch has no number")
    return record


def details(dataset: Dataset, ranks: Tensor, epochs: list[dict[str, float]]) -> dict[str, Any]:
    """The record of a run beside its result.

    Args:
        dataset: what it was trained and tested on.
        ranks: of the test labels, (N).
        epochs: what was logged in each.

    Returns:
        ``classes``: their names; ``counts``: training images of each; ``labels``: of the test
        images; ``ranks``: how many classes have larger scores than the label, which tells for every
        k whether a list holds it; ``images``: a hash of them, if they are in memory; ``epochs``.
    """
    labels = dataset.test.labels.cpu()
    return {
        "classes": printable(dataset.classes),
        "counts": dataset.counts.tolist(),
        "labels": labels.tolist(),
        "ranks": ranks.tolist(),
        "images": digest(dataset.test),
        "epochs": epochs,
    }


def digest(split: Split) -> str | None:
    """A hash of images in memory; None for image files."""
    if not isinstance(split.images, Tensor):
        return None
    return blake2b(split.images.cpu().contiguous().numpy().tobytes(), digest_size=8).hexdigest()


def printable(names: Iterable[str]) -> list[str]:
    r"""Names that can be written: what is not Unicode in them becomes a question mark.

    Example:
        >>> printable(["Ω", "caf\udce9"])
        ['Ω', 'caf?']
    """
    return [name.encode(errors="replace").decode() for name in names]


def hardware(device: torch.device) -> str:
    """Name of the GPU, or of the processor and how many threads it had."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cores = torch.get_num_threads()
    return f"{processor()}, {cores} thread{'s' if cores > 1 else ''}"
