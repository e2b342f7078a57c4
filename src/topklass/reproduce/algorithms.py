"""Berrada et al. (2018), Tables 3 to 5, beside the records of ``python -m benchmarks study``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

import topklass
from topklass._provenance import said
from topklass.reproduce.experiment import Experiment, Record, Request, new_record, save_record

RESULTS = Path("benchmarks") / "results"
"""Where the benchmark leaves its records, in a checkout."""
DETAILS = ("processor", "gpu", "threads", "python", "torch", "triton", "topklass", "commit", "what")
"""What they say about themselves."""

CLASSES = (100, 1_000, 10_000, 100_000)
PAPER = "Berrada 2018, Titan Xp: "
TABLE_3 = {
    f"{PAPER}summation": (6, 62, 627, 6258),
    f"{PAPER}divide and conquer": (11, 18, 24, 146),
}
TABLE_4 = {
    f"{PAPER}divide and conquer, autograd": (93, 139, 194, 287),
    f"{PAPER}divide and conquer, recursion": (7, 6, 20, 171),
}
"""Milliseconds for a batch of 256, k = 5."""
TEMPERATURES = (1e1, 1e0, 1e-1, 1e-2, 1e-3, 1e-4)
TABLE_5 = {
    ("summation", "single"): "✓✓✗✗✗✗",
    ("summation", "double"): "✓✓✓✗✗✗",
    ("divide and conquer", "single"): "✓✓✓✓✓✓",
    ("divide and conquer", "double"): "✓✓✓✓✓✓",
}
"""Whether no loss overflows, of 128 images with k = 5."""


class Algorithms(Experiment):
    """Time and stability of the paper's algorithms, of standard ones and of ours."""

    name = "algorithms"
    title = "The algorithms for the smooth loss: time, stability"
    papers = ("Berrada 2018, Tables 3, 4 and 5",)
    takes = ("data",)

    def run(self, request: Request) -> Record:
        """Read what the benchmark measured; a preset changes nothing."""
        studies = read_studies(request.data)
        where = said(hardware(study) for study in studies.values())
        request.say(
            f"Nothing is measured here: these are records of `python -m benchmarks study` ({where})"
        )
        protocol = {
            device: {key: study[key] for key in DETAILS if key in study}
            for device, study in studies.items()
        }
        record = new_record(self.name, request.preset, protocol)
        several = {key: [each.get(key) for each in protocol.values()] for key in DETAILS}
        record["versions"] = {key: said(several[key]) for key in ("python", "torch", "topklass")}
        record["hardware"] = where
        record["commit"] = said(several["commit"])
        for device, study in studies.items():
            record["rows"] += [{"device": device, **row} for row in study["time"]]
            record["rows"] += [{"device": device, **row} for row in study["stability"]]
        missing = [device for device in ("cpu", "gpu") if device not in studies]
        record["not_run"] = [f"python -m benchmarks study on a {each.upper()}" for each in missing]
        save_record(record, request.folder)
        return record

    def show(self, record: Record) -> list[Table]:
        """Tables 3 and 4 for each device, and Table 5."""
        tables = []
        for device in record["protocol"]:
            rows = [row for row in record["rows"] if row["device"] == device]
            where = hardware(record["protocol"][device])
            titles = (f"Table 3, forward, ms ({where})", f"Table 4, backward, ms ({where})")
            tables.append(times(rows, "forward_ms", TABLE_3, titles[0]))
            tables.append(times(rows, "backward_ms", TABLE_4, titles[1]))
            tables.append(stability(rows, f"Table 5, all losses finite ({where})"))
        return tables

    def draw(self, record: Record, folder: Path) -> list[Path]:
        """Times against the number of classes."""
        from topklass.reproduce.time_figures import draw_algorithms

        return draw_algorithms(record, folder)


def read_studies(data: Path | None) -> dict[str, Record]:
    """Records of the benchmark by device, from a file, a folder or the checkout."""
    data = data or Path(topklass.__file__).parents[2] / RESULTS
    paths = sorted(data.glob("study-*.json")) if data.is_dir() else [data]
    if not paths or not paths[0].is_file():
        raise FileNotFoundError(
            f"there is no study-cpu.json or study-gpu.json in {data}: `python -m benchmarks "
            "study`, in a checkout of topklass, measures it; --data is that file or its folder"
        )
    studies = {}
    for path in paths:
        try:
            study = json.loads(path.read_text("utf-8"))
        except ValueError:
            study = None
        if not isinstance(study, dict) or not {"time", "stability", "processor"} <= set(study):
            raise ValueError(f"{path} is no record of `python -m benchmarks study`")
        studies["gpu" if "gpu" in study else "cpu"] = study
    return studies


def hardware(details: Record) -> str:
    """The device of a study."""
    return str(details.get("gpu", details["processor"]))


def times(rows: list[Record], key: str, paper: Mapping[str, tuple[int, ...]], title: str) -> Table:
    """A line a method, a column a number of classes."""
    found = {(row["method"], row["classes"]): row[key] for row in rows if "classes" in row}
    table = Table("method", *(f"n = {n:,}" for n in CLASSES), title=title)
    for method in dict.fromkeys(method for method, _ in found):
        table.add_row(method, *(number(found.get((method, n))) for n in CLASSES))
    table.add_section()
    for name, values in paper.items():
        table.add_row(name, *map(number, values))
    return table


def stability(rows: list[Record], title: str) -> Table:
    """A line a method, a column a temperature: single / double precision."""
    found = {(r["method"], r["tau"], r["precision"]): r for r in rows if "tau" in r}
    table = Table("method, single / double", *(f"τ = {tau:g}" for tau in TEMPERATURES), title=title)
    for method in dict.fromkeys(method for method, _, _ in found):
        pairs = [
            [found.get((method, tau, p)) for p in ("single", "double")] for tau in TEMPERATURES
        ]
        table.add_row(method, *(" / ".join(map(finite, pair)) for pair in pairs))
    table.add_section()
    for name in dict.fromkeys(name for name, _ in TABLE_5):
        printed = zip(TABLE_5[name, "single"], TABLE_5[name, "double"], strict=True)
        table.add_row(f"Berrada 2018: {name}", *map(" / ".join, printed))
    return table


def finite(row: dict[str, Any] | None) -> str:
    """Whether all losses are finite, else the share that is.

    Example:
        >>> finite({"finite_losses": 1.0}), finite({"finite_losses": 0.49}), finite(None)
        ('✓', '✗ 49 %', '–')
    """
    if row is None:
        return "–"
    share = row["finite_losses"]
    return "✓" if share == 1 else f"✗ {100 * share:.0f} %"


def number(value: float | None) -> str:
    """Three digits.

    Example:
        >>> number(0.02651), number(6258), number(None)
        ('0.0265', '6,258', '–')
    """
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
