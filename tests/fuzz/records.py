"""Recipes in YAML, and the records of runs and experiments in JSON."""

import copy
import json
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from experiments.experiment import new_record, save_record
from topklass.train import Recipe
from topklass.train.signature import Signature

from .judge import TRACE
from .mutations import LEAVES, PLAIN, edited, edits, mutated

LAUGHS = "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 'lol'}]\n" for n in range(12)
)
SNIPPETS = [
    LAUGHS,
    LAUGHS.replace("a11:", "k:"),
    LAUGHS.replace("a11:", "data_options:"),
    LAUGHS.replace("a11:", "? *a10\n:"),
    f"!!python/object/apply:os.system ['touch {TRACE}']",
    f"data: !!python/object/apply:os.mkdir ['{TRACE}']",
    "data: !!python/name:os.system",
    "k: 2001-99-99",
    f"k: {'9' * 5000}",
    "k: 1e999999",
    "k: 0x" + "f" * 5000,
    "k: 1:99:99999999",
    "<<: 5",
    "&a [*a]",
    "&a {k: *a}",
    "[" * 3000,
    "{" * 500 + "}" * 500,
    "data_options: " + "[" * 400 + "]" * 400,
    "? [a, b]\n: 1",
    "? {a: 1}\n: 1",
    "k: !!binary '='",
    "k: !!set {1, 2}",
    "k: =",
    "\ufeffk: 3",
    "k: 3\n---\nk: 4",
    "\x00",
    "%YAML 9.9\n---\nk: 3",
    "",
    "null",
]
NAMES = [each.name for each in fields(Recipe)]
SETTINGS = st.dictionaries(st.sampled_from(NAMES) | LEAVES, PLAIN, max_size=4)
DUMPED = SETTINGS.map(
    lambda each: yaml.safe_dump(each, allow_unicode=True).encode("utf-8", "replace")
)
RAW = st.sampled_from([snippet.encode() for snippet in SNIPPETS])
YAML = (
    DUMPED
    | RAW
    | st.builds(edited, DUMPED | RAW, edits(3))
    | st.text("&*!:-?[]{}#|>%@`'\"ak0 \n\t<=.e_", max_size=60).map(str.encode)
)


def written(save: Any) -> bytes:
    """What a function writes to a path."""
    with TemporaryDirectory() as folder:
        path = save(Path(folder) / "file") or Path(folder) / "file"
        return path.read_bytes()


SIGNATURE = written(Signature(("a", "b"), 3, 8, 8, None, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)).save)
RECORD = written(
    lambda path: save_record(
        {**new_record("level-sets", "smoke", {"k": 1}), "rows": [{"seed": 0}]}, path.parent
    )
)


def finished_run() -> dict[str, bytes]:
    """The records of a small run, as training writes them."""
    recipe = Recipe(data="toy", k=1, epochs=2)
    settings = {each.name: getattr(recipe, each.name) for each in fields(Recipe)}
    result = {
        "recipe": settings,
        "data": {"name": "toy"},
        "classes": 3,
        "epoch": 1,
        "test": {"micro": {"1": 0.5}, "macro": {"1": 0.5}},
        "seconds": 1.5,
        "versions": {"topklass": "1"},
        "hardware": "a computer",
    }
    details = {
        "classes": ["a", "b", "c"],
        "counts": [4, 4, 4],
        "labels": [0, 1, 2],
        "ranks": [0, 1, 2],
        "images": "abc",
        "epochs": [{"epoch": 1, "train/top1": 0.5}, {"epoch": 2, "train/top1": 0.6}],
    }
    texts = {"result.json": result, "details.json": details}
    files = {name: json.dumps(each).encode() for name, each in texts.items()}
    return {**files, "recipe.yaml": written(recipe.save)}


RUN = finished_run()


def replaced(tree: Any, path: list[int], new: Any) -> Any:
    """A record with another value at some place, or without one."""
    tree = copy.deepcopy(tree)
    at, keys = tree, path
    while keys:
        places = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not places:
            break
        key = places[keys[0] % len(places)]
        if len(keys) == 1 or not isinstance(at[key], dict | list) or not at[key]:
            if new is Ellipsis:
                del at[key]
            else:
                at[key] = new
            break
        at, keys = at[key], keys[1:]
    return tree


def changed_json(original: bytes) -> SearchStrategy[bytes]:
    """The record with changed values, changed bytes, or any JSON."""
    record = json.loads(original)
    places = st.lists(st.integers(0, 60), min_size=1, max_size=3)
    other = PLAIN | st.just(...) | st.sampled_from([10**12, float("nan"), float("inf"), "\x1b[31m"])
    return (
        st.builds(replaced, st.just(record), places, other).map(
            lambda each: json.dumps(each).encode()
        )
        | st.builds(lambda each: json.dumps(each).encode(), PLAIN)
        | mutated([original, b"[" * 5000, b"9" * 5000, b"", b"null", b'{"a": NaN}', b"\xff\xfe"])
    )
