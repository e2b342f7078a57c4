"""The tables of ``python -m benchmarks prediction`` and ``long-tail``."""

from typing import Any

from benchmarks.markdown import hardware, number, table
from benchmarks.prediction import KS, K

Record = dict[str, Any]


def accuracy(record: Record) -> str:
    """One line a file and way of averaging."""
    rows = [
        (
            model(row),
            row["method"],
            *(percent(row.get(f"top_{k}")) for k in KS),
            difference(row),
        )
        for row in record["accuracy"]
    ]
    head = ("model", "prediction", *(f"top-{k}, %" for k in KS), f"top-{K}, points above softmax")
    return (
        "Accuracy by the way in which crops are averaged; the difference is paired, ± one standard "
        f"error ({hardware(record)}):\n\n" + table(head, rows)
    )


def sets(record: Record) -> str:
    """One line a file, goal and kind of sets."""
    rows = [
        (
            row["name"],
            row["goal"],
            row["sets"],
            number(row["size"]),
            percent(row["coverage"]),
            percent(row["empty"]),
        )
        for row in record["sets"]
    ]
    head = ("model", "calibrated for", "sets", "labels", "coverage, %", "empty, %")
    return (
        "Sets from the softmax averaged over crops, calibrated on one half, measured on the other "
        f"({hardware(record)}):\n\n" + table(head, rows)
    )


def long_tail(record: Record) -> str:
    """One line a file, coverage and method."""
    rows = [
        (
            row["name"],
            percent(1 - row["alpha"]).rstrip("0").rstrip("."),
            row["sets"],
            *(percent(row[each]) for each in ("micro", "macro", "worst")),
            number(row["size"]),
            percent(row["empty"]),
        )
        for row in record["sets"]
    ]
    head = ("data", "asked for, %", "sets", "micro, %", "macro, %", "worst class, %", "labels")
    return (
        "Coverage of sets that are calibrated on one half, and measured on the other "
        f"({hardware(record)}):\n\n" + table((*head, "empty, %"), rows)
    )


def model(row: Record) -> str:
    crops = "1 crop" if row["crops"] == 1 else f"{row['crops']} crops"
    return f"{row['name']} ({row['samples']:,} × {row['classes']:,}, {crops})"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.2f}"


def difference(row: Record) -> str:
    if "difference" not in row:
        return "–"
    return f"{100 * row['difference']:+.2f} ± {100 * row['standard_error']:.2f}"
