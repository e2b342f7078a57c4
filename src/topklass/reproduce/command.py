"""What ``topklass reproduce`` does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from rich.box import HORIZONTALS
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from topklass._files import check_writable, held
from topklass.reproduce import EXPERIMENTS, PRESETS, Experiment, Request, load_record
from topklass.reproduce.experiment import Record, record_path
from topklass.reproduce.protocol import made_by
from topklass.train.criterion import did_you_mean
from topklass.train.trainer import Interrupted


def experiment(name: str) -> Experiment:
    """The experiment of that name, or an error that lists them all.

    Example:
        >>> experiment("cifar100-noize")
        Traceback (most recent call last):
        ...
        ValueError: there is no experiment 'cifar100-noize'. Did you mean 'cifar100-noise'? ...
    """
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    listed = ", ".join(EXPERIMENTS)
    hint = did_you_mean(name, EXPERIMENTS)
    raise ValueError(f"there is no experiment {name!r}.{hint} There are: {listed}")


def listing() -> Table:
    """All experiments, with a few words on each."""
    runs = Column("runs", justify="right", no_wrap=True)
    name = Column("experiment", no_wrap=True)
    table = Table(name, "about", runs, box=HORIZONTALS, show_lines=True)
    for each in EXPERIMENTS.values():
        numbers = [str(each.runs(preset) or "–") for preset in PRESETS]
        about = f"{escape(each.title)}\n[dim]{escape('; '.join(each.papers))}[/dim]"
        table.add_row(each.name, about, " / ".join(numbers))
    table.caption = f"Runs: networks that are trained, {' / '.join(PRESETS)}."
    return table


def run_experiment(name: str, request: Request, console: Console) -> None:
    """Run what is left of an experiment, and show its record; also if only a part was run."""
    chosen = experiment(name)
    for option in ("data", "at_once", "most"):
        given = getattr(request, option) != getattr(Request, option)
        if given and option not in chosen.takes:
            raise ValueError(f"{name} has no use for --{option.replace('_', '-')}: leave it out")
    path = record_path(request.folder, name, request.preset)
    try:
        with held(request.folder):
            record = chosen.run(request)
    except (Interrupted, ChildProcessError):
        if path.exists():
            show_record(load_record(path), request.folder, console)
        raise
    show_record(record, request.folder, console)
    console.print(f"Saved in {path}", highlight=False, soft_wrap=True)


def show_record(record: Record, folder: Path, console: Console) -> None:
    """Print the tables of a record, and draw its figures in a folder."""
    chosen = experiment(record["experiment"])
    tables = chosen.show(record)
    check_writable(folder)
    for table in tables:
        table.box, table.padding = HORIZONTALS, (0, 1, 0, 0)  # six losses in 80 columns
        console.print(table)
        console.print()
    console.print(made_by(record), highlight=False, markup=False)
    if find_spec("matplotlib") is None:
        console.print("No figures: they need pip install matplotlib.", highlight=False)
        return
    for path in chosen.draw(record, folder):
        console.print(f"Drew {path}", highlight=False, soft_wrap=True)
