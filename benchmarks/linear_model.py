"""The cost model of docs/scale.md: operations and bytes of a layer and its loss in chunks."""

from typing import Any, NamedTuple

import torch

from benchmarks.rows import digits
from benchmarks.speed_gpu import copy_bandwidth
from benchmarks.timing import medians

NUMBER = 2
"""Bytes of a number, in bfloat16."""


class Cost(NamedTuple):
    """Of a forward and a backward pass."""

    operations: float
    """Of products; an addition and a multiplication are two."""
    bytes: float
    """Read and written."""

    def milliseconds(self, ceilings: dict[str, float]) -> float:
        """One after the other, at the speeds of a large product and of a copy."""
        products = self.operations / ceilings["operations_per_second"]
        return 1e3 * (products + self.bytes / ceilings["bytes_per_second"])


def of_row_chunks(row: dict[str, Any]) -> Cost:
    """Three products; logits pass six times; the weight and its gradient twice each a chunk."""
    logits, weight, products = sizes(row)
    return Cost(3 * products, NUMBER * (6 * logits + 4 * weight * row["chunks"]))


def of_class_chunks(row: dict[str, Any]) -> Cost:
    """Logits are made twice; the weight is read three times, and its gradient written once."""
    logits, weight, products = sizes(row)
    return Cost(4 * products, NUMBER * (9 * logits + 4 * weight))


def sizes(row: dict[str, Any]) -> tuple[float, float, float]:
    """Numbers of logits and of weights, and operations of one product."""
    rows, features, classes = (float(row[key]) for key in ("rows", "features", "classes"))
    return rows * classes, features * classes, 2 * rows * features * classes


def ceilings(device: torch.device, smoke: bool) -> dict[str, float]:
    """Speeds of a large product in bfloat16 and of a large copy."""
    side = 256 if smoke else 8_192
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    once = medians({"product": lambda: left @ right}, device)["product"]
    return {
        "operations_per_second": digits(2 * side**3 / once, 4),
        "bytes_per_second": digits(copy_bandwidth(device, 2**20 if smoke else 2**28), 4),
    }
