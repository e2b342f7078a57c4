"""Experiments that train networks, planned by the YAML files in ``experiments/recipes``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from rich.table import Table

from experiments.experiment import (
    Experiment,
    Record,
    Request,
    another_protocol,
    changes,
    check_rows,
    load_same,
    new_record,
    record_path,
    save_record,
)
from experiments.gradient_share import GradientShare
from experiments.grid import NOT_RECORDED, Planned, plain, planned_runs, protocol_of
from experiments.plan import CASE, RATE, DataNeeded, Plan, Settings, case_settings
from experiments.rows import row_of
from experiments.search import choose, search_table
from experiments.tables import show_tables
from topklass.data import Dataset, load
from topklass.train.details import digest
from topklass.train.engine import train
from topklass.train.recipe import Recipe
from topklass.train.restore import RECIPE
from topklass.train.several import is_finished, raise_failed, result_line, train_all
from topklass.train.trainer import Interrupted

ROW = (
    *("run", "method", "seed", "settings", "test", "validation", "training", "gradient", "curves"),
    *("hardware", "commit"),
)
"""What every row has."""


class TrainingExperiment(Experiment):
    """An experiment that trains all runs of a plan.

    Args:
        plan: the content of its file.
    """

    takes = ("data", "at_once", "most")
    samples = "images"
    long_without_gpu = True

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.name, self.title, self.papers = plan.name, plan.title, plan.papers

    def runs(self, preset: str) -> int:
        """How many networks are trained."""
        return len({run.name for run in planned_runs(self.plan, preset)})

    def run(self, request: Request) -> Record:
        """Train the runs that the record lacks; it is saved after each of them."""
        preset, folder = request.preset, request.folder
        data = None if request.data is None else request.data.resolve()
        if "data" not in self.plan.presets[preset].settings:
            images = check_data(self.plan.data, request.data, self.read)
        elif data is None:
            images = self.read(None)[1]
        else:
            raise ValueError(f"the preset {preset} makes its own {self.samples}: leave --data out")
        record = self.begin(preset, folder)
        rows = {(row["method"], row["run"]): row for row in record["rows"]}
        for row in rows.values():
            if None not in (images, row["images"]) and images != row["images"]:
                raise ValueError(
                    f"{row['run']} of {record_path(folder, self.name, preset)} was tested on other "
                    f"{self.samples} than those of {data}: choose another --folder, or the "
                    "earlier data"
                )

        def keep(run: Planned, row: Record) -> None:
            for each in self.fill(record, rows, data):
                if each.name == run.name:  # methods that come to the same
                    rows[key(each)] = {**row, **each.row}
            self.fill(record, rows, data)
            save_record(record, folder)

        def left(search: bool) -> list[Planned]:
            runs = [run for run in self.fill(record, rows, data) if key(run) not in rows]
            ready = [run for run in runs if run.search == search and not run.waits]
            return list({run.name: run for run in ready}.values())

        for search in (True, False):
            for run in left(search):
                if (row := self.finished(run, folder)) is not None:
                    keep(run, row)
        save_record(record, folder)
        planned = len(self.fill(record, rows, data))
        request.say(f"{planned - len(record['not_run'])} of {planned} runs are done.")
        needs_gpu = self.long_without_gpu and preset != "smoke"
        if record["not_run"] and needs_gpu and not torch.cuda.is_available():
            request.say("There is no GPU: a run may take days (--preset smoke takes seconds).")
        most, failed = request.most, []
        for search in (True, False):  # the latter need the learning rates of the former
            runs = left(search)[:most]
            most = None if most is None else most - len(runs)
            try:
                if runs:
                    self.train(runs, request, keep)
            except ChildProcessError as error:
                failed.append(str(error))
        if failed:
            raise ChildProcessError("; ".join(failed))
        return record

    def fill(
        self, record: Record, rows: dict[tuple[str, str], Record], data: Path | None = None
    ) -> list[Planned]:
        """Put rows into a record, with the learning rates that they choose; returns all runs."""
        preset, chosen = record["preset"], {}
        if self.plan.presets[preset].search:
            chosen = choose(self.plan, preset, record["protocol"], rows.values())
            record["chosen"] = chosen
        runs = planned_runs(self.plan, preset, data, chosen)
        fill(record, runs, rows)
        return runs

    def read(self, data: Path | None) -> tuple[Dataset | None, str | None]:
        """The data set, and a hash of its test images; nothing where every run makes its own."""
        if data is None:
            return None, None
        dataset = load(data)
        return dataset, digest(dataset.test)

    def finished(self, run: Planned, folder: Path) -> Record | None:
        """The row of a run that was trained before, from what it left in the folder."""
        path = folder / run.name
        return self.row(run, path) if is_finished(path, run.recipe) else None

    def train(
        self, runs: list[Planned], request: Request, keep: Callable[[Planned, Record], object]
    ) -> None:
        """Train these runs, and call ``keep`` with the row of each when it ends."""
        by_path = {request.folder / run.name: run for run in runs}

        def ended(path: Path) -> None:
            keep(by_path[path], self.row(by_path[path], path))

        train_runs({path: run.recipe for path, run in by_path.items()}, request, ended)

    def row(self, run: Planned, finished: Path) -> Record:
        """The row of a finished run in the record."""
        return row_of(run, finished, self.plan.curves, self.plan.views)

    def begin(self, preset: str, folder: Path | None = None) -> Record:
        """The record of a folder, or a new one without rows."""
        runs = planned_runs(self.plan, preset)
        record = new_record(self.name, preset, protocol_of(runs))
        path = None if folder is None else record_path(folder, self.name, preset)
        rows = {}
        if path is not None and path.exists():
            rows = earlier_rows(path, runs, record, self.plan)
            rows = earlier_rows(path, self.fill(record, rows), record, self.plan)
        self.fill(record, rows)
        return record

    def show(self, record: Record) -> list[Table]:
        """Ours over seeds beside the papers' numbers."""
        check_rows(record, ROW)
        searched = [search_table(self.plan, record)] if "chosen" in record else []
        return [*show_tables(self.plan, record), *searched]

    def draw(self, record: Record, folder: Path) -> list[Path]:
        """Metrics against settings with the papers' points, and curves by epoch."""
        from experiments.figures import draw_figures

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
    if rows:  # may come from other machines and versions
        found = list(rows.values())
        names = dict.fromkeys(name for row in found for name in row["versions"])
        record["versions"] = {n: distinct(row["versions"].get(n) for row in found) for n in names}
        record["hardware"] = distinct(row["hardware"] for row in found)
        record["commit"] = distinct(row["commit"] for row in found)


