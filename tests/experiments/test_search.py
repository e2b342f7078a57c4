"""Cases as an axis, and learning rates that are chosen by validation before the tables."""

import json

import pytest
from case_plans import case_plan, case_text, write
from toy_plans import cells, write_toys

from experiments import training as training_module
from experiments.experiment import Request, load_record
from experiments.grid import planned_runs
from experiments.search import choose, search_table
from experiments.training import TrainingExperiment

SEARCHED = [
    f"{method},{case},learning_rate={rate},seed=0"
    for case in ("subset=12", "subset=12,noise=0.4,noise_kind=block")
    for rate in (0.1, 0.2)
    for method in ("cross-entropy", "smooth", "focal")
]
CHOSEN = {
    "cross-entropy": {"clean": 0.2, "few": 0.2},
    "smooth": {"clean": 0.1, "few": 0.1},
    "focal": {"clean": 0.2, "few": 0.2},
}


@pytest.fixture
def data(tmp_path):
    return write_toys(tmp_path / "toys.npz")


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """Training that takes no time; the names of runs, in order. A rate of 0.2 is better, but
    for the smooth loss."""
    order = []

    def train(recipe, folder, **_):
        order.append(folder.name)
        better = (recipe.learning_rate == 0.2) != (recipe.loss == "smooth")
        right = 0.5 + 0.2 * better + 0.1 * recipe.seed
        write_run_in(folder, recipe, right)

    def write_run_in(folder, recipe, right):
        (run,) = [each for each in every() if each.name == folder.name]
        write(folder.parent, run, right)
        result = json.loads((folder / "result.json").read_text())
        result["test_last"] = {
            average: {str(k): k / 10 for k in range(1, 7)} for average in ("micro", "macro")
        }
        (folder / "result.json").write_text(json.dumps(result))

    def every():
        found = planned_runs(case_plan(), "paper", tmp_path / "toys.npz", CHOSEN)
        return {run.name: run for run in found}.values()

    monkeypatch.setattr(training_module, "train", train)
    monkeypatch.setattr(training_module, "result_line", str)
    return order


def test_cases_are_bundles_of_settings():
    runs = planned_runs(case_plan(), "paper")
    assert [run.name for run in runs[:12]] == SEARCHED
    by_case = {run.case: run.recipe for run in runs}
    assert (by_case["clean"].subset, by_case["few"].subset) == (None, 12)
    assert by_case["long tail"].average == "macro"
    assert runs[0].row["case"] == "few"
    text = case_text().replace(
        "smoke: {settings:", "smoke: {cases: {clean: {subset: 7}}, settings:"
    )
    assert {run.recipe.subset for run in planned_runs(case_plan(text), "smoke")} == {7}


def test_a_search_goes_before_the_grids():
    plan = case_plan()
    runs = planned_runs(plan, "paper")
    assert [run.search for run in runs] == [True] * 12 + [False] * (len(runs) - 12)
    assert {run.case for run in runs if run.waits} == {"clean", "few"}
    fixed = case_text().replace("{loss: focal}", "{loss: focal, learning_rate: 0.3}")
    focal = [run for run in planned_runs(case_plan(fixed), "paper") if run.method == "focal"]
    assert {(run.search, run.waits, run.recipe.learning_rate) for run in focal} == {
        (False, False, 0.3)
    }
    assert all("learning_rate" not in run.row["settings"] for run in runs if run.waits)
    # clean and long tail; then clean and few: each of three methods; few was searched
    chosen = planned_runs(plan, "paper", chosen=CHOSEN)
    assert len(chosen) == len(runs) == 12 + 3 * 2 + 3 * 2
    assert not any(run.waits for run in chosen)
    rates = {(r.method, r.case): r.recipe.learning_rate for r in chosen if not r.search}
    assert rates["cross-entropy", "clean"] == 0.2
    assert rates["smooth", "clean"] == rates["cross-entropy", "long tail"] == 0.1
    some = planned_runs(plan, "paper", chosen={**CHOSEN, "smooth": {"few": 0.2}})
    assert {(run.method, run.case) for run in some if run.waits} == {("smooth", "clean")}


def row(method, case, rate, right, seed=0):
    validation = {"1": 0.1, "2": right}
    settings = {"learning_rate": rate}
    where = {"method": method, "case": case, "seed": seed, "settings": settings}
    return {**where, "validation": validation}


def test_the_best_mean_over_cases_is_chosen():
    rows = [
        row("cross-entropy", "few", 0.1, 0.9),
        row("cross-entropy", "few", 0.2, 0.5),
        row("cross-entropy", "noisy, few", 0.1, 0.1),
        *(row("smooth", case, rate, 0.4) for case in ("few", "noisy, few") for rate in (0.1, 0.2)),
        row("cross-entropy", "noisy, few", 0.2, 0.99, seed=1),  # not a seed of the search
        *(row("focal", case, 0.2, 0.9) for case in ("few", "noisy, few")),
        *(row("focal", case, 0.1, 0.8) for case in ("few", "noisy, few")),
    ]
    plan, protocol = case_plan(), {"k": 2}
    known = {method: CHOSEN[method] for method in ("smooth", "focal")}
    assert choose(plan, "paper", protocol, rows) == known  # of equal ones the first
    rows.append(row("cross-entropy", "noisy, few", 0.2, 0.6))
    assert choose(plan, "paper", protocol, rows) == CHOSEN
    rows[-1] = row("cross-entropy", "noisy, few", 0.2, 0.4)
    assert choose(plan, "paper", protocol, rows)["cross-entropy"] == {"clean": 0.1, "few": 0.1}


