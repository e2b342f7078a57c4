"""Records of a run: checked against their schema and their checksum when they are read."""

import json
from typing import Any

import pytest

from finished_runs import write_run
from topklass.train.details import Result, read_details, read_result
from topklass.train.records import BrokenFileError, mismatch, naming, read_record, write_record
from topklass.train.signature import Signature, load_signature

SIGNATURE = Signature(("a", "b"), 1, 8, 8, None, (0.5,), (0.2,))


def changed(path, **values: Any) -> None:
    """Change values of a record that has no checksum."""
    record = json.loads(path.read_text(encoding="utf-8"))
    record.pop("checksum", None)
    path.write_text(json.dumps({**record, **values}), encoding="utf-8")


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ({}, Result, "it has no 'recipe'"),
        ([], Result, "it must be an object, got []"),
        (True, int, "it must be int, got True"),
        (None, float, "it must be float, got None"),
        ("1", int | None, "it must be int | None, got '1'"),
        ({"a": {"b": "c"}}, dict[str, dict[str, float]], "it['a']['b'] must be float, got 'c'"),
        ([1, 2.5], tuple[int, ...], "it[1] must be int, got 2.5"),
    ],
)
def test_mismatches(value, kind, message):
    assert mismatch(value, kind, "it") == message


def test_what_fits():
    assert mismatch({"a": [1, 2.5], "b": []}, dict[str, list[float]], "it") is None
    assert mismatch(None, int | None, "it") is None


def test_each_change_is_noticed(tmp_path):
    """A flipped bit makes it no JSON, no text, or another checksum."""
    path = tmp_path / "signature.json"
    SIGNATURE.save(path)
    assert load_signature(path) == SIGNATURE
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            found = load_signature(path)
        except BrokenFileError as error:
            assert str(error).startswith(f"{path} is broken: ")  # noqa: PT017
        else:
            assert found == SIGNATURE, bit


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"channels": 2}, "1 or 3 channels"),
        ({"height": 0}, "some pixels"),
        ({"channels": 3}, "a mean and a deviation of each channel"),
        ({"classes": "ab"}, "must be .*, got 'ab'"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_signatures(tmp_path, values, message):
    path = tmp_path / "signature.json"
    SIGNATURE.save(path)
    changed(path, **values)
    with pytest.raises(BrokenFileError, match=rf"signature\.json is broken: .*{message}"):
        load_signature(path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"counts": [1]}, "1 counts of 6 classes"),
        ({"labels": []}, "60 ranks of 0 labels"),
        ({"labels": [6] * 60}, "labels and ranks must be from 0 to 5"),
        ({"ranks": [-1] * 60}, "labels and ranks must be from 0 to 5"),
        ({"epochs": [{"epoch": "1"}]}, "must be float, got '1'"),
        ({"epochs": [{"epoch": 1.5}]}, "an epoch has no number"),
        ({"epochs": [{"train/loss": 1.5}]}, "an epoch has no number"),
    ],
)
def test_details(tmp_path, values, message):
    run = write_run(tmp_path / "run")
    assert read_details(run)["classes"][0] == "A"
    changed(run / "details.json", **values)
    with pytest.raises(BrokenFileError, match=rf"details\.json is broken: .*{message}.*--resume"):
        read_details(run)


def test_results(tmp_path):
    run = write_run(tmp_path / "run")
    assert read_result(run)["hardware"] == "a computer"
    (run / "result.json").write_bytes(b"\xff")
    with pytest.raises(BrokenFileError, match=r"result\.json is broken: UnicodeDecodeError"):
        read_result(run)
    (run / "result.json").write_text("[" * 100_000)
    with pytest.raises(BrokenFileError, match=r"result\.json is broken: RecursionError"):
        read_result(run)
    (run / "result.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no .*result\.json"):
        read_result(run)


def test_a_record_is_read_as_it_was_written(tmp_path):
    record = {"a": 0.1 + 0.2, "b": {"Ω": float("inf")}, "c": None}
    write_record(tmp_path / "a.json", record)
    assert read_record(tmp_path / "a.json", dict[str, Any]) == record


def test_one_sentence(tmp_path):
    """Of a long text with line breaks."""
    with pytest.raises(BrokenFileError) as failure, naming(tmp_path, "repair it"):
        raise RuntimeError("a\n b " * 1000)
    said = str(failure.value)
    assert said.startswith(f"{tmp_path} is broken: RuntimeError: a b a b")
    assert said.endswith("…; repair it")
    assert len(said) < 500
