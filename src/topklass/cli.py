"""The command ``topklass``; needs ``topklass[train]``."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import Field, fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from topklass import __version__
from topklass._extras import requires

with requires("the command topklass", "rich", "typer", "yaml", install="topklass[train]"):
    import typer
    from rich.markup import escape
    from rich.table import Column, Table

    from topklass.train.recipe import DATA, Recipe, load_recipe
    from topklass.train.terminal import SafeConsole, hide_failed_writes

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = SafeConsole()
errors = SafeConsole(stderr=True, highlight=False, soft_wrap=True)
RUN = "Run"
FILE_ONLY = ("data_options", "milestones")
"""Settings that are set in a recipe file; the first also by --option."""


def main() -> None:
    """Run the command; warnings, and errors that a user can fix, are one sentence."""
    warnings.showwarning = show_warning
    hide_failed_writes()
    try:
        app()
    except (ValueError, TypeError, OSError, ImportError, NotImplementedError) as error:
        errors.print("Error:", style="bold red", end=" ")
        errors.print(str(error), markup=False)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning; of several processes only the first does."""
    if "lightning" not in sys.modules or is_first_process():
        errors.print("Warning:", style="yellow", end=" ")
        errors.print(str(message), markup=False)


def say(sentence: str, style: str | None = None) -> None:
    """Print a sentence as it is, in one line."""
    console.print(sentence, style=style, markup=False, highlight=False, soft_wrap=True)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each setting of a recipe to a command, None unless it is given."""
    types = get_type_hints(Recipe)
    names = [each.name for each in fields(Recipe) if each.name not in FILE_ONLY]

    def run(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in names}
        command({name: value for name, value in given.items() if value is not None}, **arguments)

    options = {
        each.name: Annotated[types[each.name] | None, option_for(each, types[each.name])]
        for each in fields(Recipe)
    }
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != "settings"]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=p.KEYWORD_ONLY) for p in own]
        + [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=options[name]
            )
            for name in names
        ]
    )
    run.__doc__ = command.__doc__
    return run


def in_panel(panel: str, help: str, *names: str, **options: Any) -> Any:
    """An option under a heading of the help."""
    return typer.Option(*names, help=escape(help), rich_help_panel=panel, **options)


def option_for(setting: Field[Any], kind: Any) -> Any:
    """The option of a setting, with its default in the help."""
    default = "" if setting.default is None else f" [default: {setting.default}]"
    number = kind in (float, float | None)
    narrow = {"metavar": "<num>"} if number else {}  # so that all options fit into 80 columns
    return in_panel(setting.metadata["group"], setting.metadata["help"] + default, **narrow)


def show_version(wanted: bool) -> None:
    """Print the version and leave."""
    if wanted:
        print(f"topklass {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train and use classifiers that predict a short list of classes."""


@app.command("train")
@with_settings
def train_command(
    settings: dict[str, Any],
    recipe: Annotated[Path | None, in_panel(RUN, "YAML file; options override it.")] = None,
    folder: Annotated[
        Path | None, in_panel(RUN, "Folder of the run; by default in runs/.", "--folder", "--run")
    ] = None,
    resume: Annotated[bool, in_panel(RUN, "Continue the run.", "--resume")] = False,
    find_tau: Annotated[
        bool, in_panel(RUN, "Choose tau by short trials, on validation images.", "--find-tau")
    ] = False,
    find_epsilon: Annotated[
        bool, in_panel(RUN, "Choose epsilon in the same way.", "--find-epsilon")
    ] = False,
    option: Annotated[
        list[str] | None,
        in_panel(DATA, "Option of the data set, NAME=VALUE; repeatable.", metavar="<str>"),
    ] = None,
) -> None:
    """Train a network, and save all that is needed to repeat the run."""
    from topklass.data import FORMATS
    from topklass.train.engine import train
    from topklass.train.processes import disconnect
    from topklass.train.restore import RECIPE
    from topklass.train.trainer import Interrupted

    if resume and folder is None:
        raise ValueError("--resume needs --folder FOLDER, that of the run to continue")
    if resume and folder is not None and recipe is None and (folder / RECIPE).exists():
        recipe = folder / RECIPE
    chosen = Recipe() if recipe is None else load_recipe(recipe)
    if option:
        settings["data_options"] = {**chosen.data_options, **data_options(option)}
    chosen = chosen.with_changes(settings)
    name = f"{datetime.now():%Y-%m-%d-%H%M%S}-{chosen.loss}-{chosen.seed}"
    folder = folder or Path("runs") / name
    if chosen.data not in FORMATS and Path(chosen.data).exists():  # found from other folders, too
        chosen = chosen.with_changes({"data": str(Path(chosen.data).resolve())})
    try:
        if not resume:
            wanted = {"tau": find_tau, "epsilon": find_epsilon}
            chosen = with_found(chosen, [name for name, find in wanted.items() if find], folder)
        record = train(chosen, folder, resume=resume, console=console)
    except Interrupted as stopped:
        if is_first_process():  # the others name their folder by their own clock
            say(f"{stopped} --folder {folder}")
        raise typer.Exit(stopped.status) from None
    disconnect()
    if not record:  # only the first of several processes has it
        return
    test = {average: list(values.values()) for average, values in record["test"].items()}
    console.print(accuracy_table(record["test"]["micro"], **test))
    say(f"Saved in {folder}")


