"""The command ``topklass``; needs ``topklass[train]``."""

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
    from rich.markup import escape
    from rich.table import Column, Table
except ImportError as error:
    raise ImportError("the command topklass needs pip install 'topklass[train]'") from error

from topklass.train.recipe import Recipe, load_recipe

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
    except KeyboardInterrupt:
        sys.exit(130)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each setting of a recipe, None unless it is given."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != "settings"]
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
    find_tau: Annotated[
        bool, typer.Option("--find-tau", help="choose tau by short trials on validation images")
    ] = False,
    find_epsilon: Annotated[
        bool, typer.Option("--find-epsilon", help="choose epsilon in the same way")
    ] = False,
) -> None:
    """Train a network; everything it needs to be repeated is saved with it."""
    from topklass.data import FORMATS
    from topklass.train.engine import RECIPE, train
    from topklass.train.trainer import Interrupted

    if resume and run is None:
        raise ValueError("--resume needs --run FOLDER, the run to continue")
    if resume and run is not None and recipe is None and (run / RECIPE).exists():
        recipe = run / RECIPE
    chosen = Recipe() if recipe is None else load_recipe(recipe)
    if option:
        settings["data_options"] = {**chosen.data_options, **data_options(option)}
    chosen = chosen.with_changes(settings)
    folder = run or Path("runs") / f"{datetime.now():%Y-%m-%d-%H%M%S}-{chosen.loss}-{chosen.seed}"
    if chosen.data not in FORMATS and Path(chosen.data).exists():  # from other folders as well
        chosen = chosen.with_changes({"data": str(Path(chosen.data).resolve())})
    if (folder / "trials").exists() and not (folder / RECIPE).exists():
        resume = False  # of the trials, which go on in any case
    if not resume:
        wanted = {"tau": find_tau, "epsilon": find_epsilon}
        chosen = with_found(chosen, [name for name, find in wanted.items() if find], folder)
    try:
        record = train(chosen, folder, resume=resume, console=console)
    except Interrupted as stopped:
        console.print(f"{stopped} --run {folder}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None
    if not record:  # of several processes the first one speaks
        return
    test = {average: list(values.values()) for average, values in record["test"].items()}
    console.print(accuracy_table(record["test"]["micro"], **test))
    console.print(f"Saved in {folder}", markup=False, highlight=False, soft_wrap=True)


def with_found(recipe: Recipe, names: list[str], folder: Path) -> Recipe:
    """A recipe with the values of parameters that did best in short trials."""
    from topklass.train.find import best, check_can_find, find_parameter, trials_table
    from topklass.train.trainer import Interrupted

    for name in names:  # before any of them is trained
        check_can_find(recipe, name)
    for name in names:
        try:
            trials = find_parameter(recipe, name, folder / "trials", console=console)
        except Interrupted:
            said = f"stopped; go on by the same command with --run {folder}"
            console.print(said, markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(130) from None
        console.print(trials_table(name, recipe.k, trials))
        value = best(trials).value
        console.print(f"Training with --{name} {value:g}.", highlight=False)
        recipe = recipe.with_changes({name: value})
    return recipe


@app.command("evaluate")
def evaluate_command(
    run: Annotated[Path, typer.Argument(help="folder of a finished run")],
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Test accuracies of a run: by list, by the average over views, by superclass."""
    from topklass.train.evaluation import evaluate, load_run

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
            shares = (percent(row["top1"]), percent(row["topk"]))
            table.add_row(escape(row["name"]), str(row["samples"]), *shares)
        console.print(table)


@app.command("predict")
def predict_command(
    run: Annotated[Path, typer.Argument(help="folder of a run")],
    images: Annotated[list[Path], typer.Argument(help="image files, or folders of them")],
    k: Annotated[int | None, typer.Option(help="length of the lists (default: as trained)")] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Short lists for image files, with probabilities.

    After training on a top-k loss the probability is that of belonging to the top k, so those of a
    list may add up to k. After another loss it is that of being the class.
    """
    from topklass.train.engine import RECIPE
    from topklass.train.prediction import meaning, predict

    lists = predict(run, images, k)
    if json:
        console.print_json(data=[guesses._asdict() for guesses in lists])
        return
    table = Table("image", "class", "probability")
    for guesses in lists:
        for number, (name, share) in enumerate(zip(*guesses[1:], strict=True)):
            table.add_row("" if number else escape(guesses.path), escape(name), percent(share))
        table.add_section()
    console.print(table)
    console.print(meaning(load_recipe(run / RECIPE), len(lists[0].classes)), highlight=False)


@app.command()
def check(data: Annotated[str, typer.Argument(help="path of an image folder")]) -> None:
    """Read every image of a data set, and list those that cannot be read."""
    from topklass.data import load
    from topklass.train.file_check import unreadable_images
    from topklass.train.file_views import worker_count

    found = unreadable_images(load(data), worker_count(Recipe()))
    for sentence in found:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    console.print(f"{len(found)} images cannot be read.", highlight=False)
    raise typer.Exit(1 if found else 0)


@app.command("compare")
def compare_command(
    runs: Annotated[list[Path], typer.Argument(help="folders of finished runs")],
    output: Annotated[Path, typer.Option(help="page to write")] = Path("report.html"),
) -> None:
    """Compare runs over seeds: a table here, and a page with figures."""
    show_comparison(runs, output)


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="for runs and report")] = Path("runs/demo"),
    at_once: Annotated[int, typer.Option(help="runs that train at the same time")] = 2,
) -> None:
    """Compare three losses on confused letters, in about five minutes on two cores."""
    from topklass.train.demo import PROBLEM, demo_runs
    from topklass.train.several import train_all
    from topklass.train.trainer import Interrupted

    runs = demo_runs(folder)
    options = PROBLEM.data_options
    console.print(
        f"{options['classes']} characters, {options['per_class']} training images of each; "
        f"{100 * PROBLEM.noise:.0f} % of their labels are drawn again among look-alikes.\n"
        f"{len(runs)} runs of {PROBLEM.epochs} epochs, {at_once} at a time:",
        highlight=False,
    )
    try:
        train_all(runs, at_once=at_once, console=console)
    except Interrupted as stopped:
        console.print(str(stopped), highlight=False)
        raise typer.Exit(130) from None
    show_comparison(list(runs), folder / "report.html")


def show_comparison(runs: list[Path], output: Path) -> None:
    """Print the table of a comparison, and write its page."""
    from topklass.report import write_report
    from topklass.train.comparison import compare
    from topklass.train.results_table import results_table

    comparison = compare(runs)
    for sentence in comparison.left_out:
        console.print(sentence, style="yellow", markup=False, highlight=False, soft_wrap=True)
    titles, rows, notes = results_table(comparison)
    table = Table(*(Column(escape(title), overflow="fold") for title in titles))
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
    console.print(" ".join(notes), markup=False, highlight=False)
    write_report(comparison, output)
    console.print(f"Wrote {output}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def losses() -> None:
    """List the losses."""
    from topklass.train.criterion import LOSSES

    table = Table("loss", "about", "options")
    for name, info in LOSSES.items():
        options = ("k", *info.options) if info.takes_k else info.options
        table.add_row(name, info.about, ", ".join(options))
    console.print(table)


@app.command()
def models() -> None:
    """List the networks."""
    from topklass.models import available

    table = Table("model", "about")
    for name, line in available().items():
        table.add_row(name, line)
    console.print(table)


@app.command()
def data() -> None:
    """List the data sets and formats."""
    from topklass.data import FORMATS

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