def distinct(values: Iterable[str | None]) -> str:
    """Different values, without repetition.

    Example:
        >>> distinct(["a", "b", "a", None])
        'a; b'
    """
    return "; ".join(dict.fromkeys(value for value in values if value is not None))


def train_runs(
    runs: Mapping[Path, Recipe], request: Request, keep: Callable[[Path], object]
) -> None:
    """Train one after another, or several at the same time."""
    if request.at_once == 1:
        train_in_turn(runs, request, keep)
    else:
        train_all(
            runs,
            {path: path.name for path in runs},
            at_once=request.at_once,
            console=request.console,
            finished=keep,
            callbacks=[GradientShare()],
        )


def train_in_turn(
    runs: Mapping[Path, Recipe], request: Request, keep: Callable[[Path], object]
) -> None:
    """Train in this process, resuming from checkpoints; a failed run does not stop the others."""
    failed: dict[Path, BaseException] = {}
    for folder, recipe in runs.items():
        request.say(folder.name)
        try:
            train(
                recipe,
                folder,
                resume=(folder / RECIPE).exists(),
                console=request.console,
                callbacks=[GradientShare()],
            )
        except Interrupted:
            raise
        except Exception as error:
            failed[folder] = error
            continue
        keep(folder)
        request.say(result_line(folder))
    raise_failed(failed, len(runs))


def earlier_rows(
    path: Path, runs: list[Planned], record: Record, plan: Plan
) -> dict[tuple[str, str], Record]:
    """The rows of an earlier record, if they have the settings that are asked for now.

    Settings that recipes did not have then have their defaults. Rows that are no longer planned
    are kept if they differ from a planned run of their method only in axes of the grids and the
    seed, or if their method is no longer planned.
    """
    try:
        old = load_same(path, record)
        check_rows(old, ROW)
    except ValueError as error:
        raise ValueError(
            f"{error}. If you move it away, runs that are still in {path.parent} are read again, "
            "and others trained again"
        ) from error
    common = record["protocol"]
    preset = plan.presets[record["preset"]]
    axes = {name for grid in preset.grids for name in grid}
    axes |= {name for case in plan.cases for name in case_settings(plan, record["preset"], case)}
    axes |= {RATE} if preset.search else set()
    same = {(run.method, run.seed, repr(recorded(plain(run.recipe)))): run for run in runs}
    rows = {}
    for row in old["rows"]:
        before = recorded({**plain(Recipe()), **old["protocol"], **row["settings"]})
        run = same.get((row["method"], row["seed"], repr(before)))
        name = row["run"] if run is None else run.name
        if run is None:
            fixed = {n: v for n, v in before.items() if n not in axes}
            alike = [plain(each.recipe) for each in runs if each.method == row["method"]]
            least = min((changes(fixed, now) for now in alike), key=len, default="")
            if least:
                raise another_protocol(path, f"{name}: {least}")
        settings = {n: v for n, v in before.items() if n not in common or common[n] != v}
        made = {"versions": old["versions"], "images": None, **row}
        if run is not None and run.case is not None:
            made[CASE] = run.case  # it may have another name now
        rows[row["method"], name] = {**made, "run": name, "settings": settings}
    return rows


def recorded(settings: Settings) -> Settings:
    """What a record has of all settings of a recipe."""
    return {name: settings[name] for name in sorted(settings) if name not in NOT_RECORDED}


def check_data(
    needed: DataNeeded,
    data: Path | None,
    read: Callable[[Path], tuple[Dataset | None, str | None]],
) -> str | None:
    """Require the data set of an experiment; returns a hash of its test images in memory."""
    if data is None:
        raise ValueError(f"this needs --data PATH, the place of {needed.name}: get {needed.get}")
    if not data.exists():
        raise FileNotFoundError(f"there is no {data}; {needed.name} is: {needed.get}")
    try:
        dataset, images = read(data)
    except (KeyError, ValueError, OSError) as error:
        raise ValueError(f"this needs {needed.name}: get {needed.get}. But {error}") from error
    assert dataset is not None
    for what, expected, found in (
        ("classes", needed.classes, len(dataset.classes)),
        ("test images", needed.test, len(dataset.test)),
    ):
        if expected not in (None, found):
            raise ValueError(
                f"{needed.name} has {expected:,} {what}, {data} has {found:,}: get {needed.get}"
            )
    return images
