"""Gains over a method: paired by case and seed, with one spread for all cells."""

from math import sqrt

import pytest
from case_plans import case_plan, case_text
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from experiments.cells import Results
from experiments.experiment import Record
from experiments.gains import Gain, Gains, gain_text, gains_table
from experiments.gains_figure import colours, gains_figure
from experiments.grid import planned_runs
from experiments.training import TrainingExperiment

CHOSEN = {
    method: dict.fromkeys(("clean", "few"), rate)
    for method, rate in (("cross-entropy", 0.2), ("smooth", 0.1), ("focal", 0.1))
}
PART = {"title": "gains", "against": "cross-entropy", "rows": "case", "columns": "method"}
PART |= {
    "metrics": ["test top-2"],
    "beside": {"method": "cross-entropy", "metric": "training top-1"},
}


def record_of(numbers: dict[tuple[str, str, int], float]) -> Record:
    """A record with these shares as top-2 by method, case and seed; top-1 is a half of them.

    Macro averages are 10 points less, accuracies of the last weights 20 points less.
    """
    experiment = TrainingExperiment(case_plan())
    record = experiment.begin("paper")
    runs = planned_runs(experiment.plan, "paper", chosen=CHOSEN)
    record["chosen"], record["rows"] = CHOSEN, []
    for run in runs:
        share = numbers.get((run.method, run.case, run.seed))
        if share is None:
            continue
        if run.recipe.learning_rate != CHOSEN[run.method].get(run.case, 0.1):
            share = 0.0  # a run of the search alone
        tests = {
            name: {
                average: [share / 2 - less - more, share - less - more]
                for average, less in (("micro", 0.0), ("macro", 0.1))
            }
            for name, more in (("test", 0.0), ("test_last", 0.2))
        }
        more = {"training": {"1": 0.9, "2": 0.95}, "validation": {"1": 0.5, "2": share}}
        record["rows"].append({**run.row, **tests, **more})
    done = [row["run"] for row in record["rows"]]
    record["not_run"] = [run.row for run in runs if run.name not in done]
    return record


FULL = {
    ("cross-entropy", "clean", 0): 0.50,
    ("cross-entropy", "clean", 1): 0.60,
    ("smooth", "clean", 0): 0.53,
    ("smooth", "clean", 1): 0.65,
    ("focal", "clean", 0): 0.49,
    ("focal", "clean", 1): 0.59,
    ("cross-entropy", "few", 1): 0.20,
    ("smooth", "few", 0): 0.90,  # without cross-entropy of that seed
    ("smooth", "few", 1): 0.21,
    ("cross-entropy", "long tail", 0): 0.30,
    ("smooth", "long tail", 0): 0.36,
}
DIFFERENCES = {
    ("clean", "smooth"): [3, 5],
    ("clean", "focal"): [-1, -1],
    ("few", "smooth"): [1],
    ("long tail", "smooth"): [6],
}


@pytest.fixture
def results():
    return Results(case_plan(), record_of(FULL))


def test_gains_are_paired_by_case_and_seed(results):
    gains = Gains(results, "cross-entropy", "test top-2")
    assert {cell: pytest.approx(found) for cell, found in gains.differences.items()} == DIFFERENCES
    # deviations of [3, 5] and [-1, -1], one degree of freedom each: variance (2 + 0) / 2
    assert gains.spread.std == pytest.approx(1)
    assert gains.spread.freedom == 2
    assert gains.gain("clean", "smooth") == pytest.approx((4, 1 / sqrt(2), 2))
    assert gains.gain("few", "smooth") == pytest.approx((1, 1, 1))
    assert gains.gain("clean", "cross-entropy") is None
    assert gains.gain("few", "focal") is None
    other = Gains(results, "focal", "test top-2")
    assert other.differences["clean", "cross-entropy"] == pytest.approx([1, 1])


def test_a_case_has_its_own_average():
    record = record_of(FULL)
    for row in record["rows"]:
        if (row["method"], row["case"]) == ("smooth", "long tail"):
            row["test"]["macro"][1] = 0.5
    for metric, gain in (("test top-2", 30), ("last top-2", 6)):
        gains = Gains(Results(case_plan(), record), "cross-entropy", metric)
        assert gains.gain("long tail", "smooth").mean == pytest.approx(gain)
        assert gains.gain("clean", "smooth").mean == pytest.approx(4)


def test_marks_need_two_standard_errors():
    assert [Gain(mean, 0.5, 2).mark for mean in (1.01, 1.0, -1.0, -1.01)] == ["▲", "", "", "▼"]
    assert Gain(9.0, None, 1).mark == ""
    assert gain_text(Gain(-1.01, 0.5, 2)).replace("\xa0", " ") == "−1.01 ± 0.50 (2) ▼"


