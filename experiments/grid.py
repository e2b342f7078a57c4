"""From the grids of a preset to its runs, without duplicates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from experiments.plan import CASE, RATE, Plan, Settings, case_settings, listed, method_recipe
from experiments.search import search_grids, searches
from topklass.train.finished import format_value
from topklass.train.recipe import Recipe

NOT_RECORDED = ("data", "seed", "workers")
"""Paths of this machine, what a row has by itself, and what changes no result."""


@dataclass(frozen=True)
class Planned:
    """A run of an experiment."""

    name: str
    """Of its folder; methods that come to the same have it in common."""
    method: str
    seed: int
    recipe: Recipe
    settings: Settings
    """Those in which the runs of the preset differ, without the seed."""
    case: str | None = None
    search: bool = False
    """Whether the learning rate depends on it."""
    waits: bool = False
    """Whether its learning rate is not yet chosen; that of the recipe stands for it."""

    @property
    def row(self) -> Settings:
        """What a row of the record says about the run before its results."""
        return {
            "run": self.name,
            "method": self.method,
            **({} if self.case is None else {CASE: self.case}),
            "seed": self.seed,
            "settings": {n: v for n, v in self.settings.items() if n != RATE or not self.waits},
        }


def planned_runs(
    plan: Plan,
    preset: str,
    data: Path | None = None,
    chosen: Mapping[str, Mapping[str, float]] | None = None,
) -> list[Planned]:
    """All runs of a preset, in order of priority: those of the search, then those of the grids.

    A grid is the product of its lists: for each seed, each value of its settings, each method.
    Runs that would be the same are one: without noise, its kind does not matter.

    Args:
        plan: of the experiment.
        preset: one of its protocols.
        data: where the data set is.
        chosen: learning rates by method and case, of those whose search is complete.
    """
    found: dict[tuple[str, str], Planned] = {}
    names: dict[str, str] = {}
    chosen, tried, searched = chosen or {}, searches(plan, preset), search_grids(plan, preset)
    for number, grid in enumerate([*searched, *plan.presets[preset].grids]):
        search = number < len(searched)
        axes = {name: each for name, each in grid.items() if name not in ("methods", "seeds")}
        lists = [listed(each) for each in axes.values()]
        methods = grid.get("methods", list(plan.methods))
        for seed, values, method in product(grid.get("seeds", [0]), product(*lists), methods):
            axis = dict(zip(axes, values, strict=True))
            case = axis.pop(CASE, None)
            waits = False
            if not search and (method, case) in tried:
                rate = chosen.get(method, {}).get(case)
                waits = rate is None
                axis[RATE] = plan.presets[preset].search[RATE][0] if waits else rate
            settings = {**case_settings(plan, preset, case), **axis}
            more = {**settings, "seed": seed, **({} if data is None else {"data": str(data)})}
            recipe = canonical(method_recipe(plan, preset, method, more))
            shown = [each for each in settings if each != RATE or not waits]
            name = run_name(method, {each: getattr(recipe, each) for each in shown}, seed)
            same = names.setdefault(repr(recipe), name)
            run = Planned(same, method, seed, recipe, {}, case, search, waits)
            earlier = found.setdefault((method, same), run)
            if earlier.case != case:
                raise ValueError(
                    f"{plan.name}.yaml, preset {preset}: the cases {earlier.case!r} and {case!r} "
                    "have the same settings: leave one out"
                )
    differing = _differing([run.recipe for run in found.values()])
    return [replace(run, settings=_settings(run.recipe, differing)) for run in found.values()]


def canonical(recipe: Recipe) -> Recipe:
    """The same recipe for all recipes that train alike.

    Example:
        >>> canonical(Recipe(noise_kind="block")).noise_kind
        'superclass'
    """
    return replace(recipe, noise_kind=Recipe().noise_kind) if recipe.noise == 0 else recipe


def run_name(method: str, settings: Settings, seed: int) -> str:
    """A folder for a run.

    Example:
        >>> run_name("τ = 0", {"noise": 0.2, "noise_kind": "block", "subset": None}, 1)
        'τ=0,noise=0.2,noise_kind=block,subset=none,seed=1'
        >>> run_name("smooth", {"noise": 0.0, "noise_kind": "block"}, 1)
        'smooth,noise=0,seed=1'
        >>> run_name("smooth, margin 0", {}, 1)
        'smooth-margin-0,seed=1'
    """
    if settings.get("noise") == 0:
        settings = {name: each for name, each in settings.items() if name != "noise_kind"}
    parts = [f"{name}={format_value(each)}" for name, each in settings.items()]
    method = method.replace(" = ", "=").replace(",", "").replace(" ", "-")
    return ",".join([method, *parts, f"seed={seed}"])


def protocol_of(runs: list[Planned]) -> Settings:
    """The settings that all runs share."""
    recipes = [run.recipe for run in runs]
    differing = _differing(recipes)
    kept = plain(recipes[0])
    return {n: v for n, v in kept.items() if n not in (*differing, *NOT_RECORDED)}


def plain(recipe: Recipe) -> Settings:
    """All settings, in JSON's types."""
    settings: Settings = json.loads(json.dumps(asdict(recipe)))
    return settings


def matches(settings: Settings, where: Settings) -> bool:
    """Whether settings have these values; without noise, its kind does not matter.

    Example:
        >>> matches({"noise": 0.0, "noise_kind": "superclass"}, {"noise_kind": "block"})
        True
    """
    return all(
        settings.get(name) == wanted or (name == "noise_kind" and settings.get("noise") == 0)
        for name, wanted in where.items()
    )


def _differing(recipes: list[Recipe]) -> list[str]:
    values: dict[str, set[str]] = {}
    for recipe in recipes:
        for name, each in asdict(recipe).items():
            values.setdefault(name, set()).add(repr(each))
    return [n for n, found in values.items() if len(found) > 1 and n not in NOT_RECORDED]


def _settings(recipe: Recipe, names: list[str]) -> dict[str, Any]:
    settings = plain(recipe)
    return {name: settings[name] for name in names}
