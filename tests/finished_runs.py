"""Folders of finished runs without training."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from topklass.train import Recipe

CLASSES = ("A", "Ж", "<script>alert('x')</script>", 'quote " & more', "א", "long" * 30)
RECIPE = Recipe(data="toy", k=2, epochs=3, loss="cross-entropy")


def write_run(
    folder: Path,
    recipe: Recipe = RECIPE,
    right: float = 0.5,
    *,
    classes: tuple[str, ...] = CLASSES,
    test: int = 60,
    counts: list[int] | None = None,
) -> Path:
    """A run whose top-k accuracy is the share ``right``; a half of these are right at once."""
    number = len(classes)
    labels = torch.arange(test) % number
    ranks = torch.full((test,), number - 1)
    hits = round(right * test)
    ranks[:hits] = torch.arange(hits) % 2
    curves = [f"{split}/top{k}" for split in ("train", "validation") for k in (1, recipe.k)]
    last = recipe.epochs
    epochs = [
        {"epoch": epoch, "train/gradient": 0.5, **dict.fromkeys(curves, right * epoch / last)}
        for epoch in range(1, last + 1)
    ]
    details = {
        "classes": list(classes),
        "counts": counts or [10] * number,
        "labels": labels.tolist(),
        "ranks": ranks.tolist(),
        "epochs": epochs,
    }
    result: dict[str, Any] = {
        "recipe": asdict(recipe),
        "data": {"name": recipe.data},
        "epoch": recipe.epochs - 1,
        "test": {"micro": {"1": right}, "macro": {"1": right}},
        "seconds": 12.3,
        "versions": {"topklass": "1", "torch": "2"},
        "hardware": "a computer",
    }
    folder.mkdir(parents=True)
    recipe.save(folder / "recipe.yaml")
    (folder / "details.json").write_text(json.dumps(details))
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def write_runs(folder: Path, loss: str, rights: list[float], **changes: Any) -> list[Path]:
    """Runs of one recipe, a seed for each accuracy."""
    settings = {name: changes.pop(name) for name in list(changes) if name in asdict(RECIPE)}
    return [
        write_run(
            folder / f"{loss}-{'-'.join(map(str, settings.values()))}-{seed}",
            RECIPE.with_changes({"loss": loss, "seed": seed, **settings}),
            right,
            **changes,
        )
        for seed, right in enumerate(rights)
    ]
