"""The interface of an experiment, and its record."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from topklass._checks import check_count
from topklass._files import write_whole
from topklass._provenance import commit, versions
from topklass.train.details import hardware
from topklass.train.finished import format_value

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PRESETS = ("paper", "fast", "smoke")
RECORD = ("experiment", "preset", "protocol", "rows", "not_run", "versions", "hardware", "commit")
"""What every record has."""
TYPES = {"protocol": dict, "rows": list, "not_run": list, "versions": dict}
Record = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What to run of an experiment, and where.

    Args:
        preset: one of ``PRESETS``.
        folder: for runs and the record; it may contain those of an interrupted run.
        data: path of the data set; None if the experiment needs none.
        at_once: runs that train at the same time.
        most: largest number of runs to train, in the order of the plan; None for all.
        console: where progress is shown; None for silence.
    """

    preset: str
    folder: Path
    data: Path | None = None
    at_once: int = 1
    most: int | None = None
    console: Console | None = None

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            listed = ", ".join(PRESETS)
            raise ValueError(f"the preset must be one of {listed}, got {self.preset!r}")
        for name in ("at_once", "most"):
            if (number := getattr(self, name)) is not None:
                check_count(name, number)

    def say(self, sentence: str) -> None:
        """Print a line on the console, if there is one."""
        if self.console is not None:
            self.console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    def track(self, rounds: range) -> Iterable[int]:
        """Iterate over rounds, with a progress bar if there is a console."""
        if self.console is None:
            return rounds
        from rich.progress import track

        return track(rounds, "rounds", console=self.console)


class Experiment(ABC):
    """One experiment."""

    name: str
    title: str
    """One line."""
    papers: tuple[str, ...]
    """What it repeats, for example "Berrada 2018, Table 1"."""
    takes: tuple[str, ...] = ()
    """Which of ``data``, ``at_once`` and ``most`` it takes."""
    resumes = True
    """Whether it continues where it was interrupted, or starts again."""

    def runs(self, preset: str) -> int | None:
        """How many networks are trained; None if it trains none."""
        return None

    @abstractmethod
    def run(self, request: Request) -> Record:
        """Run what the folder's record lacks, and save the record after each part.

        Returns:
            The record, as :func:`new_record` begins it.
        """

    @abstractmethod
    def show(self, record: Record) -> list[Table]:
        """Tables of a record, with the papers' numbers."""

    @abstractmethod
    def draw(self, record: Record, folder: Path) -> list[Path]:
        """Draw the figures of a record as SVG files in that folder; returns their paths."""


def device() -> torch.device:
    """The device to measure on: the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def new_record(experiment: str, preset: str, protocol: Mapping[str, Any]) -> Record:
    """A record with its versions, hardware and commit, and no rows yet.

    Args:
        experiment: its name.
        preset: one of ``PRESETS``.
        protocol: settings that all rows share, in JSON's types.

    Example:
        >>> list(new_record("level-sets", "smoke", {"k": 1})) == list(RECORD)
        True
    """
    return {
        "experiment": experiment,
        "preset": preset,
        "protocol": dict(protocol),
        "rows": [],
        "not_run": [],
        "versions": versions(),
        "hardware": hardware(device()),
        "commit": commit(),
    }


def record_path(folder: Path, experiment: str, preset: str) -> Path:
    """Where a record is saved."""
    return folder / f"{experiment}-{preset}.json"


def save_record(record: Record, folder: Path) -> Path:
    """Write a record; the old one is replaced when the new one is complete."""
    path = record_path(folder, record["experiment"], record["preset"])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: file.write(as_text(record).encode()))
    return path


def as_text(record: Record) -> str:
    r"""JSON with one row per line, for readable differences.

    Example:
        >>> as_text({"preset": "fast", "rows": [{"seed": 0}, {"seed": 1}]})
        '{\n"preset": "fast",\n"rows": [\n {"seed": 0},\n {"seed": 1}\n]\n}\n'
    """

    def line(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    parts = []
    for key, value in record.items():
        rows = isinstance(value, list) and value
        text = "[\n " + ",\n ".join(map(line, value)) + "\n]" if rows else line(value)
        parts.append(f"{line(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def load_record(path: Path) -> Record:
    """Read a record, or say what is wrong with the file."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: give the record in it, NAME-PRESET.json")
    if not path.exists():
        raise FileNotFoundError(f"there is no record {path}")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    wrong = f"{path} is not a record of python -m experiments"
    lacking = [key for key in RECORD if not isinstance(record, dict) or key not in record]
    if lacking:
        raise ValueError(f"{wrong}: it lacks {', '.join(lacking)}")
    for key, kind in TYPES.items():
        if not isinstance(record[key], kind):
            raise ValueError(f"{wrong}: its {key} is {record[key]!r:.60}")
    if record["preset"] not in PRESETS:
        raise ValueError(f"{wrong}: there is no preset {record['preset']!r}")
    return dict(record)


def load_same(path: Path, record: Record) -> Record:
    """Read the record of an earlier run of the same experiment and preset."""
    old = load_record(path)
    if (old["experiment"], old["preset"]) != (record["experiment"], record["preset"]):
        raise ValueError(
            f"{path} is a record of {old['experiment']}, preset {old['preset']}: choose another "
            "--folder"
        )
    return old


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """How settings changed, in words.

    Example:
        >>> changes({"k": 5, "epochs": 3}, {"k": 5, "epochs": 4})
        'epochs was 3 and is 4'
    """
    changed = [name for name in before if name not in now or before[name] != now[name]]
    return "; ".join(
        f"{name} was {format_value(before[name])} and is "
        + (format_value(now[name]) if name in now else "gone")
        for name in changed
    )


def another_protocol(path: Path, changed: str) -> ValueError:
    """The error for a record with other settings than requested."""
    return ValueError(
        f"{path} is of another protocol ({changed}): choose another --folder, or move it away"
    )


def check_rows(record: Record, keys: Iterable[str]) -> None:
    """Require that all rows of a record have these keys."""
    for number, row in enumerate(record["rows"], start=1):
        lacking = [key for key in keys if not isinstance(row, dict) or key not in row]
        if lacking:
            raise ValueError(
                f"the record of {record['experiment']}, preset {record['preset']}, is damaged: "
                f"its row {number} lacks {', '.join(lacking)}"
            )


def not_run(record: Record) -> str:
    """How much of an experiment has not been run.

    Example:
        >>> not_run({"rows": ["first"], "not_run": ["second", "third"]})
        'Not run: 2 of 3 parts.'
    """
    left = len(record["not_run"])
    return f"Not run: {left} of {left + len(record['rows'])} parts."
