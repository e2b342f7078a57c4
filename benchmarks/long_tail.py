"""Sets of labels of long tails, from saved logits: coverage of samples and of classes, and size.

A file holds what ``torch.save`` makes of ``{"name": str, "logits": (N, C), "target": (N), "counts":
(C)}``, where ``counts`` are the training samples of each class. Sets are calibrated on one random
half and measured on the other, and that is averaged over several halves.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.environment import describe, write
from benchmarks.rows import Row, say

ALPHAS = (0.1, 0.05)
SPLITS = 10
K = 5


def main(files: Sequence[str], quick: bool) -> None:
    rows: list[Row] = []
    for file in files:
        saved = checked(torch.load(file, weights_only=True), file)
        for alpha in ALPHAS:
            for row in compare(alpha, 1 if quick else SPLITS, **saved):
                rows.append({"name": saved["name"], "alpha": alpha} | row)
                say(rows[-1])
    record = {
        "what": f"sets calibrated on one half, measured on the other, mean of {SPLITS} splits; "
        "worst: of the classes with samples in that half",
        **describe(torch.device("cpu")),
        "sets": rows,
    }
    write("long-tail", record, quick)


def checked(saved: Any, file: str) -> dict[str, Any]:
    """What a file holds; an error says what it should hold."""
    wanted = "{'name': str, 'logits': (N, C), 'target': (N), 'counts': (C)}"
    if not isinstance(saved, dict) or saved.keys() != {"name", "logits", "target", "counts"}:
        raise ValueError(f"{file} must hold {wanted}")
    shapes = [tuple(saved[key].shape) for key in ("logits", "target", "counts")]
    if len(shapes[0]) != 2 or shapes[1:] != [shapes[0][:1], shapes[0][1:]]:
        raise ValueError(f"{file} must hold {wanted}, got shapes {shapes}")
    return saved


def compare(
    alpha: float, splits: int, name: str, logits: Tensor, target: Tensor, counts: Tensor
) -> list[Row]:
    """A row for each method of ``topklass sets``."""
    from topklass.train.sets import measure, methods

    found: dict[str, list[list[float]]] = {}
    for split in range(splits):
        stream = torch.Generator().manual_seed(split)
        known, new = torch.randperm(len(target), generator=stream).chunk(2)
        for method, make in methods(alpha, None, counts, K).items():
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*cannot be covered")
                _, sets = make(logits[known], target[known], stream)
            row = measure(sets, logits[new], target[new], logits.shape[1])
            values = [*row["coverage"].values(), row["size"], row["empty"]]
            found.setdefault(method, []).append(values)
    names = ("micro", "macro", "worst", "size", "empty")
    means = {method: torch.tensor(values).mean(0).tolist() for method, values in found.items()}
    return [
        {"sets": method, **dict(zip(names, (round(x, 5) for x in values), strict=True))}
        for method, values in means.items()
    ]
