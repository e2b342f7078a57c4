"""Files of experiments: what they say is what the papers say, grids are whole, runs are once."""

import re
import shlex

import pytest
from toy_plans import TOY, toy_plan
from typer.main import get_command

from experiments.__main__ import app
from experiments.catalogue import EXPERIMENTS
from experiments.experiment import PRESETS
from experiments.grid import planned_runs, protocol_of, run_name
from experiments.metrics import parse_metric, value
from experiments.plan import RECIPES, load_plan, parse_plan
from experiments.published import published_numbers, quoted
from experiments.training import TrainingExperiment

NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))

BERRADA_1 = """
0.0 76.68 69.33 94.34 94.29
0.2 68.20 71.30 87.89 90.59
0.4 61.18 70.02 83.04 87.39
0.6 52.50 67.97 79.59 83.86
0.8 35.53 55.85 74.80 79.32
1.0 14.06 15.28 67.70 72.93
"""
BERRADA_9 = """
0.0 0.38 0.27 0.09 0.10
0.2 0.50 0.79 0.08 0.08
0.4 0.97 0.40 0.38 0.23
0.6 0.27 0.51 0.36 0.39
0.8 0.79 0.80 0.15 0.25
1.0 0.13 0.39 0.16 0.25
"""
GARCIN_4 = """
0.0 94.24 94.34 94.35
0.1 90.39 92.08 92.03
0.2 87.67 90.22 90.68
0.3 85.93 88.82 89.58
0.4 83.74 87.40 87.48
"""
GARCIN_6 = """
0.0 76.56 69.23 68.74
0.1 71.01 71.52 68.43
0.2 68.19 71.59 69.34
0.3 65.61 70.44 69.11
0.4 61.9 70.42 69.44
"""
GARCIN_5 = """
1 35.91 nan 35.44 37.87 40.54 42.36
3 58.91 50.41 59.06 59.96 63.50 64.77
5 69.05 50.71 66.97 69.91 72.23 72.95
10 78.08 46.23 76.08 78.88 80.69 80.85
"""
GARCIN_7 = """
1 79.93 nan 81.00 79.71 79.49 80.90
3 93.19 93.20 93.56 93.56 92.40 93.45
5 95.75 94.91 95.84 96.10 95.22 95.80
10 97.42 95.46 97.52 97.72 97.21 97.52
"""
CIFAR = ("densenet40-40-bc", 300, 64, 0.1, 1e-4, [150, 225])
PROTOCOLS = {
    "cifar100-noise": (CIFAR, set()),
    "cifar100-temperature": (("densenet40-12", *CIFAR[1:]), {"τ = 0"}),
    "cifar100-epsilon": (CIFAR, {"first epoch"}),
    "cifar100-samples": (CIFAR, set()),
    "longtail": (CIFAR, set()),
    "review": (CIFAR, set()),
    "which-loss": (CIFAR, set()),
    "loss-search": None,
    "learning-rates": None,
    "longtail-characters": None,
    "small-epsilon": None,
    "small-network": None,
    "which-loss-text": None,
    "which-loss-banking": None,
    "loss-search-text": None,
    "imagenet-subsets": (
        ("resnet18", 120, 256, 0.1, 1e-4, [30, 60, 90]),
        {"smooth", "smooth, margin 0"},
    ),
    "plantnet": (("resnet50", 30, 32, 2e-3, 1e-4, [20, 25]), set()),
}
"""Network, epochs, batch, learning rate, weight decay, epochs of steps; and who has others. None
for experiments that repeat no paper."""
SIX_LOSSES = {
    "cross-entropy": {"loss": "cross-entropy"},
    "smooth": {"loss": "smooth", "tau": 0.1},
    "noised": {"loss": "noised", "epsilon": 1.0, "samples": 5},
    "focal": {"loss": "focal", "gamma": 2.0},
    "LDAM": {"loss": "ldam", "margin": 0.2, "scale": 40.0, "head": "cosine"},
    "noised imbalanced": {
        "loss": "noised-imbalanced",
        "epsilon": 0.01,
        "samples": 5,
        "margin": 0.2,
        "scale": 60.0,
        "head": "cosine",
    },
}
OPTIONS = ("loss", "tau", "epsilon", "samples", "margin", "scale", "gamma", "head")


def numbers(text: str) -> list[list[float]]:
    return [[float(word) for word in line.split()] for line in text.strip().splitlines()]


