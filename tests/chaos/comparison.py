"""Whether two runs are the same: weights, optimiser, logs and results, bit for bit."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tests.chaos.commands import Screen

CHECKPOINTS = ("checkpoints/last.ckpt", "checkpoints/best.ckpt")
RECORDS = ("result.json", "details.json")
SETTINGS = ("recipe.yaml", "signature.json")
FILES = (*CHECKPOINTS, *RECORDS, *SETTINGS, "metrics.csv")
OTHERS = ("seconds", "dirpath", "loops", "best_k_models", "current_score", "checksum")
"""What a checkpoint or a record has that need not be the same, besides paths."""
SHOWN = 1500


class Lost(Exception):
    """An accident was not survived; this says what was lost, and what was on the screen."""

    def __init__(self, what: str, screen: Screen | None = None) -> None:
        text = "" if screen is None else f"{screen.codes} {screen.text}"
        if len(text) > 2 * SHOWN:
            text = f"{text[:SHOWN]}\n […]\n{text[-SHOWN:]}"
        super().__init__(f"{what}:\n{text}" if text else what)


def require_same(whole: Path, run: Path) -> None:
    """Require the same content of two run folders."""
    if missing := [name for name in FILES if not (run / name).exists()]:
        raise Lost(f"there is no {missing[0]}")
    for name in CHECKPOINTS:
        _require(name, load(whole / name), load(run / name))
    for name in RECORDS:
        _require(name, read_json(whole / name), read_json(run / name))
    _require("metrics.csv", read_rows(whole), read_rows(run))
    for name in SETTINGS:
        _require(name, (whole / name).read_bytes(), (run / name).read_bytes())
    if left := [each.name for each in run.rglob("*") if each.suffix in (".part", ".new")]:
        raise Lost(f"files of an interrupted write stay: {', '.join(left)}")


def load(path: Path) -> dict[str, Any]:
    """A checkpoint, without the help of its predecessor."""
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    return checkpoint


def read_json(path: Path) -> Any:
    """A record."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_rows(run: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv."""
    with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _require(name: str, expected: Any, found: Any) -> None:
    if wrong := list(differences(expected, found, name)):
        raise Lost(f"{len(wrong)} values differ, first {wrong[0]}")


def differences(expected: Any, found: Any, where: str) -> Iterator[str]:
    """Where two structures of dictionaries, lists, tensors and values differ."""
    if type(expected) is not type(found):
        yield f"{where}: {expected!r} became {found!r}"[:500]
    elif isinstance(expected, dict):
        for key in {**expected, **found}:
            if key in OTHERS or str(key).endswith("_path") or str(key).startswith("WithinEpochs"):
                continue
            if key in expected and key in found:
                yield from differences(expected[key], found[key], f"{where}/{key}")
            else:
                yield f"{where}/{key}: only in the {'first' if key in expected else 'second'}"
    elif isinstance(expected, list | tuple):
        if len(expected) != len(found):
            yield f"{where}: {len(expected)} became {len(found)} items"
        for number, pair in enumerate(zip(expected, found, strict=False)):
            yield from differences(*pair, f"{where}/{number}")
    elif isinstance(expected, torch.Tensor):
        if expected.dtype != found.dtype or not torch.equal(expected, found):
            yield f"{where}: other numbers"
    elif expected != found:
        yield f"{where}: {expected!r} became {found!r}"[:500]
