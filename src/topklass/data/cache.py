"""A cache of computed tensors in the user's cache folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from topklass._extras import extra
from topklass._files import write_whole
from topklass.data.npz_files import read_plain_arrays


def cache_folder() -> Path:
    """Where files are kept: ``$TOPKLASS_CACHE``, or topklass in the user's cache folder."""
    if chosen := os.environ.get("TOPKLASS_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "topklass"


def cached(
    name: str, key: Mapping[str, Any], build: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """What was built before with the same key, or is built now and kept.

    A broken file is built again. A file that cannot be written is a warning.

    Args:
        name: begins the name of the file.
        key: all that the result depends on, for JSON.
        build: makes tensors.

    Returns:
        The tensors.
    """
    digest = sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_folder() / f"{name}-{digest}.npz"
    tensors = _read(path)
    if tensors is None:
        tensors = build()
        try:
            _write(path, tensors)
        except OSError as error:
            warn(f"{path} could not be kept for the next time: {error}", stacklevel=3)
    return tensors


def _read(path: Path) -> dict[str, Tensor] | None:
    """The tensors, or None if there is no such file or it is broken (each has a checksum)."""
    try:
        return {name: torch.from_numpy(array) for name, array in read_plain_arrays(path).items()}
    except (OSError, ValueError):
        return None


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    write_whole(path, lambda file: extra("numpy").savez(file, **arrays))
