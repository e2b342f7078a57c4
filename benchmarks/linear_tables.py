"""The tables of ``python -m benchmarks linear``."""

from typing import Any

from benchmarks.linear_candidates import (
    BY_CLASSES,
    BY_ROWS,
    CHUNKS,
    CUT,
    LIGER,
    LISTS,
    MIXED,
    OURS,
    PLAIN,
    PLAIN_SMOOTH,
    TORCH,
)
from benchmarks.linear_model import of_class_chunks, of_row_chunks
from benchmarks.markdown import hardware, number, table

Record = dict[str, Any]
ORDER = (PLAIN, PLAIN_SMOOTH, CHUNKS, OURS, BY_ROWS, BY_CLASSES, LISTS, MIXED, TORCH, LIGER, CUT)


def layers(record: Record) -> str:
    """One line a layer: milliseconds, and mebibytes."""
    found = {(shape(row), row["loss"]): row for row in record["rows"]}
    names = [name for name in ORDER if any(name == loss for _, loss in found)]
    rows = []
    for one in dict.fromkeys(shape(row) for row in record["rows"]):
        cells = [cell(found.get((one, name))) for name in names]
        rows.append((one, *cells, *ratios(found.get((one, OURS)))))
    head = ("N × d → C", *names, "smooth over plain", "smooth over chunked cross-entropy")
    worst = max(row["error"] for row in record["rows"])
    return (
        "Forward + backward in bfloat16: milliseconds (MiB of peak memory beyond inputs and "
        f"gradients; {hardware(record)}):\n\n" + table(head, rows) + "\n\nLargest relative error "
        f"of the input's gradient in rows of these problems against float64: {worst:.2g}."
    )


def model(record: Record) -> str:
    """One line a layer and kind of chunks: the cost model beside what was measured."""
    speeds = record["ceilings"]
    rows = []
    for row in record["rows"]:
        if row["loss"] not in (BY_ROWS, BY_CLASSES):
            continue
        by_rows = row["loss"] == BY_ROWS
        cost = of_row_chunks(row) if by_rows else of_class_chunks(row)
        expected, measured = cost.milliseconds(speeds), row["milliseconds"]
        chunks = f"rows, {row['chunks']} chunks" if by_rows else "classes"
        size = (number(cost.operations / 1e12), number(cost.bytes / 1e9))
        times = (number(expected), number(measured), number(measured / expected))
        rows.append((shape(row), chunks, *size, *times))
    head = (
        "N × d → C",
        "chunks of",
        "10^12 operations",
        "GB",
        "model, ms",
        "measured, ms",
        "measured over model",
    )
    return (
        f"At {speeds['operations_per_second'] / 1e12:.0f} · 10^12 operations and "
        f"{speeds['bytes_per_second'] / 1e12:.2f} TB a second, those of a large product and of a "
        f"copy in the same run ({hardware(record)}):\n\n" + table(head, rows)
    )


def rooms(record: Record) -> str:
    """One line a layer: milliseconds and mebibytes by the memory of a chunk."""
    found = {(shape(row), row["chunk_bytes"]): row for row in record["rooms"]}
    sizes = sorted({size for _, size in found})
    rows = [
        (one, *(cell(found.get((one, size))) for size in sizes))
        for one in dict.fromkeys(shape(row) for row in record["rooms"])
    ]
    head = ("N × d → C", *(f"{size / 2**20:,.4g} MiB" for size in sizes))
    return (
        f"{OURS}: milliseconds (MiB of peak memory beyond inputs and gradients) by `chunk_bytes` "
        f"({hardware(record)}):\n\n" + table(head, rows)
    )


def predictions(record: Record) -> str:
    """One line a layer: milliseconds and mebibytes of the five best classes."""
    found = {(shape(row), row["loss"]): row for row in record["predictions"]}
    names = list(dict.fromkeys(row["loss"] for row in record["predictions"]))
    rows = [
        (one, *(cell(found.get((one, name))) for name in names))
        for one in dict.fromkeys(shape(row) for row in record["predictions"])
    ]
    return (
        "The five best classes: milliseconds (MiB of peak memory beyond inputs; "
        f"{hardware(record)}):\n\n" + table(("N × d → C", *names), rows)
    )


def sums(record: Record) -> str:
    """One line a number of chunks: errors of the weight's gradient."""
    rows = [
        (row["chunks"], *(number(row[name]) for name in ("inevitable", "float32", "rounded")))
        for row in record["sums"]
    ]
    head = ("chunks", "exact sums", "sums in float32", "rounded for each chunk")
    one = shape(record["sums"][0])
    return (
        f"Relative error of the weight's gradient in bfloat16 against float64, {one} "
        f"({hardware(record)}):\n\n" + table(head, rows)
    )


def shape(row: Record) -> str:
    return f"{row['rows']:,} × {row['features']:,} → {row['classes']:,}"


def cell(row: Record | None) -> str:
    return "–" if row is None else f"{number(row['milliseconds'])} ({row['mebibytes']:,.0f})"


def ratios(row: Record | None) -> tuple[str, str]:
    keys = ("over_plain", "over_chunks")
    first, second = ("–" if row is None else number(row[key]) for key in keys)
    return first, second
