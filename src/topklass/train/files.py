"""Records and checkpoints of a run, written atomically."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from topklass._files import write_whole


def write_json(path: Path, record: object) -> None:
    """Write a record as JSON."""
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    write_whole(path, lambda file: file.write(text.encode()))


class SafeCheckpoints(TorchCheckpointIO):
    """Checkpoints that are written atomically and loaded without executing code.

    The previous one is kept as ``….before``, and is taken if the newest cannot be read.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint; an existing file becomes its predecessor."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(path.name + ".new")
        write_whole(fresh, lambda file: torch.save(checkpoint, file))
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
        for each in (Path(path), backup_of(Path(path))):
            each.unlink(missing_ok=True)


def backup_of(path: Path) -> Path:
    """Where the predecessor of a checkpoint is kept."""
    return path.with_name(path.name + ".before")


def load_checkpoint(path: Path, map_location: Any = "cpu") -> dict[str, Any]:
    """A checkpoint, or its predecessor if it is missing or broken; nothing in it is executed."""
    return find_checkpoint(path, map_location)[1]


def find_checkpoint(path: Path, map_location: Any = "cpu") -> tuple[Path, dict[str, Any]]:
    """The same with its path."""
    failures = []
    for candidate in (path, backup_of(path)):
        try:
            checkpoint: dict[str, Any] = torch.load(
                candidate, map_location=map_location, weights_only=True
            )
            return candidate, checkpoint
        except Exception as failure:  # whatever is wrong with it, the other may be right
            failures.append(f"{candidate.name}: {type(failure).__name__}: {failure}")
    raise OSError(f"no checkpoint in {path.parent} can be read: {'; '.join(failures)}")
