"""The command ``topkit``; needs ``topkit[train]``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, get_type_hints

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError as error:
    raise ImportError("the command topkit needs pip install 'topkit[train]'") from error

from topkit.train.recipe import Recipe, load_recipe

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train and use classifiers that show a short list of guesses.",
)
console = Console()
NOT_ON_THE_COMMAND_LINE = ("data_options", "milestones")


def main() -> None:
    """Run the command; errors that a user can mend are one sentence."""
    try:
        app()
    except (ValueError, TypeError, OSError, ImportError, NotImplementedError) as error:
        errors = Console(stderr=True, highlight=False, soft_wrap=True)
        errors.print("Error:", style="bold red", end=" ")
        errors.print(str(error), markup=False)
        sys.exit(2)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each setting of a recipe, None unless it is given."""
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "settings"]
    types = get_type_hints(Recipe)
    options = []
    for each in fields(Recipe):
        if each.name in NOT_ON_THE_COMMAND_LINE:
            continue
        kind = types[each.name]
        shown = "" if each.default in (None, MISSING) else f" (default: {each.default})"
        info = typer.Option(help=each.metadata["help"] + shown, show_default=False)
        annotation = Annotated[kind | None, info]  # type: ignore[valid-type]
        options.append(
            inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
            )
        )
    hints = get_type_hints(command, include_extras=True)
    own = [p.replace(annotation=hints[p.name]) for p in own]

    def run(**arguments: Any) -> None:
        settings = {p.name: arguments.pop(p.name) for p in options}
        command(**arguments, settings={n: v for n, v in settings.items() if v is not None})

    keyword = inspect.Parameter.KEYWORD_ONLY
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*(p.replace(kind=keyword) for p in own), *options]
    )
    run.__doc__ = command.__doc__
    return run


@app.command("train")
@with_settings
def train_command(
    settings: dict[str, Any],
    recipe: Annotated[Path | None, typer.Option(help="YAML file; options override it")] = None,
    run: Annotated[Path | None, typer.Option(help="folder of the run (default: in runs/)")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run")] = False,
    option: Annotated[
        list[str] | None, typer.Option(help="option of the data set, NAME=VALUE; repeatable")
    ] = None,
) -> None:
    """Train a network; everything it needs to be repeated is saved with it."""
    from topkit.train.engine import RECIPE, train
    from topkit.train.trainer import Interrupted

    if resume and run is None:
        raise ValueError("--resume needs --run FOLDER, the run to continue")
    if resume and run is not None and recipe is None and (run / RECIPE).exists():
        recipe = run / RECIPE
    chosen = Recipe() if recipe is None else load_recipe(recipe)
    if option:
        settings["data_options"] = {**chosen.data_options, **data_options(option)}
    chosen = chosen.with_changes(settings)
    folder = run or Path("runs") / f"{datetime.now():%Y-%m-%d-%H%M%S}-{chosen.loss}-{chosen.seed}"
    try:
        record = train(chosen, folder, resume=resume, console=console)
    except Interrupted as stopped:
        console.print(f"{stopped} --run {folder}", highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None
    if not record:  # of several processes the first one speaks
        return
    test = {average: list(values.values()) for average, values in record["test"].items()}
    console.print(accuracy_table(record["test"]["micro"], **test))
    console.print(f"Saved in {folder}", highlight=False, soft_wrap=True)


@app.command("evaluate")
def evaluate_command(
    run: Annotated[Path, typer.Argument(help="folder of a finished run")],
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Test accuracies of a run: by list, by the average over views, by superclass."""
    from topkit.train.evaluation import evaluate, load_run

    loaded = load_run(run)
    record = evaluate(loaded)
    if json:
        console.print_json(data=record)
        return
    console.print(accuracy_table(record["lengths"], **record["accuracy"]))
    k, seen = loaded.recipe.k, record["views"]
    table = Table(f"average over {seen['number']} views", f"top-{k}")
    titles = {"one": "the image alone", "softmax": "softmax", "marginal": "marginals"}
    for name, title in titles.items():
        table.add_row(title, percent(seen[name]))
    console.print(table)
    for name, rows in record["superclasses"].items():
        table = Table(name, "samples", "top-1", f"top-{k}")
        for row in rows:
            cells = (row["name"], str(row["samples"]), percent(row["top1"]), percent(row["topk"]))
            table.add_row(*cells)
        console.print(table)


@app.command()
def losses() -> None:
    """List the losses."""
    from topkit.train.criterion import LOSSES

    table = Table("loss", "about", "options")
    for name, info in LOSSES.items():
        options = ("k", *info.options) if info.takes_k else info.options
        table.add_row(name, info.about, ", ".join(options))
    console.print(table)


@app.command()
def models() -> None:
    """List the networks."""
    from topkit.models import available

    table = Table("model", "about")
    for name, line in available().items():
        table.add_row(name, line)
    console.print(table)


@app.command()
def data() -> None:
    """List the data sets and formats."""
    from topkit.data import FORMATS

    table = Table("data", "about")
    for name, line in FORMATS.items():
        table.add_row(name, line)
    console.print(table)


def data_options(given: list[str]) -> dict[str, Any]:
    """``NAME=VALUE`` pairs; values are read as YAML, so numbers are numbers."""
    import yaml

    options = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"an option of the data set is NAME=VALUE, got {pair!r}")
        options[name.replace("-", "_")] = yaml.safe_load(value)
    return options


def accuracy_table(lengths: Iterable[object], micro: list[float], macro: list[float]) -> Table:
    """Test accuracies by the length of the list."""
    table = Table("test accuracy", "micro", "macro")
    for k, *shares in zip(lengths, micro, macro, strict=True):
        table.add_row(f"top-{k}", *map(percent, shares))
    return table


def percent(share: float) -> str:
    """A share, as people read it."""
    return f"{100 * share:.1f} %"


if __name__ == "__main__":
    main()
