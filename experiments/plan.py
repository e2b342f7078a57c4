"""The YAML file of a training experiment, read and checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from experiments.experiment import PRESETS
from experiments.metrics import BOTH, GRADIENT, parse_metric
from topklass._checks import did_you_mean
from topklass.train.recipe import Recipe, check_names

RECIPES = Path(__file__).parent / "recipes"
CASE, RATE = "case", "learning_rate"
Settings = dict[str, Any]


@dataclass(frozen=True)
class Preset:
    """One protocol of an experiment.

    Args:
        settings: of all its runs.
        grids: each names settings with the values to try, ``methods`` and ``seeds``; in order of
            priority. ``case`` stands for the settings of a case.
        methods: what this protocol changes in methods.
        cases: what this protocol changes in cases.
        search: ``learning_rate`` and ``seeds`` to try before all grids; ``cases`` has, for cases of
            the grids, those in which each method tries the learning rates. The best rate is that
            with the largest metric ``by``, top-k accuracy if there is none.
    """

    settings: Settings
    grids: list[Settings]
    methods: dict[str, Settings] = field(default_factory=dict)
    cases: dict[str, Settings] = field(default_factory=dict)
    search: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class DataNeeded:
    """What ``--data`` has to be."""

    name: str
    classes: int
    get: str
    test: int | None = None
    """Number of test images, where it is always the same."""


@dataclass(frozen=True)
class Plan:
    """All that a file says.

    Args:
        name: of the experiment.
        title: one line.
        papers: what it repeats.
        data: what it needs, unless a preset names its own data.
        always: settings of all runs.
        methods: settings by name; what is compared.
        cases: settings by name; on what methods are compared. Several settings, one axis.
        presets: protocols by name.
        tables: what goes down, what across, which metrics.
        published: the papers' numbers, one for each table or column.
        figures: metrics against a setting, or curves by epoch.
        curves: what is kept of every epoch, besides gradients.
        views: whether the average over views is measured, too.
    """

    name: str
    title: str
    papers: tuple[str, ...]
    data: DataNeeded
    always: Settings
    methods: dict[str, Settings]
    presets: dict[str, Preset]
    tables: list[Settings]
    cases: dict[str, Settings] = field(default_factory=dict)
    published: list[Settings] = field(default_factory=list)
    figures: list[Settings] = field(default_factory=list)
    curves: list[str] = field(default_factory=list)
    views: bool = False


TABLE_KEYS = {"title": True, "rows": True, "metrics": True, "columns": False, "where": False}
TABLE_KEYS |= {"methods": False, "note": False, "against": False, "beside": False}
FIGURE_KEYS = {"file": True, "title": True, "x": False, "metric": False, "curve": False}
FIGURE_KEYS |= {"where": False, "methods": False, "against": False, "metrics": False}
DRAWN = {"x", "metric", "curve"}
PUBLISHED_KEYS = {"source": True, "metric": True, "values": True, "where": False, "by": False}


def load_plan(name: str) -> Plan:
    """Read the file of an experiment."""
    return parse_plan(name, _text(name))


def _text(name: str) -> str:
    return (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")


def parse_plan(name: str, text: str) -> Plan:
    """A plan from YAML; whatever it cannot mean is an error that names the place.

    A file that is ``like`` another has all that it does not say itself from that.

    Example:
        >>> parse_plan("toy", "title: a toy")
        Traceback (most recent call last):
        ...
        ValueError: toy.yaml lacks papers, data, always, methods, presets, tables
    """
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{name}.yaml is not YAML: {error}") from error
    where = f"{name}.yaml"
    if isinstance(content, dict) and "like" in content:
        content = {**yaml.safe_load(_text(content.pop("like"))), **content}
    known = {each: each not in OPTIONAL for each in FIELDS}
    _check_keys(where, content, known)
    needed = {"name": True, "classes": True, "get": True, "test": False}
    _check_keys(f"{where}, data", content["data"], needed)
    presets = {
        each: _preset(f"{where}, preset {each}", given, content)
        for each, given in content["presets"].items()
    }
    if set(presets) != set(PRESETS):
        raise ValueError(f"{where} must have the presets {', '.join(PRESETS)}, got {[*presets]}")
    cases = content.setdefault("cases", {})
    settings = (content["always"], *content["methods"].values(), *cases.values())
    for each in (*settings, *(preset.settings for preset in presets.values())):
        check_names(each)
    _check_parts(where, content)
    data, papers = DataNeeded(**content.pop("data")), tuple(content.pop("papers"))
    content["presets"] = presets
    return Plan(name, data=data, papers=papers, **content)


FIELDS = tuple(each for each in Plan.__dataclass_fields__ if each != "name")
OPTIONAL = ("cases", "published", "figures", "curves", "views")


def _preset(where: str, given: Any, content: Settings) -> Preset:
    keys = {each: each in ("settings", "grids") for each in Preset.__dataclass_fields__}
    _check_keys(where, given, keys)
    preset, methods, cases = Preset(**given), content["methods"], content.get("cases", {})
    _check_named(where, "method", preset.methods, methods)
    _check_named(where, "case", preset.cases, cases)
    for settings in (*preset.methods.values(), *preset.cases.values()):
        check_names(settings)
    for grid in preset.grids:
        _check_named(where, "method", grid.get("methods", ()), methods)
        _check_named(where, "case", listed(grid.get(CASE, [])), cases)
        check_names({each: None for each in grid if each not in (CASE, "methods", "seeds")})
        if preset.search and RATE in grid:
            raise ValueError(f"{where} has a search for {RATE}: leave it out of the grids")
    if preset.search:
        _check_search(f"{where}, search", preset.search, cases)
    return preset


def _check_search(where: str, given: Any, cases: Iterable[str]) -> None:
    _check_keys(where, given, {RATE: True, "cases": True, "seeds": False, "by": False})
    parse_metric(given.get("by", BOTH))
    for tried in ([*given["cases"]], *given["cases"].values()):
        if not isinstance(tried, list):
            raise ValueError(f"{where}: each of cases must have a list of cases, got {tried!r}")
        _check_named(where, "case", tried, cases)
    for key in (RATE, "seeds"):
        if not isinstance(given.get(key, []), list):
            raise ValueError(f"{where}: {key} must be a list, got {given[key]!r}")


def listed(value: Any) -> list[Any]:
    """A value of a grid as a list.

    Example:
        >>> listed(5), listed([1, 5])
        ([5], [1, 5])
    """
    return value if isinstance(value, list) else [value]


def _check_parts(where: str, content: Settings) -> None:
    """Require tables, figures and published numbers of known methods, settings and metrics."""
    methods = content["methods"]
    for kind, keys in (
        ("tables", TABLE_KEYS),
        ("figures", FIGURE_KEYS),
        ("published", PUBLISHED_KEYS),
    ):
        for each in content.get(kind, []):
            place = f"{where}, {kind}, {each.get('title', each.get('source'))}"
            _check_keys(place, each, keys)
            given = each.get("methods", each.get("values", ()))
            _check_named(place, "method", given, methods)
            axes = [each.get(axis) for axis in ("rows", "columns", "x", "by")]
            known = (None, "method", *([CASE] if content.get("cases") else []))
            given = [axis for axis in (*axes, *each.get("where", {})) if axis not in known]
            check_names(dict.fromkeys(given))
            for metric in each.get("metrics", [each["metric"]] if "metric" in each else []):
                parse_metric(metric)
            if "against" in each or "beside" in each:
                _check_gains(place, each, kind, methods)
            elif kind == "figures" and DRAWN & {*each} not in ({"x", "metric"}, {"curve"}):
                raise ValueError(f"{place} must have x and metric, or a curve, or against")
            if each.get("curve", GRADIENT) not in (GRADIENT, *content.get("curves", [])):
                raise ValueError(f"{place} draws {each['curve']!r}, which is not among curves")


def _check_gains(where: str, part: Settings, kind: str, methods: Iterable[str]) -> None:
    """Require what tables and figures of gains over a method need."""
    beside = part.get("beside")
    if beside is not None:
        _check_keys(f"{where}, beside", beside, {"method": True, "metric": True})
        parse_metric(beside["metric"])
    named = [part.get("against"), *([] if beside is None else [beside["method"]])]
    _check_named(where, "method", named, methods)
    if kind == "figures":
        if len(part.get("metrics", ())) != 2:
            raise ValueError(f"{where} must have two metrics, across and up")
    elif {"method", CASE} - {part["rows"], part.get("columns"), *part.get("where", {})}:
        raise ValueError(f"{where} must have method and {CASE} in rows, columns or where")


def _check_keys(where: str, given: Any, known: Mapping[str, bool]) -> None:
    """Require a mapping with these keys; true for those that it must have."""
    if not isinstance(given, dict):
        raise ValueError(f"{where} must hold `name: value`, got {given!r}")
    for key in given:
        if key not in known:
            listed = ", ".join(known)
            raise ValueError(
                f"{where} has {key!r}.{did_you_mean(str(key), known)} It may have: {listed}"
            )
    lacking = [key for key, needed in known.items() if needed and key not in given]
    if lacking:
        raise ValueError(f"{where} lacks {', '.join(lacking)}")


def _check_named(where: str, kind: str, given: Iterable[str], known: Iterable[str]) -> None:
    for name in given:
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise ValueError(f"{where} names the {kind} {name!r}, which is not there.{hint}")


def case_settings(plan: Plan, preset: str, case: str | None) -> Settings:
    """What a case sets in a preset; nothing without a case."""
    if case is None:
        return {}
    return {**plan.cases[case], **plan.presets[preset].cases.get(case, {})}


def method_recipe(plan: Plan, preset: str, method: str, more: Settings) -> Recipe:
    """The recipe of a method, with settings of its own.

    What is more special counts: a preset over what is always so, a method over both, a preset's
    change of the method over that, and a case or a grid over all.
    """
    chosen = plan.presets[preset]
    layers = (
        plan.always,
        chosen.settings,
        plan.methods[method],
        chosen.methods.get(method, {}),
        more,
    )
    merged: Settings = {}
    for layer in layers:
        merged |= layer
    return Recipe().with_changes(merged)
