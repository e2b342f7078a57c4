"""Checkpoints and records: whole or not there, and nothing in them runs."""

import os
import pickle

import pytest
import torch

from topklass._files import write_whole
from topklass.train.files import SafeCheckpoints, backup_of, load_checkpoint, write_json


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "record.json"
    write_json(path, {"a": 1})

    def full_disk(file):
        file.write(b"half of it")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        write_whole(path, full_disk)
    assert path.read_text().startswith('{\n "a": 1')
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]


def test_the_checkpoint_before_is_taken_if_the_last_is_broken(tmp_path):
    path, files = tmp_path / "last.ckpt", SafeCheckpoints()
    files.save_checkpoint({"step": 1}, path)
    files.save_checkpoint({"step": 2}, path)
    assert files.load_checkpoint(path) == {"step": 2}
    path.write_bytes(path.read_bytes()[:20])
    assert files.load_checkpoint(path) == {"step": 1}
    path.unlink()
    assert load_checkpoint(path) == {"step": 1}
    backup_of(path).write_bytes(b"")
    with pytest.raises(OSError, match="can be read"):
        load_checkpoint(path)


def test_a_full_disk_keeps_both(tmp_path, monkeypatch):
    path, files = tmp_path / "last.ckpt", SafeCheckpoints()
    files.save_checkpoint({"step": 1}, path)
    files.save_checkpoint({"step": 2}, path)

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        files.save_checkpoint({"step": 3}, path)
    assert load_checkpoint(path) == {"step": 2}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.ckpt", "last.ckpt.before"]


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil-was-here",)


def test_nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state": Evil()}, tmp_path / "a.ckpt")
    (tmp_path / "b.ckpt").write_bytes(pickle.dumps(Evil()))
    for name in ("a.ckpt", "b.ckpt"):
        with pytest.raises(OSError, match="can be read"):
            load_checkpoint(tmp_path / name)
    assert not (tmp_path / "evil-was-here").exists()
