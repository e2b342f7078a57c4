"""Tables 3 to 5 beside the benchmark: every number where it belongs, errors that help."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from topklass.reproduce import EXPERIMENTS, RECORD, Request

EXPERIMENT = EXPERIMENTS["algorithms"]


def study(gpu: str | None = None) -> dict:
    """A small record of ``python -m benchmarks study``."""
    times = {"classes": 1_000, "method": "summation", "forward_ms": 12.34, "backward_ms": 56.78}
    finite = {"method": "summation, not centred", "tau": 0.1, "finite_losses": 0.49}
    rows = [{**finite, "precision": "single"}]
    rows += [{**finite, "precision": "double", "finite_losses": 1.0}]
    return {
        "what": "k = 5",
        "processor": "a processor",
        "torch": "2.9",
        "python": "3.12",
        "topklass": "1.0",
        "commit": "abc" if gpu is None else "def",
        **({} if gpu is None else {"gpu": gpu}),
        "time": [times],
        "stability": rows,
    }


def text(tables: list[Table]) -> str:
    console = Console(width=200)
    with console.capture() as shown:
        for table in tables:
            console.print(table)
    return shown.get()


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_one_file(tmp_path):
    record = EXPERIMENT.run(Request("fast", tmp_path, write(tmp_path / "a.json", study())))
    assert list(record) == list(RECORD)
    assert record["hardware"] == "a processor"
    assert record["versions"] == {"python": "3.12", "torch": "2.9", "topklass": "1.0"}
    assert record["commit"] == "abc"
    assert record["not_run"] == ["python -m benchmarks study on a GPU"]
    shown = text(EXPERIMENT.show(record))
    lines = {line.split("│")[1].strip(): line for line in shown.splitlines() if "│" in line}
    cells = [each.strip() for each in lines["summation"].split("│")[2:6]]
    assert cells == ["–", "56.8", "–", "–"]
    assert "12.3" in shown
    cells = [each.strip() for each in lines["summation, not centred"].split("│")[2:8]]
    assert cells == ["– / –", "– / –", "✗ 49 % / ✓", "– / –", "– / –", "– / –"]


def test_the_papers_numbers(tmp_path):
    record = EXPERIMENT.run(Request("paper", tmp_path, write(tmp_path / "a.json", study())))
    shown = text(EXPERIMENT.show(record))
    lines = {line.split("│")[1].strip(): line for line in shown.splitlines() if "│" in line}

    def cells(name: str) -> list[str]:
        return [each.strip() for each in lines[name].split("│")[2:-1]]

    paper = "Berrada 2018, Titan Xp: "
    assert cells(f"{paper}summation") == ["6", "62", "627", "6,258"]
    assert cells(f"{paper}divide and conquer") == ["11", "18", "24", "146"]
    assert cells(f"{paper}divide and conquer, autograd") == [
        "93",
        "139",
        "194",
        "287",
    ]
    assert cells(f"{paper}divide and conquer, recursion") == ["7", "6", "20", "171"]
    stable = ["✓ / ✓", "✓ / ✓", "✗ / ✓", "✗ / ✗", "✗ / ✗", "✗ / ✗"]
    assert cells("Berrada 2018: summation") == stable
    assert cells("Berrada 2018: divide and conquer") == ["✓ / ✓"] * 6


def test_both_devices_of_a_folder(tmp_path):
    write(tmp_path / "study-cpu.json", study())
    write(tmp_path / "study-gpu.json", study("a GPU"))
    record = EXPERIMENT.run(Request("smoke", tmp_path / "out", tmp_path))
    assert record["not_run"] == []
    assert record["hardware"] == "a processor; a GPU"
    assert record["commit"] == "abc; def"
    assert [row["device"] for row in record["rows"]] == ["cpu"] * 3 + ["gpu"] * 3
    assert len(EXPERIMENT.show(record)) == 6
    drawn = EXPERIMENT.draw(record, tmp_path / "figures")
    assert [path.name for path in drawn] == [
        f"algorithms-{device}.{kind}" for device in ("cpu", "gpu") for kind in ("svg", "png")
    ]
    assert all(path.stat().st_size > 5_000 for path in drawn)


def test_the_checkouts_own_records(tmp_path):
    """What is committed under benchmarks/results can be read."""
    results = Path(__file__).parents[1] / "benchmarks" / "results"
    if not results.exists():
        pytest.skip("not a checkout")
    record = EXPERIMENT.run(Request("smoke", tmp_path))
    assert set(record["protocol"]) == {"cpu", "gpu"}
    assert text(EXPERIMENT.show(record)).count("topklass") >= 6
    saved = (tmp_path / "algorithms-smoke.json").read_text()
    assert json.loads(saved) == record


def test_what_is_wrong_with_the_data_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="python -m benchmarks"):
        EXPERIMENT.run(Request("smoke", tmp_path, tmp_path))
    with pytest.raises(FileNotFoundError, match="there is no"):
        EXPERIMENT.run(Request("smoke", tmp_path, tmp_path / "study-cpu.json"))
    with pytest.raises(ValueError, match="is no record of"):
        EXPERIMENT.run(Request("smoke", tmp_path, write(tmp_path / "a.json", {"time": []})))
