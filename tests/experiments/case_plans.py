"""A small experiment with cases, and rows of it without training."""

from pathlib import Path
from typing import Any

from toy_plans import TOY

from experiments.grid import Planned
from experiments.plan import Plan, parse_plan
from finished_runs import write_run

CASES = """
cases:
  clean: {}
  few: {subset: 12}
  noisy, few: {subset: 12, noise: 0.4, noise_kind: block}
  long tail: {imbalance: 10, average: macro}
"""
GRIDS = """
    grids:
      - {case: [clean, few, long tail], seeds: [0]}
      - {case: [clean, few], seeds: [1]}
    search:
      learning_rate: [0.1, 0.2]
      cases: {few: &few [few, "noisy, few"], clean: *few}
"""


def case_text() -> str:
    """A plan with cases; the long tail has no search."""
    head, rest = TOY.split("presets:\n")
    _, others = rest.split("  fast:")
    last, _ = others.split("published:")
    tables = """
tables:
  - {title: accuracy, rows: case, columns: method, metrics: [test top-2]}
  - {title: last, rows: method, where: {case: few}, metrics: [last top-2, last macro top-1]}
"""
    last = last.replace("{noise: 0.0}", "{case: clean}")
    head += "  focal: {loss: focal}\n"
    return f"{head}{CASES}presets:\n  paper:\n    settings: {{}}{GRIDS}  fast:{last}{tables}"


def case_plan(text: str | None = None) -> Plan:
    return parse_plan("toy", text or case_text())


def write(folder: Path, run: Planned, right: float, **more: Any) -> None:
    """A finished run with this accuracy."""
    write_run(folder / run.name, run.recipe, right, **more)
