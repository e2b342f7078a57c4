"""Level sets: values worked out by hand, symmetries, and files made from the record alone."""

import json
from math import exp, log

import pytest
import torch
from torch import Tensor

from experiments import level_sets_figures
from experiments.catalogue import EXPERIMENTS
from experiments.experiment import RECORD, Request, load_record
from experiments.landscapes import LABEL, SIZE, landscape, rescaled, simplex
from experiments.level_sets import packed, panels, unpacked

EXPERIMENT = EXPERIMENTS["level-sets"]
CASES = sorted({(k, loss, *options.items()) for _, k, loss, options in panels()}, key=repr)
SMOOTH = "smooth"


def at(loss: str, k: int, *scores: float, **options: float | None) -> float:
    return landscape(loss, k, torch.tensor([scores], dtype=torch.float64), **options).item()


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return EXPERIMENT.run(Request("smoke", tmp_path_factory.mktemp("record")))


def test_points_are_all_of_the_simplex_once():
    points = simplex(5)
    assert points.shape == (21, 3)
    assert (points >= 0).all()
    torch.testing.assert_close(points.sum(1), torch.full((21,), SIZE, dtype=torch.float64))
    assert len({tuple(point) for point in points.tolist()}) == 21
    assert points[-1].argmax() == LABEL


# The label is the last score; 2·Δ3.
@pytest.mark.parametrize(
    ("loss", "k", "scores", "value"),
    [
        ("zero-one", 1, (1.0, 0.5, 0.5), 1),
        ("zero-one", 1, (0.5, 0.5, 1.0), 0),
        ("zero-one", 2, (1.0, 0.25, 0.75), 0),
        ("zero-one", 2, (1.0, 0.75, 0.25), 1),
        ("cross-entropy", 1, (0.0, 0.0, 2.0), log(1 + 2 * exp(-2))),
        ("cross-entropy", 2, (2.0, 0.0, 0.0), log(2 + exp(2))),
        ("hinge", 1, (1.5, 0.5, 0.0), 2.5),  # 1 + 1.5 − 0
        ("hinge", 2, (1.5, 0.5, 0.0), 1.5),  # 1 + 0.5 − 0
        ("hinge", 2, (0.25, 0.25, 1.5), 0),
        ("calibrated-hinge", 1, (1.5, 0.5, 0.0), 1.5),  # 1 + 0.5 − 0
        ("calibrated-hinge", 2, (1.5, 0.5, 0.0), 1),  # the label is its own rival
        ("calibrated-hinge", 1, (0.25, 1.25, 0.5), 1),
        ("convex-hinge", 2, (1.5, 0.5, 0.0), 2),  # (2.5 + 1.5) / 2 − 0
        ("convex-hinge", 2, (0.0, 0.0, 2.0), 0),  # (2 + 1) / 2 − 2 < 0
        ("convex-hinge", 2, (0.5, 0.25, 1.25), 0.125),  # (1.5 + 1.25) / 2 − 1.25
    ],
)
def test_by_hand(loss, k, scores, value):
    assert at(loss, k, *scores) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("tau", [0.1, 1.0])
def test_the_smooth_loss_has_a_margin_of_one_between_scores(tau):
    """For K = 1 it is a log-sum-exp with 1 added to the rivals; for K = 2 a sum over pairs."""
    a, b, y = 0.75, 0.5, 0.75
    one = tau * log((exp(y / tau) + exp((a + 1) / tau) + exp((b + 1) / tau)) / exp(y / tau))
    assert at(SMOOTH, 1, a, b, y, tau=tau) == pytest.approx(one)
    with_label = exp((a + y) / (2 * tau)) + exp((b + y) / (2 * tau))
    two = tau * log((with_label + exp((1 + a + b) / (2 * tau))) / with_label)
    assert at(SMOOTH, 2, a, b, y, tau=tau) == pytest.approx(two)


