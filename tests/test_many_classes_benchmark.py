"""``python -m benchmarks many-classes``: the commands, and the table."""

import subprocess

import pytest
from benchmarks import many_classes

pytest.importorskip("lightning")


def test_commands_and_table(monkeypatch, tmp_path):
    """Each way is trained once with each seed; a run that was interrupted is continued."""
    commands, written = [], {}
    monkeypatch.setattr(many_classes, "FOLDER", tmp_path)
    where = {"processor": "CPU", "threads": "1", "torch": "2", "commit": "0"}
    monkeypatch.setattr(many_classes, "describe", lambda device: where)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command))
    accuracy = {"test": {"micro": {"1": 0.25, "5": 0.5}}}
    monkeypatch.setattr("topklass.train.details.read_result", lambda run: accuracy)
    monkeypatch.setattr(many_classes, "write", lambda name, record, _: written.update(record))
    (tmp_path / "0-0").mkdir()
    (tmp_path / "0-0" / "recipe.yaml").touch()
    (tmp_path / "1-0").mkdir()
    (tmp_path / "1-0" / "result.json").touch()
    many_classes.main(quick=False)
    ways, seeds = len(many_classes.WAYS), len(many_classes.SEEDS)
    assert len(commands) == ways * seeds - 1
    assert commands[0][-1] == "--resume"
    assert sum("--shard-classes" in command for command in commands) == seeds
    text = many_classes.accuracies(written)
    assert text.count("| 25.00 ± 0.00 | 50.00 ± 0.00 |") == ways
