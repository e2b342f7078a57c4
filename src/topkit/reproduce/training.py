"""Experiments that train networks, by the YAML files in ``topkit/recipes``."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from topkit.data import load
from topkit.reproduce.experiment import (
    Experiment,
    Record,
    Request,
    load_record,
    new_record,
    record_path,
    save_record,
)
from topkit.reproduce.grid import NOT_RECORDED, Planned, plain, planned_runs, protocol_of
from topkit.reproduce.plan import DataNeeded, Plan, Settings
from topkit.reproduce.rows import row_of
from topkit.reproduce.tables import show_tables
from topkit.train.engine import RECIPE, train
from topkit.train.finished import shown
from topkit.train.recipe import Recipe
from topkit.train.several import is_finished, result_line, train_all


class TrainingExperiment(Experiment):
    """One that trains by all recipes of a plan.

    Args:
        plan: what its file says.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.name, self.title, self.papers = plan.name, plan.title, plan.papers

    def run(self, request: Request) -> Record:
        """Train what the record lacks; it is written with every run that ends."""
        preset, folder = request.preset, request.folder
        own = "data" in self.plan.presets[preset].settings
        if not own:
            check_data(self.plan.data, request.data)
        runs = planned_runs(self.plan, preset, None if own else request.data)
        record = self.begin(preset, folder)
        rows = {(row["method"], row["run"]): row for row in record["rows"]}

        def keep(finished: Path) -> None:
            for run in runs:
                if run.name == finished.name:
                    row = row_of(run, finished, self.plan.curves, self.plan.views)
                    rows[run.method, run.name] = {**row, "commit": record["commit"]}
            fill(record, runs, rows)
            save_record(record, folder)

        left = {folder / run.name: run.recipe for run in runs if key(run) not in rows}
        for path in [path for path, recipe in left.items() if is_finished(path, recipe)]:
            keep(path)
            del left[path]
        fill(record, runs, rows)
        save_record(record, folder)
        request.say(f"{len(runs) - len(record['not_run'])} of {len(runs)} runs are there.")
        left = dict(list(left.items())[: request.most])
        if request.at_once > 1:
            train_all(left, at_once=request.at_once, console=request.console, finished=keep)
        else:
            for path, recipe in left.items():
                train_here(recipe, path, request.console)
                keep(path)
        return record

    def begin(self, preset: str, folder: Path | None = None) -> Record:
        """The record of a folder, or a new one in which nothing is run."""
        runs = planned_runs(self.plan, preset)
        record = new_record(self.name, preset, protocol_of(runs))
        path = None if folder is None else record_path(folder, self.name, preset)
        rows = {} if path is None or not path.exists() else rows_before(path, runs, record)
        fill(record, runs, rows)
        return record

    def show(self, record: Record) -> list[Table]:
        """Ours over seeds beside the papers' numbers."""
        return show_tables(self.plan, record)

    def draw(self, record: Record, folder: Path) -> list[Path]:
        """Metrics against settings with the papers' points, and curves by epoch."""
        from topkit.reproduce.figures import draw_figures

        return draw_figures(self.plan, record, folder)


def key(run: Planned) -> tuple[str, str]:
    """What tells the rows of a record apart."""
    return run.method, run.name


def fill(record: Record, runs: list[Planned], rows: dict[tuple[str, str], Record]) -> None:
    """Put rows into a record in the order of the plan, others last, and list what is missing."""
    keys = [key(run) for run in runs]
    ordered = [each for each in keys if each in rows] + [each for each in rows if each not in keys]
    record["rows"] = [rows[each] for each in ordered]
    record["not_run"] = [run.row for run in runs if key(run) not in rows]


def train_here(recipe: Recipe, folder: Path, console: Console | None) -> None:
    """Train in this process, from the last checkpoint if there is one."""
    if console is not None:
        console.print(f"{folder.name}", highlight=False, soft_wrap=True)
    train(recipe, folder, resume=(folder / RECIPE).exists(), console=console)
    if console is not None:
        console.print(result_line(folder), highlight=False)


def rows_before(path: Path, runs: list[Planned], record: Record) -> dict[tuple[str, str], Record]:
    """The rows of an earlier record, if they have the settings that are asked for now.

    What a recipe did not have then has its default, and rows that are no longer planned stay.
    """
    old, common = load_record(path), record["protocol"]
    same = {(run.method, run.seed, repr(recorded(plain(run.recipe)))): run for run in runs}
    named = {key(run): run for run in runs}
    rows = {}
    for row in old["rows"]:
        before = recorded({**plain(Recipe()), **old["protocol"], **row["settings"]})
        run = same.get((row["method"], row["seed"], repr(before)))
        name = row["run"] if run is None else run.name
        if run is None and (row["method"], name) in named:
            now = plain(named[row["method"], name].recipe)
            raise ValueError(
                f"{path} is of another protocol ({name}: {changes(before, now)}): choose another "
                "--folder, or move it away"
            )
        settings = {n: v for n, v in before.items() if n not in common or common[n] != v}
        rows[row["method"], name] = {**row, "run": name, "settings": settings}
    return rows


def recorded(settings: Settings) -> Settings:
    """What a record has of all settings of a recipe."""
    return {name: settings[name] for name in sorted(settings) if name not in NOT_RECORDED}


def changes(before: Settings, now: Settings) -> str:
    """What became of settings, in words.

    Example:
        >>> changes({"k": 5, "epochs": 3}, {"k": 5, "epochs": 4})
        'epochs was 3 and is 4'
    """
    changed = [name for name in before if before[name] != now[name]]
    return "; ".join(f"{n} was {shown(before[n])} and is {shown(now[n])}" for n in changed)


def check_data(needed: DataNeeded, data: Path | None) -> None:
    """Require the data set of an experiment."""
    if data is None:
        raise ValueError(f"this needs --data PATH, the place of {needed.name}: get {needed.get}")
    if not data.exists():
        raise FileNotFoundError(f"there is no {data}; {needed.name} is: {needed.get}")
    classes = len(load(data).classes)
    if classes != needed.classes:
        raise ValueError(
            f"{needed.name} has {needed.classes:,} classes, {data} has {classes:,}: get "
            f"{needed.get}"
        )
