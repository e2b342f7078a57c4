"""Fill the tables of the documents, and draw their plots, from the recorded results.

A table goes between a pair of comments, ``<!-- speed-cpu -->`` and ``<!-- /speed-cpu -->``, in
README.md or in any page of docs/. Pairs without results, and results without a pair, are left.
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from benchmarks import (
    linear_tables,
    many_classes,
    noise_tables,
    prediction_tables,
    sharded,
    speed_tables,
    study_tables,
)
from benchmarks.environment import ROOT, read

Render = Callable[[dict[str, Any]], str]

SPEED_GPU: dict[str, tuple[str, Render]] = {
    "speed-gpu": ("rows", speed_tables.gpu),
    "speed-gpu-short": ("rows", speed_tables.short),
    "device-gpu": ("rows", speed_tables.device),
    "memory-gpu": ("rows", speed_tables.memory),
    "smoothing-gpu": ("smoothing", speed_tables.smoothing),
    "few-gpu": ("few", speed_tables.few),
    "training-gpu": ("training", speed_tables.training),
    "growth-gpu": ("growth", speed_tables.growth),
    "dtypes-gpu": ("dtypes", speed_tables.dtypes),
    "first-calls-gpu": ("first_calls", speed_tables.first_calls),
}
"""With the part of the record that each shows: a run may have been cut off."""
STUDY: dict[str, Render] = {
    "forward": study_tables.forward,
    "backward": study_tables.backward,
    "loss-errors": study_tables.loss_errors,
    "gradient-errors": study_tables.gradient_errors,
    "published": study_tables.published,
}
PREDICTION: dict[str, Render] = {
    "prediction": prediction_tables.accuracy,
    "prediction-sets": prediction_tables.sets,
}
LINEAR: dict[str, tuple[str, Render]] = {
    "linear": ("rows", linear_tables.layers),
    "linear-model": ("ceilings", linear_tables.model),
    "linear-rooms": ("rooms", linear_tables.rooms),
    "linear-predictions": ("predictions", linear_tables.predictions),
    "linear-sums": ("sums", linear_tables.sums),
}


def main() -> None:
    texts = dict(tables())
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        before = path.read_text()
        after = filled(before, texts)
        if after != before:
            path.write_text(after)
            print(f"{path.relative_to(ROOT)}: tables changed")
    if find_spec("lightning") is None:
        print("lightning is not installed (pip install 'topklass[train]'): no plots")
        return
    from benchmarks import plots

    plots.main()


def tables() -> Iterator[tuple[str, str]]:
    """The text of every table that has been measured, by its name."""
    if record := read("speed-cpu"):
        yield "speed-cpu", speed_tables.cpu(record)
    if record := read("speed-gpu"):
        yield from of_parts(record, SPEED_GPU)
    if record := read("prediction"):
        yield from ((name, render(record)) for name, render in PREDICTION.items())
    if record := read("long-tail"):
        yield "long-tail", prediction_tables.long_tail(record)
    if record := read("linear-gpu"):
        yield from of_parts(record, LINEAR)
    if record := read("sharded-cpu"):
        yield "sharded", sharded.exchanges(record)
    if record := read("many-classes"):
        yield "many-classes", many_classes.accuracies(record)
    if record := read("noise"):
        yield "noise", noise_tables.noise(record)
    for place in ("cpu", "gpu"):
        if record := read(f"study-{place}"):
            yield from ((f"{name}-{place}", render(record)) for name, render in STUDY.items())
    if find_spec("lightning") is None:
        print(
            "lightning is not installed (pip install 'topklass[train]'): no tables of reproduction"
        )
        return
    from benchmarks import reproduce_tables

    yield from reproduce_tables.tables()


def of_parts(
    record: dict[str, Any], renders: dict[str, tuple[str, Render]]
) -> Iterator[tuple[str, str]]:
    """The tables whose part of a record was measured."""
    for name, (part, render) in renders.items():
        if record.get(part):
            yield name, render(record)


def filled(document: str, texts: dict[str, str]) -> str:
    """The document with these texts between their pairs of comments."""
    for name, text in texts.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if start in document and end in document:
            before, rest = document.split(start, 1)
            document = f"{before}{start}\n{text}\n{end}{rest.split(end, 1)[1]}"
    return document
