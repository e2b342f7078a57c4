"""The tables of ``python -m benchmarks study``, with the papers' figures beside ours."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.markdown import hardware, number, table

Record = dict[str, Any]

CLASSES = (100, 1_000, 10_000, 100_000)
TABLE_3 = {
    "paper: summation": (6, 62, 627, 6258),
    "paper: divide and conquer": (11, 18, 24, 146),
}
TABLE_4 = {
    "paper: divide and conquer, autograd": (93, 139, 194, 287),
    "paper: divide and conquer, recursive backward": (7, 6, 20, 171),
}
"""Milliseconds on a Titan Xp (Berrada et al. 2018)."""
TEMPERATURES = (1e1, 1e0, 1e-1, 1e-2, 1e-3, 1e-4)
TABLE_5 = {
    "paper: summation": ("✓✓✗✗✗✗", "✓✓✓✗✗✗"),
    "paper: divide and conquer": ("✓✓✓✓✓✓", "✓✓✓✓✓✓"),
}
"""Whether no loss of 128 images overflows, in single and in double precision."""


def forward(record: Record) -> str:
    return f"Table 3, forward pass, ms ({hardware(record)}):\n\n" + times(
        record, "forward_ms", "loss_error", TABLE_3
    )


def backward(record: Record) -> str:
    return f"Table 4, backward pass, ms ({hardware(record)}):\n\n" + times(
        record, "backward_ms", "gradient_error", TABLE_4
    )


def times(record: Record, key: str, error: str, paper: Mapping[str, Sequence[float]]) -> str:
    """A line a method, a column a number of classes, and the largest error of these."""
    if not record["time"]:
        return "Not measured."
    classes = list(dict.fromkeys(row["classes"] for row in record["time"]))
    methods = list(dict.fromkeys(row["method"] for row in record["time"]))
    found = {(row["method"], row["classes"]): row for row in record["time"]}
    rows = []
    for method in methods:
        of_method = [found.get((method, n), {}) for n in classes]
        errors = [row[error] for row in of_method if error in row]
        worst = f"{max(errors):.0e}" if errors else "–"
        rows.append((method, *(number(row.get(key)) for row in of_method), worst))
    for name, values in paper.items():
        printed = dict(zip(CLASSES, values, strict=True))
        rows.append((name, *(number(printed.get(n)) for n in classes), "–"))
    return table(("method", *(f"n = {n:,}" for n in classes), "error"), rows)


def loss_errors(record: Record) -> str:
    return f"Table 5, loss, single / double precision ({hardware(record)}):\n\n" + by_temperature(
        record, "loss_error", "finite_losses", TABLE_5
    )


def gradient_errors(record: Record) -> str:
    return (
        f"The same for the gradient, single / double precision ({hardware(record)}):\n\n"
        + by_temperature(record, "gradient_error", "finite_gradients")
    )


def by_temperature(
    record: Record, error: str, finite: str, paper: Mapping[str, tuple[str, str]] | None = None
) -> str:
    """A line per method, a column per temperature: the error, or how many rows are finite."""
    temperatures = list(dict.fromkeys(row["tau"] for row in record["stability"]))
    methods = list(dict.fromkeys(row["method"] for row in record["stability"]))
    found = {(r["method"], r["tau"], r["precision"]): r for r in record["stability"]}

    def cell(method: str, tau: float, precision: str) -> str:
        row = found[method, tau, precision]
        if row[finite] < 1:
            return f"✗ {row[finite]:.0%}" if row[finite] >= 0.005 else "✗"
        return f"{row[error]:.0e}"

    rows = [
        (m, *(f"{cell(m, tau, 'single')} / {cell(m, tau, 'double')}" for tau in temperatures))
        for m in methods
    ]
    for name, (single, double) in (paper or {}).items():
        pairs = map(" / ".join, zip(single, double, strict=True))
        printed = dict(zip(TEMPERATURES, pairs, strict=True))
        rows.append((name, *(printed.get(tau, "–") for tau in temperatures)))
    return table(("method", *(f"τ = {tau:g}" for tau in temperatures)), rows)


def published(record: Record) -> str:
    """What the published code does beyond the paper."""
    found = record["published"]
    if not found:
        return "The published code was not installed."
    below, beyond = found["loss_below_switch"], found["loss_beyond_switch"]
    rows = [
        ("loss just below its switch to the hard loss", below, found["exact_below_switch"]),
        ("loss just beyond it", beyond, found["exact_beyond_switch"]),
        ("relative error of the gradient for k = 1", found["gradient_error_for_one_guess"], 0),
    ]
    return table(
        ("1,000 classes, five tied at the top, the label among them", "published", "exact"), rows
    )
