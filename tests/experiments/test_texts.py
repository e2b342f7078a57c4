"""Texts as vectors, and losses trained on them."""

import json

import pytest
import torch

from experiments.catalogue import EXPERIMENTS
from experiments.experiment import Request
from experiments.text_training import read
from experiments.texts import digest, read_texts, tf_idf, vectors

TEXTS = {
    "train": [["how much money", "balance"], ["how much time", "clock"]] * 20,
    "val": [["my money", "balance"]],
    "test": [["money please", "balance"], ["time please", "clock"]],
    "oos_test": [["sing a song", "oos"]],
}
DOMAINS = {"banking": ["balance"], "small talk": ["clock"]}
EXPERIMENT = EXPERIMENTS["which-loss-text"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(vectors, "__defaults__", (4,))  # fewer dimensions than words
    (tmp_path / "data_full.json").write_text(json.dumps(TEXTS), "utf-8")
    (tmp_path / "domains.json").write_text(json.dumps(DOMAINS), "utf-8")
    read.cache_clear()
    return tmp_path


def test_queries_are_read_without_those_out_of_scope(folder):
    data, found = read_texts(folder)
    assert data.classes == ("balance", "clock")
    assert data.counts.tolist() == [20, 20]
    assert len(data.validation) == 1
    assert data.superclasses["domain"].of_class.tolist() == [0, 1]
    assert found == digest(TEXTS["test"]) != digest(TEXTS["test"][:1])
    rows = data.train.images.rows
    assert rows.std().item() == pytest.approx(1)
    torch.testing.assert_close(rows[::2], rows[:1].expand(20, 4))
    money, time = data.test.images.rows
    assert (money @ rows[0]) > (money @ rows[1])
    assert (time @ rows[1]) > (time @ rows[0])


def test_terms_are_weighted_and_normalised():
    place = {"a": 0, "b": 1}
    found = tf_idf([["a", "b", "b"], ["unknown"]], place, torch.tensor([3.0, 2.0]))
    torch.testing.assert_close(found, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))


def test_data_is_checked(folder, tmp_path):
    with pytest.raises(ValueError, match="needs --data PATH, the place of CLINC150"):
        EXPERIMENT.run(Request("fast", tmp_path / "runs"))
    with pytest.raises(ValueError, match=r"CLINC150 has 150 classes, .* has 2"):
        EXPERIMENT.run(Request("fast", tmp_path / "runs", data=folder))
    (folder / "domains.json").unlink()
    read.cache_clear()
    with pytest.raises(ValueError, match=r"get https.* But there is no .*domains.json"):
        EXPERIMENT.run(Request("fast", tmp_path / "runs", data=folder))
    with pytest.raises(ValueError, match="makes its own texts"):
        EXPERIMENT.run(Request("smoke", tmp_path / "runs", data=folder))


def results(record):
    """What must not depend on how a record was made."""
    return [{n: v for n, v in row.items() if n != "seconds"} for row in record["rows"]]


def test_an_interrupted_experiment_continues(tmp_path):
    whole = EXPERIMENT.run(Request("smoke", tmp_path / "whole"))
    part = EXPERIMENT.run(Request("smoke", tmp_path / "part", most=8))
    assert len(part["rows"]) == 8 < len(whole["rows"])
    part = EXPERIMENT.run(Request("smoke", tmp_path / "part"))
    assert part["not_run"] == whole["not_run"] == []
    assert results(part) == results(whole)
    rates = {row["settings"]["learning_rate"] for row in whole["rows"] if row["case"] == "clean"}
    assert rates == {0.1}  # a case without a search has the rate of the preset
    accuracy = {(row["method"], row["seed"]): row["test"]["micro"] for row in whole["rows"]}
    assert all(shares == sorted(shares) for shares in accuracy.values())
    record = tmp_path / "part" / "which-loss-text-smoke.json"
    record.write_text(record.read_text("utf-8").replace(whole["rows"][0]["images"], "0"), "utf-8")
    with pytest.raises(ValueError, match="tested on other texts"):
        EXPERIMENT.run(Request("smoke", tmp_path / "part"))


@pytest.mark.slow
def test_processes_change_no_result(tmp_path):
    one = EXPERIMENT.run(Request("smoke", tmp_path / "one"))
    two = EXPERIMENT.run(Request("smoke", tmp_path / "two", at_once=2))
    assert [row["test"] for row in one["rows"]] == [row["test"] for row in two["rows"]]
