"""Checkpoints of a run: written atomically, checked when they are read."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import IO, Any
from zipfile import ZipFile

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from topklass._files import write_whole
from topklass.train.records import BrokenFileError, naming


class SafeCheckpoints(TorchCheckpointIO):
    """Checkpoints that are written atomically and loaded without executing code.

    The previous one is kept as ``….before``, and is taken if the newest is broken.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint; an existing file becomes its predecessor."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = fresh_of(path)
        write_whole(fresh, lambda file: save(checkpoint, file))
        if path.exists():
            os.replace(path, backup_of(path))
        os.replace(fresh, path)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, or its predecessor if it is broken."""
        return load_checkpoint(Path(path), map_location)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint and its predecessor."""
        for each in versions_of(Path(path)):
            each.unlink(missing_ok=True)


def backup_of(path: Path) -> Path:
    """Where the predecessor of a checkpoint is kept."""
    return path.with_name(path.name + ".before")


def fresh_of(path: Path) -> Path:
    """Where a checkpoint is until its predecessor has been moved."""
    return path.with_name(path.name + ".new")


def put_in_place(path: Path) -> None:
    """Complete the last step of writing a checkpoint, if the process was killed just before it."""
    if not path.exists() and fresh_of(path).exists():
        os.replace(fresh_of(path), path)


def versions_of(path: Path) -> tuple[Path, ...]:
    """Files that a checkpoint may be in, the one to take first."""
    return path, fresh_of(path), backup_of(path)


def save(checkpoint: dict[str, Any], file: IO[bytes]) -> None:
    """Write a checkpoint; the error is that of the file."""
    try:
        torch.save(checkpoint, file)
    except RuntimeError as error:  # PyTorch could not complete the file either
        raise error.__context__ or error from None


def load_checkpoint(
    path: Path, map_location: Any = "cpu", *, predecessor: bool = True
) -> dict[str, Any]:
    """A checkpoint, or its predecessor if it is missing or broken; nothing in it is executed."""
    return find_checkpoint(path, map_location, predecessor=predecessor)[1]


def find_checkpoint(
    path: Path, map_location: Any = "cpu", *, predecessor: bool = True
) -> tuple[Path, dict[str, Any]]:
    """The same with its path; a warning names what is broken."""
    broken: list[str] = []
    for candidate in versions_of(path) if predecessor else (path, fresh_of(path)):
        try:
            with naming(candidate, "it is passed over"):
                checkpoint = read_checkpoint(candidate, map_location)
        except FileNotFoundError:
            continue
        except BrokenFileError as error:  # the other may be right
            broken.append(str(error))
            continue
        if broken:
            warnings.warn(f"{'; '.join(broken)}, and {candidate.name} taken", stacklevel=2)
        return candidate, checkpoint
    if broken:
        raise BrokenFileError(f"{'; '.join(broken)}, and there is no other: train again")
    raise FileNotFoundError(f"there is no checkpoint {path}")


def read_checkpoint(path: Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint; each part of it has a checksum, which PyTorch does not look at."""
    with ZipFile(path) as parts:
        if wrong := parts.testzip():
            raise ValueError(f"the checksum of {wrong} is wrong")
    checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    if not isinstance(checkpoint, dict):
        raise ValueError(f"it has a {type(checkpoint).__name__}, not a checkpoint")
    return checkpoint
