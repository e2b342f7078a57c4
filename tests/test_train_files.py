"""Checkpoints: whole or not there, checked when they are read, and nothing in them runs."""

import errno
import os
import pickle

import pytest
import torch

from topklass._files import WriteError, remove_parts, write_whole
from topklass.train.files import SafeCheckpoints, backup_of, fresh_of, load_checkpoint
from topklass.train.records import BrokenFileError, write_json


def save_twice(path) -> None:
    """A checkpoint with its predecessor."""
    for step in (1, 2):
        SafeCheckpoints().save_checkpoint({"step": step}, path)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "record.json"
    write_json(path, {"a": 1})

    def full_disk(file):
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, "no space left")

    with pytest.raises(WriteError, match=r"cannot write .*record\.json: no space left; free some"):
        write_whole(path, full_disk)
    assert path.read_text().startswith('{\n "a": 1')
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]


def test_what_killed_processes_left_is_removed(tmp_path):
    (tmp_path / "last.ckpt.new.123.part").touch()
    (tmp_path / "last.ckpt").touch()
    remove_parts(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]
    remove_parts(tmp_path / "nowhere")


def test_the_checkpoint_before_is_taken_if_the_last_is_broken(tmp_path):
    path = tmp_path / "last.ckpt"
    save_twice(path)
    assert load_checkpoint(path) == {"step": 2}
    path.write_bytes(path.read_bytes()[:20])
    with pytest.warns(UserWarning, match=r"last\.ckpt is broken: .* last\.ckpt\.before taken"):
        assert SafeCheckpoints().load_checkpoint(path) == {"step": 1}
    path.unlink()
    assert load_checkpoint(path) == {"step": 1}
    backup_of(path).write_bytes(b"")
    with pytest.raises(BrokenFileError, match=r"last\.ckpt\.before is broken.*train again"):
        load_checkpoint(path)
    backup_of(path).unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*last\.ckpt"):
        load_checkpoint(path)


@pytest.mark.slow
def test_each_flipped_bit_is_noticed_or_changes_nothing(tmp_path):
    """PyTorch itself reads most of them without a word."""
    path = tmp_path / "last.ckpt"
    whole = {"weights": torch.arange(3.0), "step": 7, "name": "smooth"}
    SafeCheckpoints().save_checkpoint(whole, path)
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), 29):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            found = load_checkpoint(path)
        except BrokenFileError:
            continue
        assert found.keys() == whole.keys(), bit
        assert torch.equal(found["weights"], whole["weights"]), bit
        assert (found["step"], found["name"]) == (7, "smooth"), bit


def test_a_kill_while_checkpoints_are_moved(tmp_path):
    """The new one is complete, and its predecessor was broken."""
    path = tmp_path / "last.ckpt"
    save_twice(path)
    path.rename(fresh_of(path))
    backup_of(path).write_bytes(b"broken")
    assert load_checkpoint(path) == {"step": 2}
    SafeCheckpoints().remove_checkpoint(path)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_keeps_both(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    save_twice(path)

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        SafeCheckpoints().save_checkpoint({"step": 3}, path)
    assert load_checkpoint(path) == {"step": 2}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.ckpt", "last.ckpt.before"]


@pytest.mark.parametrize("missing", [1, 40_000, 81_000])
def test_a_limit_of_file_sizes(tmp_path, missing):
    """PyTorch's own error, about positions in the file, is not the one that is shown."""
    resource = pytest.importorskip("resource")
    path, larger = tmp_path / "last.ckpt", {"weights": torch.zeros(20_000)}
    SafeCheckpoints().save_checkpoint(larger, tmp_path / "whole.ckpt")
    size = (tmp_path / "whole.ckpt").stat().st_size
    SafeCheckpoints().save_checkpoint({"step": 1}, path)
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - missing, previous[1]))
    try:
        with pytest.raises(WriteError) as failure:
            SafeCheckpoints().save_checkpoint(larger, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)
    expected = f"cannot write {path}.new: File too large; raise the limit of file sizes (ulimit -f)"
    assert str(failure.value) == expected
    assert load_checkpoint(path) == {"step": 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.ckpt", "whole.ckpt"]


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil-was-here",)


def test_nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state": Evil()}, tmp_path / "a.ckpt")
    (tmp_path / "b.ckpt").write_bytes(pickle.dumps(Evil()))
    torch.save([1], tmp_path / "c.ckpt")
    for name in ("a.ckpt", "b.ckpt", "c.ckpt"):
        with pytest.raises(BrokenFileError, match=f"{name} is broken"):
            load_checkpoint(tmp_path / name)
    assert not (tmp_path / "evil-was-here").exists()
