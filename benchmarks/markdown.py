"""Words and tables in Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def number(value: float | None, missing: str = "–") -> str:
    """Three significant digits, without an exponent for everyday sizes."""
    if value is None:
        return missing
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e6:
        text = f"{float(f'{value:.3g}'):,.6f}"
        return text.rstrip("0").rstrip(".")
    return f"{value:.1e}"


def shape(row: dict[str, Any]) -> str:
    return f"{row['samples']:,} × {row['classes']:,}"


def hardware(record: dict[str, Any]) -> str:
    """Where it was measured, in a phrase."""
    if "gpu" in record:
        what = f"{record['gpu']}, torch {record['torch']}, Triton {record['triton']}"
        return f"{what}, Python {record['python']}, commit {record['commit']}"
    threads = "1 thread" if record["threads"] == 1 else f"{record['threads']} threads"
    what = f"{record['processor']}, {threads}, torch {record['torch']}"
    return f"{what}, commit {record['commit']}"
