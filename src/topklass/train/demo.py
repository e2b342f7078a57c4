"""Four losses on letters whose labels are confused: what a top-k loss is for, in five minutes."""

from __future__ import annotations

from pathlib import Path

from topklass.train.recipe import Recipe

LOSSES = ("cross-entropy", "short-list", "smooth", "noised")
SEEDS = (4, 5)

PROBLEM = Recipe(
    data="glyphs",
    data_options={
        "classes": 300,
        "per_class": 10,
        "validation_per_class": 3,
        "test_per_class": 20,
        "seed": 2,
    },
    noise=0.4,
    noise_kind="superclass",
    model="convnet",
    k=5,
    epochs=45,
    batch_size=128,
    border="edge",
    learning_rate=0.2,
)
"""300 characters, ten images of each, 40 % of their labels resampled among look-alikes.

Everything but the loss is the same for all; the losses have their default parameters. The problem
was picked with other seeds and images, such that lists of five can go wrong. The learning rate is
that with the best top-1 accuracy of cross-entropy, among 0.1, 0.2, 0.4 and 0.8
(``python -m experiments learning-rates``).
"""


def demo_runs(folder: Path) -> dict[Path, Recipe]:
    """Recipes of the demo, by folder: every loss with every seed."""
    return {
        folder / f"{loss}-{seed}": PROBLEM.with_changes({"loss": loss, "seed": seed})
        for seed in SEEDS
        for loss in LOSSES
    }
