"""One measurement, as a row of a record."""

from typing import Any

Row = dict[str, Any]


def say(row: Row) -> None:
    """Show a measurement when it is made."""
    print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)


def digits(value: float, count: int = 3) -> float:
    """So many significant digits."""
    return float(f"{value:.{count}g}")