@pytest.mark.parametrize("k", [1, 2])
def test_the_smooth_loss_tends_to_the_hinge_after_rescaling(k):
    points = simplex(10)
    cold = rescaled(landscape(SMOOTH, k, points, tau=1e-4))
    torch.testing.assert_close(cold, rescaled(landscape("hinge", k, points)), atol=1e-3, rtol=0)


def mirrored(points: Tensor) -> Tensor:
    return points[:, [1, 0, 2]]


@pytest.mark.parametrize("case", CASES)
def test_the_two_rivals_are_alike(case):
    k, loss, *options = case
    options = {name: None if name == "samples" else value for name, value in options}  # no chance
    points = simplex(9)
    torch.testing.assert_close(
        landscape(loss, k, points, **options), landscape(loss, k, mirrored(points), **options)
    )


@pytest.mark.parametrize(("k", "margin"), [(1, 2.0), (2, 1.0)])
def test_noise_tends_to_its_expectation(k, margin):
    points = simplex(4)
    options = {"epsilon": 0.3, "margin": margin}
    exact = landscape("noised", k, points, samples=None, **options)
    errors = [
        (landscape("noised", k, points, samples=samples, **options) - exact).abs().max()
        for samples in (1, 4_000)
    ]
    assert errors[1] < 0.03 < errors[0]
    calm = landscape("noised", k, points, epsilon=1e-6, samples=None)
    torch.testing.assert_close(calm, landscape("calibrated-hinge", k, points), atol=1e-5, rtol=0)


def test_a_rare_class_has_a_larger_margin():
    for margin in (1.0, 2.0):
        options = {"epsilon": 0.0, "samples": None, "margin": margin}
        assert at("noised", 1, 1.5, 0.5, 0.0, **options) == pytest.approx(margin + 0.5)


def test_a_constant_is_rescaled_to_zero():
    assert (rescaled(torch.full((3,), 2.0)) == 0).all()
    assert packed(torch.zeros(3, dtype=torch.float64))["values"] == "0 0 0"


def test_the_record(record, tmp_path):
    assert list(record) == list(RECORD)
    assert {(row["figure"], row["k"]) for row in record["rows"]} == {
        ("1", 2), ("6", 1), ("4", 1), ("4", 2), ("5", 1), ("5", 2)
    }  # fmt: skip
    assert len(record["rows"]) == 20 + 8 + 16
    points = len(simplex(record["protocol"]["grid"]))
    for row in record["rows"]:
        values = unpacked(row)
        assert values.shape == (points,)
        assert (values.min(), values.max()) == (0, 1), row
    exact = next(row for row in record["rows"] if row["loss"] == SMOOTH and row["tau"] == 1)
    expected = landscape(SMOOTH, exact["k"], simplex(record["protocol"]["grid"]), tau=1.0)
    back = exact["low"] + unpacked(exact) * (exact["high"] - exact["low"])
    torch.testing.assert_close(back, expected, atol=1e-3, rtol=0)
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    assert load_record(path) == record


def test_the_same_twice(record, tmp_path):
    assert EXPERIMENT.run(Request("smoke", tmp_path))["rows"] == record["rows"]


def test_figures_are_made_from_the_record_alone(record, tmp_path, monkeypatch):
    assert list(level_sets_figures.TITLES) == list("1645")
    monkeypatch.setattr(level_sets_figures, "TITLES", {"1": "Figure 1"})
    (drawn,) = EXPERIMENT.draw(json.loads(json.dumps(record)), tmp_path / "figures")
    assert drawn.name == "level-sets-figure-1.svg"
    text = drawn.read_text()
    assert "calibrated hinge" in text
    assert EXPERIMENT.show(record)[0].row_count == len(record["rows"])


def test_the_panels_that_the_papers_caption_names():
    assert all(o["epsilon"] == 1 for f, _, _, o in panels() if f == "4")
    assert {o["samples"] for f, _, _, o in panels() if f == "5"} == {50, None}
