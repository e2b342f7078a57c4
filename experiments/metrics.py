"""Numbers of a row of a record, by names such as "test macro top-5"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

GRADIENT = "gradient"
NON_ZERO = "non-zero gradients"
"""Scores whose gradient is not 0 in the first epoch, mean over its images."""

CURVES = {
    "classes pushed down": "train/pushed",
    "spread of logits": "train/spread",
    "images with a gradient": "train/active",
}
"""What is logged in every epoch, for the first and the last one, see ``gradient_share``."""
EPOCHS = {"first epoch": 0, "last epoch": -1}

BOTH = "validation top-1 and top-k"
"""The mean of both in the epoch where it is the largest; of runs that choose their epoch by it."""

TESTS = {"test": "test", "last": "test_last"}
"""Where rows have accuracies on test images."""


class Metric(NamedTuple):
    """What is measured."""

    what: str
    """"test" (of the best epoch on validation images), "last" (test of the last one), "ten-crop",
    "validation" (the best epoch), "training" (the last one), ``BOTH``,
    ``NON_ZERO`` or one of ``CURVES`` with one of ``EPOCHS``."""
    average: str = "micro"
    k: int | None = None
    """Length of the list; None for that of the run."""


def parse_metric(text: str) -> Metric:
    """A metric from its name.

    Example:
        >>> parse_metric("test macro top-5")
        Metric(what='test', average='macro', k=5)
        >>> parse_metric("validation top-k")
        Metric(what='validation', average='micro', k=None)
    """
    if text == BOTH or is_count(text):
        return Metric(text)
    kinds = "|".join((*TESTS, "ten-crop", "validation", "training"))
    found = re.fullmatch(rf"({kinds})( macro)? top-(k|\d+)", str(text))
    if found is None or (found[2] and found[1] not in TESTS):
        raise ValueError(
            f"unknown metric {text!r}: there are 'test top-5', 'last top-5', both also as 'test "
            "macro top-5', 'ten-crop top-5', 'validation top-5', 'training top-5', each also with "
            f"top-k, {BOTH!r}, {NON_ZERO!r}, and {', '.join(CURVES)}, each with "
            f"{' or '.join(EPOCHS)}"
        )
    k = None if found[3] == "k" else int(found[3])
    return Metric(found[1], (found[2] or "micro").strip(), k)


def is_count(text: str) -> bool:
    """Whether a metric is a number, not an accuracy.

    Example:
        >>> is_count("classes pushed down, last epoch"), is_count("test top-5")
        (True, False)
    """
    return text == NON_ZERO or text in [f"{name}, {epoch}" for name in CURVES for epoch in EPOCHS]


def title_of(metric: str) -> str:
    """The title of a metric.

    Example:
        >>> title_of("validation top-5"), title_of(BOTH)
        ('best validation top-5', 'best mean of validation top-1 and top-k')
    """
    if metric == BOTH:
        return f"best mean of {metric}"
    return f"best {metric}" if metric.startswith("validation") else metric


def value(row: Mapping[str, Any], k: int, name: str) -> float | None:
    """A metric of a row, accuracies in percent; None if it was not measured.

    Args:
        row: of a record.
        k: length of the list in the recipe of the row.
        name: of the metric.
    """
    metric = parse_metric(name)
    if metric.what == NON_ZERO:
        return row["gradient"][0] * row["classes"] if row["gradient"] else None
    if is_count(name):
        curve, epoch = name.rsplit(", ", 1)
        logged = row["curves"].get(CURVES[curve], [])
        return logged[EPOCHS[epoch]] if logged else None
    length = metric.k or k
    share: float | None
    if name == BOTH:
        share = row["validation"].get("both")
    elif metric.what in TESTS:
        shares = row.get(TESTS[metric.what], {}).get(metric.average, [])
        share = shares[length - 1] if length <= len(shares) else None
    elif metric.what == "ten-crop":
        share = row["views"]["marginals"] if "views" in row and length == k else None
    else:
        share = row[metric.what].get(str(length))
    return None if share is None else 100 * share
