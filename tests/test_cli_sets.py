"""Sets of a run: what the command prints is that of the sets, calibrated as it says."""

import io
import json
import warnings
from dataclasses import replace

import pytest
import torch
from matplotlib import image as pictures
from rich.console import Console

from test_cli import run, write_patterns
from topklass import ConformalSets
from topklass.data import Dataset, Split
from topklass.report.sets_figure import write_sets_figure
from topklass.train import Recipe, compare_sets, load_run, train
from topklass.train.engine import predictions
from topklass.train.evaluation import Run
from topklass.train.sets import are_unlike

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and TensorBoard
NAMES = ["top-2", "LAC", "APS", "RAPS", "SAPS", "PAS", "LAC by class", "LAC, half by class"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with 48 validation images and 36 test images of six classes, with wrong guesses."""
    folder = tmp_path_factory.mktemp("sets")
    data = write_patterns(folder / "toy.npz", noise=250)
    settings = {"epochs": 3, "batch_size": 16, "pad": 1, "k": 2, "validation": 48}
    recipe = Recipe(data=str(data), loss="cross-entropy", learning_rate=0.02, **settings)
    train(recipe, folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def loaded(folder):
    return load_run(folder)


def by_name(record: dict) -> dict[str, dict]:
    return {row["name"].split(", λ")[0]: row for row in record["sets"]}


def logits(loaded: Run, split: Split) -> torch.Tensor:
    return predictions(loaded.recipe, loaded.network, split)


def test_command(monkeypatch, capsys, folder):
    assert run(monkeypatch, "sets", str(folder), "--alpha", "0.2") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in NAMES)
    assert "Calibrated on 48 validation images for a coverage of 80.0 %" in shown
    assert "measured on 36 test images" in shown
    assert pictures.imread(folder / "sets.png").std() > 0.01
    assert run(monkeypatch, "sets", str(folder), "--alpha", "0.2", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert list(by_name(record)) == [*NAMES, "LAC by cluster"]
    for row in record["sets"]:
        assert f"{100 * row['coverage']['micro']:.1f} %" in shown
        assert f"{row['size']:.2f}" in shown


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LAC", {"score": "lac"}),
        ("APS", {}),
        ("LAC by class", {"score": "lac", "calibration": "class"}),
        ("PAS", {"score": "pas", "counts": [8] * 6}),
    ],
)
@pytest.mark.parametrize("max_size", [None, 4])
def test_measured_by_hand(loaded, name, options, max_size):
    record = compare_sets(loaded, 0.4, max_size=max_size)
    sets = ConformalSets(0.4, max_size=max_size, **options)
    known, new = loaded.dataset.validation, loaded.dataset.test
    members = sets.calibrate(logits(loaded, known), known.labels)(logits(loaded, new))
    inside = members.gather(1, new.labels[:, None]).squeeze(1).double()
    by_class = [inside[new.labels == c].mean().item() for c in range(6)]
    row = by_name(record)[name]
    assert row["by_class"] == pytest.approx(by_class)
    assert row["size"] == pytest.approx(members.sum(1).double().mean().item())
    assert row["empty"] == pytest.approx((~members.any(1)).double().mean().item())
    expected = {"micro": inside.mean().item(), "macro": sum(by_class) / 6, "worst": min(by_class)}
    assert row["coverage"] == pytest.approx(expected)
    assert record["counts"] == [8] * 6


def test_temperature_of_the_loss(loaded, monkeypatch):
    """Probabilities are those that the loss has trained."""
    monkeypatch.setattr("topklass.train.sets.scale_of", lambda *_: {"temperature": 0.02})
    row = by_name(compare_sets(loaded, 0.3))["APS"]
    known, new = loaded.dataset.validation, loaded.dataset.test
    sizes = []
    for temperature in (0.02, 1.0):
        sets = ConformalSets(0.3).calibrate(logits(loaded, known) / temperature, known.labels)
        sizes.append(sets(logits(loaded, new) / temperature).sum().item() / len(new))
    assert row["size"] == pytest.approx(sizes[0])
    assert sizes[0] != sizes[1]


def test_half_of_the_test_images(loaded):
    record = compare_sets(loaded, 0.2, calibrate_on="test")
    assert record["calibrated_on"] == {"images": "test", "number": 18}
    assert record["test"] == 18
    assert record["sets"] == compare_sets(loaded, 0.2, calibrate_on="test")["sets"]


def test_methods_that_need_more_images(monkeypatch, capsys, folder, loaded):
    """48 images are enough to calibrate for 0.05, but not to tune as well."""
    record = compare_sets(loaded, 0.05)
    assert [sentence.split(":")[0] for sentence in record["left_out"]] == ["RAPS", "SAPS"]
    assert "RAPS" not in by_name(record)
    assert run(monkeypatch, "sets", str(folder), "--alpha", "0.05") == 0
    assert "needs at least 19 samples to tune" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--alpha", "0.01"], "alpha=0.01 needs at least 99 samples to calibrate, got 48"),
        (["--alpha", "2"], "alpha must be between 0 and 1, got alpha=2.0"),
        (["--max-size", "0"], "max_size=0"),
        (["--alpha", "0.03", "--max-size", "1"], "raise max_size or alpha"),
        (["--calibrate-on", "train"], "calibrate_on must be validation or test, got 'train'"),
    ],
)
def test_errors(monkeypatch, capsys, folder, arguments, message):
    (folder / "sets.png").unlink(missing_ok=True)
    assert run(monkeypatch, "sets", str(folder), *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error:")
    assert message in error
    assert not (folder / "sets.png").exists()


def test_no_run(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "sets", str(tmp_path)) == 2
    assert "there is no run in" in capsys.readouterr().err


def test_warnings(loaded):
    """Of noisy validation labels, and of test images of other classes."""
    noisy = loaded._replace(recipe=loaded.recipe.with_changes({"noise": 0.4}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare_sets(noisy, 0.2)
    noisy = noisy._replace(recipe=noisy.recipe.with_changes({"noisy_validation": True}))
    with pytest.warns(UserWarning, match="validation labels are noisy.*--calibrate-on test"):
        compare_sets(noisy, 0.2)
    test = loaded.dataset.test
    few = test.take((test.labels < 2).nonzero().squeeze(1).repeat(20))
    data = replace(loaded.dataset, test=few)
    with pytest.warns(UserWarning, match="not as frequent"):
        record = compare_sets(loaded._replace(dataset=data), 0.2)
    assert record["sets"][1]["by_class"][2:] == [None] * 4


def test_chance_is_no_difference():
    torch.manual_seed(0)
    weights = 0.95 ** torch.arange(100)
    for n, m in ((100, 100), (500, 5000), (5000, 300)):
        drawn = [weights.multinomial(number, replacement=True) for number in (n, m)]
        assert not are_unlike(*drawn, 100)


def test_held_out_as_in_training(loaded):
    """A data set without validation images is divided as it was for training."""
    whole = Dataset(
        "toy",
        Split(
            torch.cat([loaded.dataset.train.images, loaded.dataset.validation.images]),
            torch.cat([loaded.dataset.train.labels, loaded.dataset.validation.labels]),
        ),
        loaded.dataset.test,
        loaded.dataset.classes,
    )
    record = compare_sets(loaded._replace(dataset=whole), 0.2)
    assert record["calibrated_on"]["number"] == 48
    assert record["counts"] == [8] * 6


def test_progress(loaded):
    """A bar on a terminal, nothing elsewhere."""
    shown = {}
    for terminal in (True, False):
        text = io.StringIO()
        compare_sets(loaded, 0.2, console=Console(file=text, force_terminal=terminal))
        shown[terminal] = text.getvalue()
    assert "test images" in shown[True]
    assert "validation images" in shown[True]
    assert not shown[False]


@pytest.mark.parametrize("counts", [[10] * 6, [100, 50, 20, 8, 3, 0]], ids=["equal", "tail"])
def test_figure(counts, loaded, tmp_path):
    """Other results, other pictures; whole or not at all."""
    record = compare_sets(loaded, 0.2)
    record = {**record, "counts": counts, "sets": record["sets"][:4]}
    drawn = []
    for share in (0.2, 0.8):
        record["sets"][0]["by_class"] = [share] * 5 + [None]
        write_sets_figure(record, tmp_path / "sets.png")
        drawn.append(pictures.imread(tmp_path / "sets.png"))
    assert drawn[0].shape == drawn[1].shape
    assert (drawn[0] != drawn[1]).any()
    assert [path.name for path in tmp_path.iterdir()] == ["sets.png"]