def test_all_runs_of_tables_have_the_chosen_rate(data, tmp_path, trained):
    experiment = TrainingExperiment(case_plan())
    record = experiment.run(Request("paper", tmp_path / "runs", data))
    assert trained[:12] == SEARCHED
    assert record["chosen"] == CHOSEN
    assert len(trained) == len(set(trained)) == experiment.runs("paper") == len(record["rows"])
    assert not record["not_run"]
    assert trained[12] == "cross-entropy,learning_rate=0.2,seed=0"
    shown = cells(experiment, record, 0)
    # seeds 0 and 1 with the chosen rate alone, though 0.1 was tried, too
    assert shown["few", "cross-entropy"] == ["75.00 ± 7.07 (2)"]
    assert shown["long tail", "smooth"] == ["70.00 (1)"]
    assert {case for case, _ in shown} == {"clean", "few", "long tail"}  # not that of the search
    last = cells(experiment, record, 1)
    assert last["smooth", "last top-2"] == ["20.00 ± 0.00 (2)"]
    assert last["smooth", "last macro top-1"] == ["10.00 ± 0.00 (2)"]
    rates = search_table(experiment.plan, record)
    assert [list(column.cells) for column in rates.columns] == [
        ["cross-entropy", "smooth", "focal"],
        ["few; noisy, few"] * 3,
        ["50.00", "70.00\xa0◀", "50.00"],
        ["70.00\xa0◀", "50.00", "70.00\xa0◀"],
    ]
    again = experiment.run(Request("paper", tmp_path / "runs", data))
    assert again == record
    assert len(trained) == len(record["rows"])


def test_a_search_in_parts(data, tmp_path, trained):
    """The same runs in the same order; the record alone is enough to go on."""
    experiment = TrainingExperiment(case_plan())
    folders = [tmp_path / str(number) for number in range(5)]
    for number, folder in enumerate(folders):
        if number:
            folder.mkdir()
            text = (folders[number - 1] / "toy-paper.json").read_text()
            (folder / "toy-paper.json").write_text(text)
        record = experiment.run(Request("paper", folder, data, most=5))
        if number == 0:
            assert record["chosen"] == {}
            assert set(cells(experiment, record, 0)["clean", "cross-entropy"]) == {"not run"}
    whole = list(trained)
    assert not record["not_run"]
    trained.clear()
    assert experiment.run(Request("paper", tmp_path / "whole", data))["rows"] == record["rows"]
    assert trained == whole


def test_a_changed_plan_keeps_rows(data, tmp_path, trained):
    """Rates that are no longer tried stay in the record; cases may get other names."""
    whole = TrainingExperiment(case_plan()).run(Request("paper", tmp_path / "runs", data))
    text = case_text().replace("few", "small").replace("rate: [0.1, 0.2]", "rate: [0.1]")
    record = TrainingExperiment(case_plan(text)).begin("paper", tmp_path / "runs")
    assert {each["run"] for each in record["rows"]} == {each["run"] for each in whole["rows"]}
    assert {r for each in record["chosen"].values() for r in each.values()} == {0.1}
    cases = {each["run"]: each["case"] for each in record["rows"]}
    assert cases[SEARCHED[0]] == "small"


def test_a_failed_search_does_not_stop_other_methods(data, tmp_path, trained, monkeypatch):
    train = training_module.train

    def failing(recipe, folder, **more):
        if folder.name == SEARCHED[0]:
            raise RuntimeError("the disk is full")
        train(recipe, folder, **more)

    monkeypatch.setattr(training_module, "train", failing)
    experiment = TrainingExperiment(case_plan())
    with pytest.raises(ChildProcessError, match="1 of 12 runs failed"):
        experiment.run(Request("paper", tmp_path / "runs", data))
    record = load_record(tmp_path / "runs" / "toy-paper.json")
    assert set(record["chosen"]) == {"smooth", "focal"}
    assert {each["method"] for each in record["not_run"]} == {"cross-entropy"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("few: {subset: 12}", "few: {subsett: 12}", "a recipe has no 'subsett'"),
        ("case: [clean, few, long", "case: [clear, few, long", "case 'clear'.*mean 'clean'"),
        ('&few [few, "noisy', '&few [fw, "noisy', "search names the case 'fw'"),
        ("cases: {few:", "cases: {fuw:", "search names the case 'fuw'"),
        ("cases: {few: &few [few,", "case: {few: &few [few,", "search has 'case'"),
        ("clean: *few}", "clean: few}", "must have a list of cases, got 'few'"),
        ("learning_rate: [0.1, 0.2]", "learning_rate: 0.1", "learning_rate must be a list"),
        ("clean, few], seeds", "clean, few], learning_rate: 0.3, seeds", "leave it out of the gri"),
        ("where: {case: few}", "where: {casus: few}", "a recipe has no 'casus'"),
        ("few: {subset: 12}", "few: {noise: 0.0}", "'few' and 'clean' have the same"),
    ],
)
def test_bad_cases_and_searches(old, new, message):
    text = case_text()
    assert old in text
    with pytest.raises(ValueError, match=message):
        planned_runs(case_plan(text.replace(old, new, 1)), "paper")
