"""Comparisons: groups by recipe, what is left out, what differs, what beats cross-entropy."""

import json
import shutil

import pytest

from finished_runs import CLASSES, RECIPE, write_run, write_runs
from topklass.train.comparison import compare
from topklass.train.headline import headline
from topklass.train.results_table import results_table


def test_seeds_are_one_group(tmp_path):
    runs = write_runs(tmp_path, "smooth", [0.4, 0.5, 0.6], tau=0.5)
    runs += write_runs(tmp_path, "cross-entropy", [0.4, 0.4])
    comparison = compare(reversed(runs))
    assert [len(group.runs) for group in comparison.groups] == [2, 3]
    assert [group.first.recipe.loss for group in comparison.groups] == ["cross-entropy", "smooth"]
    assert [run.recipe.seed for run in comparison.groups[1].runs] == [0, 1, 2]
    share = comparison.groups[1].accuracy(2, "micro")
    assert (share.mean, share.std) == (pytest.approx(0.5), pytest.approx(0.1))
    assert comparison.groups[1].curve("validation/top2")[3].mean == pytest.approx(0.5)


def test_table(tmp_path):
    runs = write_runs(tmp_path, "smooth", [0.4, 0.5, 0.6], tau=0.5)
    runs += write_runs(tmp_path, "cross-entropy", [0.4, 0.4, 0.4])
    table = results_table(compare(runs))
    assert table.titles == ("loss", "seeds", "top-1 %", "top-2 %", "top-1 gain", "top-2 gain")
    rows = [[cell.replace("\xa0", " ") for cell in row] for row in table.rows]
    assert rows[0] == ["cross-entropy", "3", "20.0 ± 0.0", "40.0 ± 0.0", "", ""]
    assert rows[1][:4] == ["smooth, tau 0.5", "3", "25.0 ± 5.0", "50.0 ± 10.0"]
    assert rows[1][4:] == ["+5.0 ± 2.9", "+10.0 ± 5.8"]
    assert any("spread of seeds in all rows" in note for note in table.notes)


def test_settings_that_differ(tmp_path):
    runs = write_runs(tmp_path, "smooth", [0.4], k=2, learning_rate=0.1)
    runs += write_runs(tmp_path, "smooth", [0.5], k=3, learning_rate=0.1, noise=0.2)
    runs += write_runs(tmp_path, "smooth", [0.5], k=3, data_options={"size": 8}, workers=3)
    comparison = compare(runs)
    assert comparison.differing == ("noise", "k", "data size")
    assert comparison.lengths == (1, 2, 3)
    titles = [comparison.title(group) for group in comparison.groups]
    assert titles[1] == "smooth, noise 0.2, k 3, data size none"
    assert len(set(titles)) == 3
    assert results_table(comparison).titles[1:4] == ("noise", "k", "data size")


def test_workers_are_not_compared(tmp_path):
    runs = [
        write_run(tmp_path / str(seed), RECIPE.with_changes({"seed": seed, "workers": seed}))
        for seed in range(2)
    ]
    assert len(compare(runs).groups) == 1


def test_left_out(tmp_path):
    good = write_run(tmp_path / "good")
    unfinished = write_run(tmp_path / "unfinished", RECIPE.with_changes({"seed": 1}))
    (unfinished / "result.json").unlink()
    old = write_run(tmp_path / "old", RECIPE.with_changes({"seed": 2}))
    (old / "details.json").unlink()
    cut = write_run(tmp_path / "cut", RECIPE.with_changes({"seed": 3}))
    (cut / "result.json").write_text((cut / "result.json").read_text()[:50])
    wrong = write_run(tmp_path / "wrong", RECIPE.with_changes({"seed": 4}))
    (wrong / "details.json").write_text('{"classes": ["a", "b"]}')
    unlike = write_run(tmp_path / "unlike", RECIPE.with_changes({"seed": 5}))
    details = json.loads((unlike / "details.json").read_text())
    (unlike / "details.json").write_text(json.dumps({**details, "ranks": [1, 2]}))
    bare = write_run(tmp_path / "bare", RECIPE.with_changes({"seed": 6}))
    (bare / "result.json").write_text(json.dumps({"recipe": {}, "data": {"name": "toy"}}))
    again = shutil.copytree(good, tmp_path / "again")
    comparison = compare(
        [good, good, unfinished, old, cut, wrong, unlike, bare, tmp_path / "nowhere", again]
    )
    assert [run.folder for run in comparison.runs] == [good]
    said = " ".join(comparison.left_out)
    assert len(comparison.left_out) == 8
    for folder, reason in {
        "unfinished": f"continue it with topklass train --resume --folder {unfinished}",
        "old": "an older topklass",
        "cut": "result.json is broken: JSONDecodeError",
        "wrong": "details.json is broken: it has no 'counts'",
        "unlike": "details.json is broken: it has 2 ranks of 60 labels",
        "bare": "result.json is broken: it has no 'epoch'",
        "nowhere": "holds no run",
        "again": "the same recipe and seed",
    }.items():
        assert any(folder in each and reason in each for each in comparison.left_out), said