def found(name: str, source: str, metric: str) -> dict[tuple[str, float], tuple[float, float]]:
    """Value and deviation by method and by the setting of the table."""
    return {
        (each.method, next((v for n, v in each.settings.items() if n != "noise_kind"), None)): (
            each.value,
            each.std,
        )
        for each in published_numbers(load_plan(name))
        if each.source.startswith(source) and each.metric == metric
    }


def test_berrada_tables_1_and_9():
    table = {}
    for means, stds in zip(numbers(BERRADA_1), numbers(BERRADA_9), strict=True):
        columns = [(m, k) for k in (1, 5) for m in ("cross-entropy", "smooth")]
        for (method, k), mean, std in zip(columns, means[1:], stds[1:], strict=True):
            table[method, k, means[0]] = (mean, std)
    for k in (1, 5):
        mine = {key: each for key, each in table.items() if key[1] == k}
        there = found("cifar100-noise", "Berrada", f"test top-{k}")
        assert {(method, k, p): each for (method, p), each in there.items()} == mine
    assert len(table) == 24


def test_garcin_tables():
    methods = ("cross-entropy", "smooth", "noised")
    there = found("cifar100-noise", "Garcin 2022, Table 4", "test top-5")
    for p, *shares in numbers(GARCIN_4):
        assert [there[method, p][0] for method in methods] == shares
    there = found("cifar100-noise", "Garcin 2022, Table 6", "test top-1")
    for p, *shares in numbers(GARCIN_6):
        assert [there[method, p][0] for method in methods] == shares
    methods = (*methods, "focal", "LDAM", "noised imbalanced")
    for source, metric, text in (
        ("Garcin 2022, Table 5", "test macro top-k", GARCIN_5),
        ("Garcin 2022, Table 7", "test top-k", GARCIN_7),
    ):
        there = found("plantnet", source, metric)
        for k, *shares in numbers(text):
            for method, share in zip(methods, shares, strict=True):
                assert there.get((method, k), (None,))[0] == (share if share == share else None)
        assert len(there) == 23
    there = found("cifar100-epsilon", "Garcin 2022, Table 2", "validation top-5")
    assert [each[0] for each in there.values()] == [
        *(19.38, 14.84, 11.4, 93.36, 94.46, 94.24, 93.78, 93.12)
    ]
    assert there["noised", 1e-3][0] == 11.4
    there = found("cifar100-samples", "Garcin 2022, Table 3", "validation top-5")
    assert [each[0] for each in there.values()] == [94.28, 94.2, 94.46, 94.52, 94.24, 94.64, 94.52]