def with_found(recipe: Recipe, names: list[str], folder: Path) -> Recipe:
    """A recipe with the values of parameters that did best in short trials."""
    from topklass.train.find import best, check_can_find, find_parameter, trials_table
    from topklass.train.trainer import Interrupted

    for name in names:  # before any of them is trained
        check_can_find(recipe, name)
    for name in names:
        try:
            trials = find_parameter(recipe, name, folder / "trials", console=console)
        except Interrupted as stopped:
            message = "stopped; continue by the same command with"
            raise Interrupted(message, stopped.status - 128) from None
        console.print(trials_table(name, recipe.k, trials))
        value = best(trials).value
        say(f"Training with --{name} {value:g}.")
        recipe = recipe.with_changes({name: value})
    return recipe


@app.command("evaluate")
def evaluate_command(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Test accuracies of a run: by length of the list, over several crops, by superclass."""
    from topklass.train.evaluation import evaluate, load_run

    loaded = load_run(run)
    record = evaluate(loaded)
    if json:
        console.print_json(data=record, ensure_ascii=True)
        return
    console.print(accuracy_table(record["lengths"], **record["accuracy"]))
    k, views = loaded.recipe.k, record["views"]
    table = Table(f"average over {views['number']} crops", f"top-{k}")
    titles = {"one": "the image alone", "softmax": "softmax", "marginals": "marginals"}
    for name, title in titles.items():
        table.add_row(title, as_percent(views[name]))
    console.print(table)
    for name, rows in record["superclasses"].items():
        table = Table(name, "samples", "top-1", f"top-{k}")
        for row in rows:
            shares = (as_percent(row["top1"]), as_percent(row["topk"]))
            table.add_row(escape(row["name"]), str(row["samples"]), *shares)
        console.print(table)


@app.command("sets")
def sets_command(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    alpha: Annotated[float, typer.Option(help="How often the right label may be missing.")] = 0.1,
    max_size: Annotated[
        int | None, typer.Option(help="Largest number of labels of a set; by default any.")
    ] = None,
    calibrate_on: Annotated[
        str,
        typer.Option(
            help="validation, or test: a random half of the test images, measured on the other."
        ),
    ] = "validation",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Sets that contain the label with probability 1 - alpha: coverage and size of each method."""
    from topklass.report.sets_figure import write_sets_figure
    from topklass.train.evaluation import load_run
    from topklass.train.sets import SETS_FIGURE, compare_sets

    record = compare_sets(
        load_run(run), alpha, max_size=max_size, calibrate_on=calibrate_on, console=errors
    )
    write_sets_figure(record, run / SETS_FIGURE)
    if json:
        console.print_json(data=record, ensure_ascii=True)
        return
    known = record["calibrated_on"]
    table = Table("sets", "coverage", "macro", "worst class", "labels", "empty")
    for row in record["sets"]:
        shares = map(as_percent, (*row["coverage"].values(), row["empty"]))
        micro, macro, worst, empty = shares
        table.add_row(row["name"], micro, macro, worst, f"{row['size']:.2f}", empty)
    console.print(table)
    for sentence in record["left_out"]:
        say(sentence, style="yellow")
    say(
        f"Calibrated on {known['number']:,} {known['images']} images for a coverage of "
        f"{as_percent(1 - alpha)}, measured on {record['test']:,} test images.\n"
        f"Wrote {run / SETS_FIGURE}"
    )


@app.command("predict")
def predict_command(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of them.")],
    k: Annotated[
        int | None, typer.Option(help="Length of the lists; by default that of training.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict short lists for image files, with probabilities.

    After training with a top-k loss, these are the probabilities of belonging to the top k, which
    add up to at most k. After another loss, they are the probabilities of being the class.
    """
    from topklass.train.prediction import explain_probabilities, predict
    from topklass.train.restore import RECIPE

    lists = predict(run, images, k)
    if json:
        console.print_json(data=[guesses._asdict() for guesses in lists], ensure_ascii=True)
        return
    table = Table("image", "class", "probability")
    for guesses in lists:
        for number, (name, share) in enumerate(zip(*guesses[1:], strict=True)):
            table.add_row("" if number else escape(guesses.path), escape(name), as_percent(share))
        table.add_section()
    console.print(table)
    say(explain_probabilities(load_recipe(run / RECIPE), len(lists[0].classes)))


@app.command()
def check(data: Annotated[str, typer.Argument(help="Path of an image folder.")]) -> None:
    """Read every image of a data set, and list those that cannot be read."""
    from topklass.data import load
    from topklass.train.file_check import unreadable_images
    from topklass.train.file_views import worker_count

    found = unreadable_images(load(data), worker_count(Recipe()))
    for sentence in found:
        say(sentence)
    say(f"{len(found)} images cannot be read.")
    raise typer.Exit(1 if found else 0)


@app.command("compare")
def compare_command(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")],
    output: Annotated[Path, typer.Option(help="Page to write.")] = Path("report.html"),
) -> None:
    """Compare runs over seeds: print a table, and write a page with figures."""
    show_comparison(runs, output)


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Folder for runs and report.")] = Path("runs/demo"),
    at_once: Annotated[int, typer.Option(help="Runs that train at the same time.")] = 2,
) -> None:
    """Compare four losses on characters with label noise; about five minutes on two cores."""
    from topklass.train.demo import PROBLEM, demo_runs
    from topklass.train.several import train_all
    from topklass.train.trainer import Interrupted

    runs = demo_runs(folder)
    options = PROBLEM.data_options
    say(
        f"{options['classes']} characters, {options['per_class']} training images of each; "
        f"{100 * PROBLEM.noise:.0f} % of their labels are resampled among look-alikes.\n"
        f"{len(runs)} runs of {PROBLEM.epochs} epochs, {at_once} at a time:"
    )
    try:
        train_all(runs, at_once=at_once, console=console)
    except Interrupted as stopped:
        say(str(stopped))
        raise typer.Exit(stopped.status) from None
    show_comparison(list(runs), folder / "report.html")


def is_first_process() -> bool:
    """Whether this is the only process, or the first of several."""
    from lightning.pytorch.utilities import rank_zero_only

    return int(getattr(rank_zero_only, "rank", 0) or 0) == 0


def show_comparison(runs: list[Path], output: Path) -> None:
    """Print the table of a comparison, and write its page."""
    from topklass.report import write_report
    from topklass.train.comparison import compare
    from topklass.train.results_table import results_table

    comparison = compare(runs)
    for sentence in comparison.left_out:
        say(sentence, style="yellow")
    titles, rows, notes = results_table(comparison)
    table = Table(*(Column(escape(title), overflow="fold") for title in titles))
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
    console.print(" ".join(notes), markup=False, highlight=False)
    write_report(comparison, output)
    say(f"Wrote {output}")


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
            raise ValueError(f"an option of the data set must be NAME=VALUE, got {pair!r}")
        options[name.replace("-", "_")] = yaml.safe_load(value)
    return options


def accuracy_table(lengths: Iterable[object], micro: list[float], macro: list[float]) -> Table:
    """Test accuracies by the length of the list."""
    table = Table("test accuracy", "micro", "macro")
    for k, *shares in zip(lengths, micro, macro, strict=True):
        table.add_row(f"top-{k}", *map(as_percent, shares))
    return table


def as_percent(share: float) -> str:
    """A share in percent."""
    return f"{100 * share:.1f} %"


if __name__ == "__main__":
    main()
