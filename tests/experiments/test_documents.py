"""The pages of experiments: a place for every one, numbers from records alone."""

import re
from html import escape
from pathlib import Path

import pytest
from benchmarks import reproduce_tables
from benchmarks.environment import ROOT
from benchmarks.tables import filled, tables

from experiments import style
from experiments.catalogue import EXPERIMENTS
from experiments.experiment import save_record

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("reproduction.md", "experiments.md")


@pytest.fixture
def records(tmp_path, monkeypatch):
    """A folder for records, without one."""
    monkeypatch.setattr(reproduce_tables, "RECORDS", tmp_path)
    monkeypatch.setattr(reproduce_tables, "IMAGES", tmp_path / "images")
    return tmp_path


def text_of_pages():
    return "".join((DOCS / name).read_text("utf-8") for name in PAGES)


def test_every_experiment_has_a_place():
    text = text_of_pages()
    for name in ("reproduce", *(f"reproduce-{each}" for each in EXPERIMENTS)):
        assert text.count(f"<!-- {name} -->") == text.count(f"<!-- /{name} -->") == 1


def test_pages_have_what_the_records_say(tmp_path, monkeypatch):
    """``python -m benchmarks tables`` would change nothing."""
    monkeypatch.setattr(reproduce_tables, "IMAGES", tmp_path)
    monkeypatch.setattr(style, "standalone", lambda _, name, alt: f"<title>{escape(alt)}</title>")
    texts = dict(tables())
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        page = path.read_text("utf-8")
        assert filled(page, texts) == page, path.name
    for drawn in tmp_path.glob("*.svg"):
        assert f"images/reproduce/{drawn.name})" in text_of_pages()
        assert (DOCS / "images" / "reproduce" / drawn.name).is_file()


def test_what_is_not_run_says_so(records):
    texts = dict(reproduce_tables.tables())
    assert texts["reproduce"].count("| not run |") == len(EXPERIMENTS)
    noise = texts["reproduce-cifar100-noise"]
    assert noise.startswith("Not run yet.")
    assert "not run<br>94.34\xa0±\xa00.09\xa0a<br>94.24\xa0b" in noise
    assert "▲" not in "".join(texts.values())
    page = filled(text_of_pages(), texts)
    assert filled(page, texts) == page


def finished(record, number, top5):
    """Let a run of a record have ended, with this accuracy."""
    accuracies = [0.7, 0.8, 0.85, 0.9, top5]
    row = {
        **record["not_run"].pop(number),
        "test": {"micro": accuracies, "macro": accuracies},
        "validation": {"1": 0.7, "5": top5},
        "training": {"1": 0.7, "5": top5},
        "gradient": [0.5],
        "curves": {},
        "classes": 100,
        "hardware": "a GPU",
        "commit": "0123456",
    }
    record["rows"].append(row)


def test_a_record_fills_the_page(records):
    experiment = EXPERIMENTS["cifar100-samples"]
    record = experiment.begin("fast")
    finished(record, 0, 0.95)
    save_record(record, records)
    samples = dict(reproduce_tables.tables())["reproduce-cifar100-samples"]
    assert ".svg" not in samples  # of a single point
    finished(record, 0, 0.96)
    save_record(record, records)
    texts = dict(reproduce_tables.tables())
    samples = texts["reproduce-cifar100-samples"]
    assert samples.startswith("Preset fast: ")
    assert "model resnet18-small" in samples.split("\n")[0]
    assert "95.00\xa0(1)<br>94.28\xa0a ▲\xa0+0.72" in samples
    assert "](images/reproduce/cifar100-samples-accuracy.svg)" in samples
    assert f"fast: 2 of {2 + len(record['not_run'])}" in texts["reproduce"]
    left = len(record["not_run"])
    assert f"Not run: {left} of {left + 2} parts." in samples


def test_the_page_of_evidence_takes_tables_by_their_titles(records):
    texts = dict(reproduce_tables.tables())
    assert texts["reproduce-which-loss"] == "Not run yet."
    assert not [name for name in texts if name.startswith("which-loss")]
    experiment = EXPERIMENTS["which-loss"]
    record = experiment.begin("fast")
    for case, top5 in (("20 % of the images", 0.8), ("20 % of the images, block noise 0.4", 0.84)):
        runs = [(row["method"], row["case"]) for row in record["not_run"]]
        finished(record, runs.index(("cross-entropy", case)), top5)
    save_record(record, records)
    texts = dict(reproduce_tables.tables())
    titles = [table.title for table in experiment.show(record)]
    assert len({*titles}) == len(titles)
    assert all(f"which-loss: {title}" in texts for title in titles)
    assert "82.00" in texts["which-loss: Learning rates by validation"]
    page = (DOCS / "evidence.md").read_text("utf-8")
    for name in re.findall("<!-- (which-loss: .*?) -->", page):
        assert page.count(f"<!-- /{name} -->") == 1
        assert name.removeprefix("which-loss: ") in (*titles, "protocol", "figure")
