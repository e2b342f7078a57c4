"""The explorer in a real browser: its numbers are those of the library."""

import ast
import json
import math
import random
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import topklass
from browser import ask, needs_browser
from experiments.landscapes import landscape, simplex

pytestmark = [pytest.mark.slow, needs_browser]

PAGE = Path(__file__).parent.parent / "docs" / "explorer" / "index.html"
DESK = 1280
LOSSES = (
    *("cross-entropy", "smooth", "noised", "noised-exact", "topk-cross-entropy", "short-list"),
    *("hinge", "convex-hinge", "calibrated-hinge", "ldam", "focal", "multi-label"),
)
SORTED = ("hinge", "convex-hinge", "calibrated-hinge")
"""They choose among tied classes, and any choice is right."""
STATES = 100
EVALUATE = """
const { LOSSES, math, python } = explorer;
parent.postMessage(STATES.map(({ scores, label, settings: all }) => {
  const names = ["loss", ...Object.keys(LOSSES[all.loss].settings)];
  const settings = Object.fromEntries(names.map(name => [name, all[name]]));
  const noise = math.noise(all.seed, all.samples, scores.length);
  return { ...math.evaluate(scores, label, settings), python: python(settings), noise };
}), "*");
"""


def log_uniform(source: random.Random, low: float, high: float) -> float:
    return math.exp(source.uniform(math.log(low), math.log(high)))


def random_settings(source: random.Random, loss: str, classes: int) -> dict[str, Any]:
    """All settings that any loss has: ordinary, tiny and large ones."""
    temperature = source.choice([1.0, 1e-4, 1e3, log_uniform(source, 0.01, 100)])
    label = {"label_smoothing": 0.0 if loss == "multi-label" else source.choice([0.0, 0.1, 0.3])}
    return label | {
        "loss": loss,
        "k": source.choice([1, classes - 1, source.randrange(1, classes)]),
        "tau": temperature,
        "epsilon": temperature,
        "temperature": temperature,
        "samples": source.randrange(1, 20),
        "seed": source.randrange(1, 99),
        "margin": source.choice([0.0, 0.7123, source.uniform(0, 5)]),
        "scale": source.choice([1.0, 30.0, log_uniform(source, 0.1, 100)]),
        "first_guess": source.choice([0.0, 1.0, source.random()]),
        "gamma": source.choice([0.0, 2.0, source.uniform(0, 5)]),
        "also": source.sample(range(classes), source.randrange(classes)),
    }


def random_states(loss: str) -> list[dict[str, Any]]:
    """States of 3 to 12 classes, a third of them with ties, some with a class far above."""
    source, states = random.Random(loss), []
    for number in range(STATES):
        classes = source.randrange(3, 13)
        scores = [source.gauss(0, 3) for _ in range(classes)]
        if number % 3 == 0:
            scores = [round(score) / 2 for score in scores]
        if number % 5 == 0:
            scores[source.randrange(classes)] += 50
        settings = random_settings(source, loss, classes)
        states.append({"scores": scores, "label": source.randrange(classes), "settings": settings})
    return states


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[dict, dict]]]:
    """Random states of every loss, and what the page makes of them."""
    states = {loss: random_states(loss) for loss in LOSSES}
    every = [state for each in states.values() for state in each]
    script = EVALUATE.replace("STATES", json.dumps(every))
    found = ask(PAGE.read_text("utf-8"), script, tmp_path_factory.mktemp("explorer"), DESK)
    pairs = iter(zip(every, found, strict=True))
    return {loss: [next(pairs) for _ in each] for loss, each in states.items()}


def criterion_of(python: str) -> torch.nn.Module:
    """The loss that the page shows as Python code."""
    call = ast.parse(python, mode="eval").body
    assert isinstance(call, ast.Call)
    library, name = ast.unparse(call.func).rsplit(".", 1)
    arguments = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    return getattr({"topklass": topklass, "torch.nn": torch.nn}[library], name)(**arguments)