def test_berrada_other_tables():
    there = found("imagenet-subsets", "Berrada 2018, Table 2", "ten-crop top-5")
    sizes = (None, 640_000, 320_000, 128_000, 64_000)
    shares = [there["cross-entropy", size][0] for size in sizes]
    assert shares == [90.67, 87.57, 82.62, 71.06, 58.31]
    assert [there["smooth", size][0] for size in sizes] == [90.61, 87.87, 83.38, 73.10, 60.44]
    there = found("imagenet-subsets", "Berrada 2018, Table 7", "validation top-1")
    assert [there[f"top-1, margin {m}", None][0] for m in (0, 1)] == [71.03, 71.15]
    there = found("imagenet-subsets", "Berrada 2018, Table 8", "validation top-5")
    assert [there[name, None][0] for name in ("smooth, margin 0", "smooth")] == [89.12, 89.45]
    tested = found("cifar100-temperature", "Berrada 2018, Table 6", "test top-5")
    assert [each[0] for each in tested.values()] == [
        *(10.38, 18.19, 91.35, 91.70, 91.52, 90.92, 90.46)
    ]
    trained = found("cifar100-temperature", "Berrada 2018, Table 6", "training top-5")
    assert [each[0] for each in trained.values()] == [
        *(10.01, 17.40, 98.95, 99.73, 99.78, 99.62, 99.42)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_files_open_with_a_command(name):
    first = (RECIPES / f"{name}.yaml").read_text().splitlines()[0]
    python, option, program, *words = shlex.split(first.removeprefix("# "))
    assert (python, option, program) == ("python", "-m", "experiments")
    given = get_command(app).make_context(program, words).params
    assert given["name"] == name
    assert given["name"] in EXPERIMENTS
    assert given["preset"] in PRESETS
    own = "data" in load_plan(name).presets[given["preset"]].settings
    assert (given["data"] is None) == own
    docs = RECIPES.parents[1] / "docs"
    pages = [(docs / page).read_text("utf-8") for page in ("reproduction.md", "experiments.md")]
    assert any(f"    {first.removeprefix('# ')}\n" in page for page in pages)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", NAMES)
def test_all_grids_are_recipes(name, preset):
    runs = planned_runs(load_plan(name), preset)
    assert runs
    folders = {run.name: repr(run.recipe) for run in runs}
    assert len({*folders.values()}) == len(folders)
    assert all(re.fullmatch(r"[\w\-.,=]+", each) for each in folders)
    common = protocol_of(runs)
    assert not {"data", "seed", "workers", *runs[0].settings} & {*common}
    assert {run.recipe.data for run in runs} in ({"glyphs"}, {"made-up"})


def test_every_published_number_can_be_run_by_the_papers_protocol():
    for name, experiment in EXPERIMENTS.items():
        if not isinstance(experiment, TrainingExperiment):
            continue
        runs = planned_runs(experiment.plan, "paper")
        common = protocol_of(runs)
        for number in published_numbers(experiment.plan):
            same = [
                run
                for run in runs
                if run.method == number.method
                and quoted([number], run.method, {**common, **run.settings}, number.metric)
            ]
            assert same, (name, number)


@pytest.mark.parametrize("name", [name for name in NAMES if PROTOCOLS[name]])
def test_protocols_of_all_papers_presets(name):
    expected, others = PROTOCOLS[name]
    runs = planned_runs(load_plan(name), "paper")
    for run in runs:
        r = run.recipe
        steps = [round(r.epochs * share, 5) for share in r.milestones]
        found = (r.model, r.epochs, r.batch_size, r.learning_rate, r.weight_decay, steps)
        assert (found == expected) == (run.method not in others), run.name
        assert r.schedule == ("constant" if run.method == "first epoch" else "steps")
        assert (r.momentum, r.ema, r.cutmix, r.precision) == (0.9, None, 0, "32-true")
    assert others <= {run.method for run in runs}


def options(name: str) -> dict[str, dict[str, object]]:
    """What the paper's protocol tells losses, by method."""
    return {
        run.method: {
            option: getattr(run.recipe, option)
            for option in OPTIONS
            if getattr(run.recipe, option) not in (None, "linear")
        }
        for run in planned_runs(load_plan(name), "paper")
    }


def test_parameters_of_losses():
    assert options("plantnet") == options("longtail") == SIX_LOSSES
    noised = {"loss": "noised", "epsilon": 0.2}
    assert options("cifar100-noise") == {
        "cross-entropy": {"loss": "cross-entropy"},
        "smooth": {"loss": "smooth", "tau": 1.0},
        "noised": {**noised, "samples": 10},
        "noised exact": {**noised, "samples": 0},
    }
    samples = planned_runs(load_plan("cifar100-samples"), "paper")
    assert {run.recipe.epsilon for run in samples} == {0.2}
    assert [run.recipe.samples for run in samples] == [1, 2, 3, 5, 10, 50, 100, 0]
    epsilons = planned_runs(load_plan("cifar100-epsilon"), "paper")
    assert {(run.method, run.recipe.samples) for run in epsilons} == {
        ("noised", 10),
        ("first epoch", 3),
    }
    for run in planned_runs(load_plan("cifar100-temperature"), "paper")[1:]:
        assert run.method == f"τ = {run.recipe.tau:g}"


def test_protocols_of_the_papers():
    recipe = planned_runs(load_plan("cifar100-noise"), "paper")[1].recipe
    assert (recipe.validation, recipe.pad, recipe.flip) == (5000, 4, True)
    assert (recipe.loss, recipe.tau, recipe.match) == ("smooth", 1.0, False)
    recipes = {
        run.method: run.recipe for run in planned_runs(load_plan("imagenet-subsets"), "paper")
    }
    smooth = recipes["smooth"]
    assert (smooth.learning_rate, smooth.weight_decay, smooth.tau) == (1.0, 2.5e-5, 0.1)
    base = recipes["cross-entropy"]
    assert base.validation == 50_000
    recipes = {run.method: run.recipe for run in planned_runs(load_plan("plantnet"), "paper")}
    for recipe in recipes.values():
        assert (recipe.average, recipe.pretrained, recipe.flip) == ("macro", True, False)
    hinge = planned_runs(load_plan("cifar100-temperature"), "paper")[0].recipe
    assert (hinge.loss, hinge.margin) == ("hinge", hinge.k)
    smooth = planned_runs(load_plan("cifar100-temperature"), "paper")[1].recipe
    assert hinge.learning_rate == pytest.approx(smooth.learning_rate / hinge.k)
    assert hinge.weight_decay == pytest.approx(smooth.weight_decay * hinge.k)


def test_a_grid_is_a_product_without_repetition():
    runs = planned_runs(toy_plan(), "paper")
    # without noise its kind is none: (1 + 2) problems, 2 methods, 2 seeds; one more seed at last
    assert len(runs) == 3 * 2 * 2 + 1
    assert [run.name for run in runs][:4] == [
        "cross-entropy,noise=0,seed=0",
        "smooth,noise=0,seed=0",
        "cross-entropy,noise=0.5,noise_kind=block,seed=0",
        "smooth,noise=0.5,noise_kind=block,seed=0",
    ]
    assert runs[-1].name == "smooth,noise=0.5,noise_kind=block,seed=2"
    assert {run.seed for run in runs[:6]} == {0}
    assert [run.recipe.learning_rate for run in runs[:2]] == [0.1, 0.5]
    assert set(runs[0].settings) == {"noise", "noise_kind", "loss", "tau", "learning_rate"}
    assert protocol_of(runs)["model"] == "resnet18"


def test_methods_that_come_to_the_same_train_once():
    text = TOY.replace("  smooth: {loss", "  again: {loss: cross-entropy}\n  smooth: {loss", 1)
    runs = planned_runs(toy_plan(text), "fast")
    assert [run.method for run in runs] == ["cross-entropy", "again", "smooth"]
    assert runs[0].name == runs[1].name != runs[2].name


def test_names_of_runs():
    assert run_name("smooth, margin 0", {"subset": None}, 0) == "smooth-margin-0,subset=none,seed=0"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("title: a toy", "title: [a", "toy.yaml is not YAML"),
        ("title: a toy", "titel: a toy", r"'titel'. Did you mean 'title'\?"),
        ("papers: [Someone 2018, Table 1]", "", "toy.yaml lacks papers"),
        ("get: toys.zip from the shop", "", "data lacks get"),
        ("always: {k: 2", "always: {kk: 2", "a recipe has no 'kk'"),
        ("methods: [smooth], seeds: [0, 2]", "methods: [smoth]", "Did you mean 'smooth'"),
        ("{noise: 0.5, noise_kind", "{noize: 0.5, noise_kind", "a recipe has no 'noize'"),
        ("methods: {smooth: {learning_rate", "methods: {smoth: {learning_rate", "'smoth'"),
        ("smoke: {settings", "smokey: {settings", "must have the presets"),
        ("metrics: [test top-2]", "metrics: [test top2]", "unknown metric 'test top2'"),
        ("rows: noise", "rows: noize", "a recipe has no 'noize'"),
        (
            "x: noise, metric: test top-2",
            "x: noise",
            "must have x and metric, or a curve, or against",
        ),
        ("curve: train/top2", "curve: train/top3", "not among curves"),
        ("smooth: {0.5: 60.0", "smoth: {0.5: 60.0", "names the method 'smoth'"),
    ],
)
def test_bad_files(old, new, message):
    assert old in TOY
    with pytest.raises(ValueError, match=message):
        parse_plan("toy", TOY.replace(old, new, 1))


