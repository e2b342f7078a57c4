"""The cache: built once, whole or not at all, and built again if broken."""

from pathlib import Path

import numpy as np
import pytest
import torch

from topklass.data import cache


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TOPKLASS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def build(calls):
    def make():
        calls.append(1)
        return {"a": torch.arange(5), "b": torch.ones(2, 3, dtype=torch.uint8)}

    return make


def same(tensors):
    return tensors["a"].tolist() == [0, 1, 2, 3, 4] and tensors["b"].sum() == 6


def test_what_is_kept_is_not_built_again(folder):
    calls = []
    for _ in range(3):
        assert same(cache.cached("x", {"seed": 0}, build(calls)))
    assert len(calls) == 1
    cache.cached("x", {"seed": 1}, build(calls))
    assert len(calls) == 2
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", ["empty", "half", "garbage", "bit", "folder"])
@pytest.mark.filterwarnings("ignore:.*could not be kept")
def test_a_broken_file_is_built_again(folder, damage):
    calls = []
    cache.cached("x", {}, build(calls))
    (path,) = folder.iterdir()
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[content.index(bytes([1] * 6))] = 7
    path.unlink()
    if damage == "folder":
        path.mkdir()
    else:
        broken = {"empty": b"", "half": content[:300], "garbage": b"x" * 300, "bit": flipped}
        path.write_bytes(broken[damage])
    assert same(cache.cached("x", {}, build(calls)))
    assert len(calls) == 2
    if damage != "folder":
        assert path.read_bytes() == content


def test_a_write_that_fails_leaves_the_old_file_and_no_other(folder, monkeypatch):
    cache.cached("x", {}, build([]))
    (path,) = folder.iterdir()
    path.write_bytes(b"old")

    def full(file, **arrays):
        file.write(b"part")
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.warns(UserWarning, match=r"could not be kept for the next time: .*no space left"):
        assert same(cache.cached("x", {}, build([])))
    assert [entry.read_bytes() for entry in folder.iterdir()] == [b"old"]


def test_an_interrupted_write_leaves_nothing(folder, monkeypatch):
    def interrupted(file, **arrays):
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.cached("x", {}, build([]))
    assert list(folder.iterdir()) == []


def test_where_the_cache_is(monkeypatch):
    monkeypatch.setenv("TOPKLASS_CACHE", "/chosen")
    assert cache.cache_folder() == Path("/chosen")
    monkeypatch.delenv("TOPKLASS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.cache_folder() == Path("/xdg/topklass")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_folder() == Path.home() / ".cache" / "topklass"