def of_library(state: dict, found: dict) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, gradient and marginals of a state."""
    scores = torch.tensor(state["scores"], dtype=torch.float64, requires_grad=True)
    criterion, settings = criterion_of(found["python"]), state["settings"]
    target, more = torch.tensor(state["label"]), {}
    if settings["loss"] == "multi-label":
        target = torch.zeros(len(scores), dtype=torch.bool)
        target[[state["label"], *settings["also"]]] = True
    if settings["loss"] == "noised":
        more["noise"] = torch.tensor(found["noise"], dtype=torch.float64).T
    loss = criterion(scores, target, **more)
    (gradient,) = torch.autograd.grad(loss, scores)
    temperature = getattr(criterion, "temperature", 1.0)
    if settings["loss"] == "multi-label":
        temperature = criterion.k * criterion.tau
    marginals = topklass.topk_marginals(scores.detach() / temperature, settings["k"])
    return loss.detach(), gradient, marginals


def by_score(values: Tensor, scores: list[float]) -> Tensor:
    """Sums over classes of equal scores."""
    places = torch.tensor(scores, dtype=torch.float64).unique(return_inverse=True)[1]
    return torch.zeros_like(values).index_add(0, places, values)


@pytest.mark.parametrize("loss", LOSSES)
def test_numbers_are_those_of_the_library(evaluated, loss):
    for state, found in evaluated[loss]:
        value, gradient, marginals = of_library(state, found)
        actual = torch.tensor(found["gradient"], dtype=torch.float64)
        if loss in SORTED:
            actual, gradient = (by_score(x, state["scores"]) for x in (actual, gradient))
        pairs = [(found["loss"], value), (actual, gradient), (found["marginals"], marginals)]
        for given, expected in pairs:
            difference = torch.as_tensor(given, dtype=torch.float64) - expected
            assert (difference.abs() <= 1e-6 * expected.abs().clamp(min=1)).all(), (state, found)


def test_all_losses_are_there(evaluated):
    codes = [found["python"] for each in evaluated.values() for _, found in each]
    losses = {code.split("(")[0].split(".")[-1] for code in codes}
    one_label = {name for name in topklass.__all__ if re.fullmatch(r"(?!Linear)\w+Loss", name)}
    assert losses == one_label | {"CrossEntropyLoss"}


def test_noise_is_normal(evaluated):
    drawn = [z for _, found in evaluated["noised"] for vector in found["noise"] for z in vector]
    values = torch.tensor(drawn, dtype=torch.float64)
    assert len(values.unique()) > 4000
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert (values**power).mean().item() == pytest.approx(moment, abs=0.15 * 2**power / 2)


def test_level_sets_are_those_of_the_figures(tmp_path):
    """Garcin et al. 2022, Figure 1: k = 2, margin 1, scores that add up to 2."""
    settings = {
        "cross-entropy": {},
        "hinge": {"margin": 1},
        "calibrated-hinge": {"margin": 1},
        "convex-hinge": {"margin": 1},
        "smooth": {"tau": 0.1, "margin": 0.5},
        "noised": {"epsilon": 0.3, "margin": 1, "scale": 1},
    }
    given = [
        {"loss": "noised-exact" if loss == "noised" else loss, "k": 2, **each}
        for loss, each in settings.items()
    ]
    script = """parent.postMessage(SETTINGS.map(settings => explorer.math.landscape(
        [2 / 3, 2 / 3, 2 / 3], 2, [0, 1], settings, 2, 12)), "*");"""
    found = ask(PAGE.read_text(), script.replace("SETTINGS", json.dumps(given)), tmp_path, DESK)
    own = {"smooth": {"tau": 0.1}, "noised": {"epsilon": 0.3, "samples": None}}
    for loss, values in zip(settings, found, strict=True):
        expected = landscape(loss, 2, simplex(12), **own.get(loss, {}))
        actual = torch.tensor(values, dtype=torch.float64)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_published_switch(tmp_path):
    """In the example that says so, the page names the value that the published code returns."""
    difftopk = pytest.importorskip("difftopk")
    script = """
const { state } = explorer.EXAMPLES.find(({ title }) => title.startsWith("Published"));
const hard = explorer.math.publishedSwitch(state.scores, state.label, state.first);
parent.postMessage({ ...state, hard }, "*");
"""
    found = ask(PAGE.read_text("utf-8"), script, tmp_path, DESK)
    settings, scores = found["first"], torch.tensor([found["scores"]], dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*should not be instantiated", DeprecationWarning)
        criterion = difftopk.SmoothHardTopKLoss(scores.shape[1], settings["k"], settings["tau"])
        published = criterion(scores, torch.tensor([found["label"]])).item()
    assert settings["margin"] == 1
    assert found["hard"] == pytest.approx(published)