def test_a_file_of_something_else():
    with pytest.raises(ValueError, match=r"toy.yaml must hold `name: value`, got \[1, 2\]"):
        parse_plan("toy", "[1, 2]")


def test_metrics():
    row = {
        "test": {"micro": [0.1, 0.2, 0.3], "macro": [0.2, 0.3, 0.4]},
        "validation": {"1": 0.5, "2": 0.6},
        "training": {"1": 0.7},
        "gradient": [0.25, 0.5],
        "classes": 8,
        "curves": {"train/pushed": [7.0, 6.0, 5.0]},
    }
    assert value(row, 2, "test top-k") == 20
    assert value(row, 2, "test macro top-3") == 40
    assert value(row, 2, "test top-4") is None
    assert value(row, 2, "validation top-k") == 60
    assert value(row, 2, "training top-2") is None
    assert value(row, 2, "ten-crop top-2") is None
    assert value({**row, "views": {"marginals": 0.9}}, 2, "ten-crop top-2") == 90
    assert value({**row, "views": {"marginals": 0.9}}, 2, "ten-crop top-1") is None
    assert value(row, 2, "non-zero gradients") == 2
    assert value(row, 2, "classes pushed down, first epoch") == 7
    assert value(row, 2, "classes pushed down, last epoch") == 5
    assert value(row, 2, "spread of logits, last epoch") is None
    for wrong in ("test", "validation macro top-5", "top-5", "test top-0x"):
        with pytest.raises(ValueError, match="unknown metric"):
            parse_metric(wrong)