@pytest.mark.parametrize("epoch", [{}, {"epoch": float("nan")}, {"epoch": "1"}])
def test_epochs_without_a_number(tmp_path, epoch):
    run = write_run(tmp_path / "run")
    details = json.loads((run / "details.json").read_text())
    (run / "details.json").write_text(json.dumps({**details, "epochs": [{"a": 1.0, **epoch}]}))
    with pytest.raises(ValueError, match=r"details\.json is broken"):
        compare([run])


def test_nothing_finished(tmp_path):
    with pytest.raises(ValueError, match=r"no finished run to compare.*holds no run"):
        compare([tmp_path])
    with pytest.raises(ValueError, match="no finished run"):
        compare([])


def test_other_test_sets(tmp_path):
    first = write_run(tmp_path / "first")
    other = write_run(tmp_path / "other", classes=("A", "B", "C"))
    with pytest.raises(ValueError, match=r"different test sets.*6 classes.*3 classes"):
        compare([first, other])
    redrawn = write_run(tmp_path / "redrawn")
    details = json.loads((redrawn / "details.json").read_text())
    (redrawn / "details.json").write_text(json.dumps({**details, "images": "other"}))
    with pytest.raises(ValueError, match="different test sets"):
        compare([first, redrawn])
    fewer = write_run(tmp_path / "fewer", test=30)
    with pytest.raises(ValueError, match=r"60 test images.*30 test images"):
        compare([first, fewer])


def test_the_best_cross_entropy(tmp_path):
    """On the same training data; what differs besides the loss is said."""
    runs = write_runs(tmp_path, "cross-entropy", [0.3], noise=0.3)
    runs += write_runs(tmp_path, "cross-entropy", [0.4], head="linear")
    runs += write_runs(tmp_path, "cross-entropy", [0.5], head="cosine")
    runs += write_runs(tmp_path, "ldam", [0.6], head="cosine", scale=20.0, match=False)
    runs += write_runs(tmp_path, "focal", [0.6], noise=0.3, epochs=2)
    runs += write_runs(tmp_path, "focal", [0.6], noise=0.1)
    comparison = compare(runs)
    bases = {}
    for group in comparison.groups:
        base = comparison.base(group)
        if group.settings["loss"] != "cross-entropy":
            key = (group.settings["loss"], group.settings["noise"])
            bases[key] = base and base.accuracy(2, "micro").mean
        else:
            assert base is None
    assert bases == {
        ("ldam", 0): pytest.approx(0.5),
        ("focal", 0.3): pytest.approx(0.3),
        ("focal", 0.1): None,
    }
    notes = " ".join(results_table(comparison).notes)
    assert "focal, noise 0.3, head linear, match yes, epochs 2 differs from" in notes
    assert "also in epochs." in notes


def test_clear_differences(tmp_path):
    """One loss at p = 0.04 is clear by itself, but not as one of two."""
    base = write_runs(tmp_path, "cross-entropy", [0.4, 0.5, 0.45])
    near = write_runs(tmp_path, "smooth", [0.55, 0.75, 0.65])
    alone = compare(base + near)
    gain = alone.gain(alone.groups[1], 2)
    assert gain is not None
    assert 0.025 < gain.p < 0.05
    assert alone.clear(gain)
    assert results_table(alone).rows[1][-1].endswith("*")
    assert "which seeds do not explain" in headline(alone)[0]
    both = compare(base + near + write_runs(tmp_path, "focal", [0.3, 0.5, 0.5]))
    (gain,) = (both.gain(g, 2) for g in both.groups if g.settings["loss"] == "smooth")
    assert 0.025 < gain.p < 0.05
    assert not both.clear(gain)
    assert "may explain" in headline(both)[0]
    assert any("Bonferroni for 2 rows" in note for note in results_table(both).notes)


def test_headlines(tmp_path):
    first = write_runs(tmp_path / "a", "cross-entropy", [0.6])
    assert headline(compare(first)) == [
        "cross-entropy has the label among its 2 guesses for 60.0 % of test images."
    ]
    worse = write_runs(tmp_path / "a", "smooth", [0.5])
    assert headline(compare(first + worse))[0].startswith("Best of 2 recipes: cross-entropy has")
    better = write_runs(tmp_path / "a", "focal", [0.8])
    (said,) = headline(compare(first + worse + better))
    assert "That is 20.0 points above cross-entropy; more seeds" in said
    noisy = write_runs(tmp_path / "a", "focal", [0.1], noise=0.5)
    assert len(headline(compare(first + better + noisy))) == 2


def test_micro_and_macro(tmp_path):
    """Unless all classes have as many test images; gains are in the average of the recipes."""
    even = compare([write_run(tmp_path / "even")])
    assert even.averages == ("micro",)
    recipe = RECIPE.with_changes({"average": "macro"})
    uneven = compare([write_run(tmp_path / "uneven", recipe, test=61)])
    assert uneven.averages == ("micro", "macro")
    assert uneven.average == "macro"
    titles = results_table(uneven).titles
    assert titles[2:] == ("top-1 micro %", "top-1 macro %", "top-2 micro %", "top-2 macro %")
    run = uneven.runs[0]
    ranks, labels = run.ranks.tolist(), run.labels.tolist()
    shares = []
    for label in range(len(CLASSES)):
        mine = [rank < 2 for rank, each in zip(ranks, labels, strict=True) if each == label]
        shares.append(sum(mine) / len(mine))
    assert uneven.groups[0].accuracy(2, "macro").mean == pytest.approx(sum(shares) / len(shares))
