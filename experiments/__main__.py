"""Command line: ``python -m experiments NAME --preset fast``."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.box import HORIZONTALS
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from experiments.catalogue import EXPERIMENTS
from experiments.experiment import (
    PRESETS,
    Experiment,
    Record,
    Request,
    load_record,
    record_path,
)
from experiments.protocol import made_by
from topklass._checks import did_you_mean
from topklass._files import check_writable, lock_folder
from topklass.train.trainer import Interrupted

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console()


def main() -> None:
    """Run the command; errors that a user can fix are one sentence."""
    try:
        app(prog_name="python -m experiments")
    except (ValueError, TypeError, OSError, ImportError) as error:
        errors = Console(stderr=True, highlight=False, soft_wrap=True)
        errors.print("Error:", style="bold red", end=" ")
        errors.print(str(error), markup=False)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


@app.command()
def command(
    name: Annotated[str | None, typer.Argument(help="the experiment; without it, list all")] = None,
    preset: Annotated[
        str,
        typer.Option(help="paper: the papers' protocol; fast: ours for one GPU; smoke: seconds"),
    ] = "fast",
    data: Annotated[Path | None, typer.Option(help="path of the data set")] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="for runs, record and figures (default: runs/experiments/NAME-PRESET, or the "
            "record's with --show)"
        ),
    ] = None,
    at_once: Annotated[int, typer.Option(help="runs that train at the same time")] = 1,
    most: Annotated[
        int | None, typer.Option(help="train at most so many runs; the same command continues")
    ] = None,
    show: Annotated[
        Path | None, typer.Option(help="tables and figures of this record, without training")
    ] = None,
    list: Annotated[bool, typer.Option("--list", help="list the experiments")] = False,
) -> None:
    """Repeat a table or figure of the papers; the same command resumes after an interruption."""
    if (show is not None or list or name is None) and (data, at_once, most) != (None, 1, None):
        raise ValueError("--data, --at-once and --most are for experiments that run: name one")
    if show is not None:
        record = load_record(show)
        if name not in (None, record["experiment"]):
            raise ValueError(f"{show} is a record of {record['experiment']}, not of {name}")
        show_record(record, folder or show.parent)
    elif list or name is None:
        console.print(listing())
    else:
        folder = folder or Path("runs/experiments") / f"{name}-{preset}"
        try:
            run_experiment(named(name), Request(preset, folder, data, at_once, most, console))
        except (Interrupted, KeyboardInterrupt):
            next_time = "continues from there" if named(name).resumes else "starts again"
            console.print(f"stopped; the same command {next_time}", highlight=False)
            raise typer.Exit(130) from None
        except ChildProcessError as failed:
            console.print(str(failed), style="red", markup=False, soft_wrap=True)
            raise typer.Exit(1) from None


def named(name: str) -> Experiment:
    """The experiment of that name, or an error that lists them all.

    Example:
        >>> named("cifar100-noize")
        Traceback (most recent call last):
        ...
        ValueError: there is no experiment 'cifar100-noize'. Did you mean 'cifar100-noise'? ...
    """
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    hint = did_you_mean(name, EXPERIMENTS)
    raise ValueError(
        f"there is no experiment {name!r}.{hint} Choose one of {', '.join(EXPERIMENTS)}"
    )


def listing() -> Table:
    """All experiments, with a few words on each."""
    runs = Column("runs", justify="right", no_wrap=True)
    table = Table(
        Column("experiment", no_wrap=True), "about", runs, box=HORIZONTALS, show_lines=True
    )
    for each in EXPERIMENTS.values():
        numbers = [str(each.runs(preset) or "–") for preset in PRESETS]
        about = f"{escape(each.title)}\n[dim]{escape('; '.join(each.papers))}[/dim]"
        table.add_row(each.name, about, " / ".join(numbers))
    table.caption = f"Runs: networks trained with the preset {' / '.join(PRESETS)}."
    return table


def run_experiment(experiment: Experiment, request: Request) -> None:
    """Run what is left of an experiment, and show its record, even if only part of it was run."""
    for option in ("data", "at_once", "most"):
        given = getattr(request, option) != getattr(Request, option)
        if given and option not in experiment.takes:
            raise ValueError(
                f"{experiment.name} does not take --{option.replace('_', '-')}: leave it out"
            )
    path = record_path(request.folder, experiment.name, request.preset)
    try:
        with lock_folder(request.folder):
            record = experiment.run(request)
    except (Interrupted, ChildProcessError):
        if path.exists():
            show_record(load_record(path), request.folder)
        raise
    show_record(record, request.folder)
    console.print(f"Saved in {path}", highlight=False, soft_wrap=True)


def show_record(record: Record, folder: Path) -> None:
    """Print the tables of a record, and draw its figures in a folder."""
    experiment = named(record["experiment"])
    tables = experiment.show(record)
    check_writable(folder)
    for table in tables:
        table.box, table.padding = HORIZONTALS, (0, 1, 0, 0)  # six losses in 80 columns
        console.print(table)
        console.print()
    console.print(made_by(record), highlight=False, markup=False)
    if find_spec("matplotlib") is None:
        console.print("No figures: they need pip install matplotlib.", highlight=False)
        return
    for path in experiment.draw(record, folder):
        console.print(f"Drew {path}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
