"""Data of ``longtail-characters``: ``python -m experiments.long_tail_characters FILE.npz``.

Rendered characters in a random order of classes. In the order of :func:`topklass.data.glyphs`,
scripts follow each other, and a long tail would make whole scripts rare; here a rare character
looks like frequent ones, as rare species do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from topklass.data import Dataset, glyphs
from topklass.data.seeds import generator

SIZES = {
    "classes": 1000,
    "per_class": 100,
    "validation_per_class": 3,
    "test_per_class": 10,
    "size": 16,
}


def shuffled_classes(dataset: Dataset, seed: int = 0) -> dict[str, np.ndarray]:
    """The arrays of a ``.npz`` file for a data set in memory, its classes in another order.

    Example:
        >>> data = glyphs(classes=20, per_class=1, validation_per_class=1, test_per_class=1)
        >>> arrays = shuffled_classes(data)
        >>> arrays["x_val"].shape, sorted(arrays["y_val"]) == list(range(20))
        ((20, 1, 32, 32), True)
        >>> bool(arrays["classes"][arrays["y_test"][0]] == data.classes[0])
        True
    """
    count = len(dataset.classes)
    order = torch.randperm(count, generator=generator(seed, "order of classes"))
    place = order.argsort()
    arrays = {"classes": np.array(dataset.classes)[order.numpy()]}
    splits = {"train": dataset.train, "val": dataset.validation, "test": dataset.test}
    for name, split in splits.items():
        if split is not None:
            arrays[f"x_{name}"] = np.asarray(split.images)
            arrays[f"y_{name}"] = place[split.labels].numpy()
    return arrays


def main(file: Annotated[Path, typer.Argument(help="where to write, .npz")]) -> None:
    """Draw the characters and write them."""
    np.savez_compressed(file, **shuffled_classes(glyphs(**SIZES, cache=False)))  # type: ignore[arg-type]


if __name__ == "__main__":
    typer.run(main)