def lines(table):
    cells = zip(*(column.cells for column in table.columns), strict=True)
    return [[cell.replace("\xa0", " ") for cell in row] for row in cells]


def test_a_table_of_gains(results):
    table = gains_table(results, PART)
    heads = [column.header for column in table.columns]
    assert heads == ["data", "cross-entropy, training top-1", "smooth", "focal"]
    assert lines(table) == [
        ["clean", "90.0", "+4.00 ± 0.71 (2) ▲", "−1.00 ± 0.71 (2)"],
        ["few", "90.0", "+1.00 ± 1.00 (1)", "not run"],
        ["long tail", "90.0", "+6.00 ± 1.00 (1) ▲", "not run"],
    ]
    assert "pooled over all cells, 2 degrees of freedom" in table.caption
    part = {**PART, "rows": "method", "columns": None, "where": {"case": "clean"}, "note": "Last."}
    part |= {"beside": None, "metrics": ["test top-1", "last top-2"]}
    assert lines(gains_table(results, part)) == [
        ["smooth", "+2.00 ± 0.35 (2) ▲", "+4.00 ± 0.71 (2) ▲"],
        ["focal", "−0.50 ± 0.35 (2)", "−1.00 ± 0.71 (2)"],
    ]
    assert gains_table(results, part).caption.endswith(" Last.")


def test_one_seed_has_no_error():
    record = record_of({cell: share for cell, share in FULL.items() if cell[2] == 0})
    table = gains_table(Results(case_plan(), record), PART)
    assert lines(table)[0] == ["clean", "90.0", "+3.00 (1)", "−1.00 (1)"]
    assert "No cell has two seeds" in table.caption


def test_a_figure_of_gains(results, tmp_path):
    part = {**PART, "metrics": ["test top-1", "test top-2"], "file": "gains"}
    figure = gains_figure(results, part)
    axes = figure.axes[0]
    assert isinstance(axes, Axes)
    points = {
        (round(float(x), 5), round(float(y), 5)): to_hex(bars.lines[0].get_color())
        for bars in axes.containers
        for x, y in [bars.lines[0].get_xydata()[0]]
    }
    chosen = colours(results.plan, ["smooth", "focal"])
    assert points == {
        (2, 4): chosen["smooth"],
        (0.5, 1): chosen["smooth"],
        (3, 6): chosen["smooth"],
        (-0.5, -1): chosen["focal"],
    }
    assert {text.get_text() for text in axes.texts} == {
        "gains both",
        "gains top-2 only",
        "gains neither",
        "gains top-1 only",
    }
    assert gains_figure(Results(case_plan(), record_of({})), part) is None
    text = case_text() + "figures: [{file: gains, title: gains, against: cross-entropy, metrics: "
    text += "[test top-1, test top-2]}]\n"
    experiment = TrainingExperiment(case_plan(text))
    drawn = [path.name for path in experiment.draw(results.record, tmp_path)]
    assert drawn == ["toy-gains.svg"]


def test_all_quadrants_have_room_for_their_names():
    """Also if all points are in one of them."""
    numbers = {cell: share for cell, share in FULL.items() if cell[0] != "focal"}
    part = {**PART, "metrics": ["test top-1", "test top-2"]}
    axes = gains_figure(Results(case_plan(), record_of(numbers)), part).axes[0]
    for low, high in (axes.get_xlim(), axes.get_ylim()):
        assert -low > 0.15 * (high - low)


def test_methods_of_one_loss_have_different_colours():
    text = case_text().replace("  focal: {loss: focal}", "  focal: {loss: smooth, tau: 0.5}")
    chosen = colours(case_plan(text), ["smooth", "focal", "cross-entropy"])
    assert len(set(chosen.values())) == 3


@pytest.mark.parametrize(
    ("kind", "part", "message"),
    [
        ("tables", "rows: case, metrics: [test top-1], against: smoth", "method 'smoth'"),
        ("tables", "rows: case, metrics: [test top-1], against: smooth", "must have method and ca"),
        (
            "tables",
            "rows: case, columns: method, metrics: [test top-1], against: smooth, "
            "beside: {method: smooth}",
            "beside lacks metric",
        ),
        ("figures", "file: a, against: smooth, metrics: [test top-1]", "must have two metrics"),
    ],
)
def test_bad_parts(kind, part, message):
    text = case_text().split("tables:")[0] + "tables: []\n"
    with pytest.raises(ValueError, match=message):
        case_plan(text.replace(f"{kind}: []\n", "") + f"{kind}: [{{title: a, {part}}}]\n")
