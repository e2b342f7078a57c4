"""The papers' experiments, from records of ``python -m experiments`` in ``results/reproduce``."""

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path

from rich.table import Table

from benchmarks.environment import RESULTS, ROOT
from benchmarks.markdown import table
from experiments.catalogue import EXPERIMENTS
from experiments.cells import METHOD, Results
from experiments.experiment import Experiment, Record, load_record, record_path
from experiments.gains import NOT_RUN as ABSENT
from experiments.gains import averaged
from experiments.plan import CASE, load_plan
from experiments.protocol import made_by, made_where
from experiments.training import TrainingExperiment

RECORDS = RESULTS / "reproduce"
IMAGES = ROOT / "docs" / "images" / "reproduce"
PRESETS = ("paper", "fast")
CHOOSING = ("which-loss", "which-loss-text")
"""Experiments whose tables stand on the page of evidence, too."""
SHOWN = {
    "cross-entropy": "cross-entropy",
    "label smoothing": "with label smoothing",
    "short list": "`ShortListLoss(k=5)`",
}
"""Methods of the README's table, and what they are called there."""
TEXTS = {
    "clean": "clean, 100 of each class",
    "20 % of the texts": "clean, 20 labels of each class",
    "5 % of the texts": "clean, 5 labels of each class",
    "block noise 0.4": "32 % wrong, in blocks of five classes",
    "block noise 0.8": "64 % wrong, in blocks of five classes",
    "domain noise 0.4": "37 % wrong, within 15 classes of a domain",
    "symmetric noise 0.4": "40 % wrong, among all classes",
    "long tail": "long tail, 100 to 1 (mean over classes)",
}
"""The kinds of texts in the README's table."""
NOT_RUN = "Not run yet."


def tables() -> Iterator[tuple[str, str]]:
    """The text of every experiment, by the name of its pair of comments."""
    yield "reproduce", overview()
    for name, experiment in EXPERIMENTS.items():
        yield f"reproduce-{name}", text(experiment)
    for name in CHOOSING:
        yield from choosing(EXPERIMENTS[name])
    if record_path(RECORDS, "which-loss-text", "fast").exists():
        yield "short-list-texts", short_list()


def records(experiment: Experiment) -> list[Record]:
    paths = [record_path(RECORDS, experiment.name, preset) for preset in PRESETS]
    return [load_record(path) for path in paths if path.exists()]


def overview() -> str:
    """A line an experiment: what it repeats, and how much of it was run."""
    rows = []
    for name, experiment in EXPERIMENTS.items():
        found = "; ".join(map(state, records(experiment))) or "not run"
        rows.append((f"`{name}`", "; ".join(experiment.papers), found))
    return table(("experiment", "what it repeats", "state"), rows)


def choosing(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """Each table of an experiment by its title, for pages that need some of them."""
    path = record_path(RECORDS, experiment.name, "fast")
    if not path.exists():
        return
    record = load_record(path)
    yield f"{experiment.name}: protocol", made_by(record)
    for shown in experiment.show(record):
        yield f"{experiment.name}: {shown.title}", markdown(shown)
    for drawn in sorted(IMAGES.glob(f"{experiment.name}-gains.svg")):
        yield f"{experiment.name}: figure", image(drawn)


def short_list() -> str:
    """Top-1 and top-5 accuracy of the recommended loss and of what it replaces, on all texts."""
    plan = load_plan("which-loss-text")
    record = load_record(record_path(RECORDS, plan.name, "fast"))
    results, rows = Results(plan, record), []
    for case in results.values(CASE, {}):
        cells = []
        for method in SHOWN:
            where = {CASE: case, METHOD: method}
            average = results.settings(results.rows(where)[0])["average"]
            names = [averaged(f"test top-{k}", average) for k in (1, 5)]
            found = [results.cell(where, name).ours for name in names]
            cells.append(" / ".join(f"{each.mean:.1f}" for each in found if each))
        rows.append((TEXTS[str(case)], *cells))
    seeds = len({row["seed"] for row in record["rows"]})
    caption = (
        f"Top-1 / top-5 test accuracy in %, mean of {seeds} seeds ({made_where(record)[:-1]})."
    )
    return f"{table(('labels', *SHOWN.values()), rows)}\n\n{caption}"


def state(record: Record) -> str:
    done = len(record["rows"])
    return f"{record['preset']}: {done} of {done + len(record['not_run'])}"


def text(experiment: Experiment) -> str:
    """Tables and figures of all records; without one, the papers' numbers alone."""
    parts = []
    for record in records(experiment):
        parts += [made_by(record), *map(markdown, experiment.show(record))]
        parts += map(image, experiment.draw(record, IMAGES))
    if not parts:
        parts = [NOT_RUN]
        if isinstance(experiment, TrainingExperiment) and experiment.plan.published:
            parts += map(markdown, experiment.show(experiment.begin("paper")))
    return "\n\n".join(parts)


def image(path: Path) -> str:
    """A figure, with its title for those who do not see it."""
    titles = re.findall("<title>(.*?)</title>", path.read_text("utf-8"))
    return f"![{unescape(titles[0])}](images/reproduce/{path.name})"


def markdown(shown_table: Table) -> str:
    """A table for a terminal, for a page."""
    head = [cell(column.header) for column in shown_table.columns]
    rows = list(zip(*(map(cell, column.cells) for column in shown_table.columns), strict=True))
    missing = [row for row in rows if {*row[1:]} <= {"", ABSENT}]
    parts = [f"**{shown_table.title}**"] if shown_table.title else []
    if len(missing) == len(rows):
        return "\n\n".join([*parts, NOT_RUN])
    parts.append(table(head, [row for row in rows if row not in missing]))
    notes = [str(shown_table.caption)] if shown_table.caption else []
    if missing:
        notes.append(f"Not run: {'; '.join(row[0] for row in missing)}.")
    return "\n\n".join([*parts, " ".join(notes)] if notes else parts)


def cell(content: object) -> str:
    return str(content).replace("|", "\\|").replace("\n", "<br>")
