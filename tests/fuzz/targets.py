"""All readers, and what is done with what they have read."""

from pathlib import Path
from typing import Any

from experiments.experiment import load_record
from topklass.data import Dataset, load, read_cifar, read_npz
from topklass.data.files import read_image
from topklass.data.npz_files import GROWTH
from topklass.train import Recipe
from topklass.train.finished import read_run
from topklass.train.problem import with_validation
from topklass.train.recipe import load_recipe
from topklass.train.signature import load_signature, signature_of

from . import arrays, pickles, pictures, records
from .judge import Target
from .mutations import one_replaced

RECIPE = Recipe(k=1, crop=8, resize=8)


def use(dataset: Dataset) -> None:
    """What training does first."""
    signature_of(RECIPE, with_validation(dataset, RECIPE))


def read_tree(root: Path) -> None:
    dataset = load(root)
    for split in dataset.splits.values():
        for _ in split:
            pass
    use(dataset)


def read_one_run(root: Path) -> Any:
    run = read_run(root)
    return run.title, run.settings, run.curve("train/top1"), run.accuracy(1, "macro")


def alone(name: str, content: Any) -> Any:
    return content.map(lambda each: {name: each})


TARGETS = {
    "npz": Target(arrays.FILES, lambda root: use(read_npz(root / "toy.npz")), GROWTH),
    "cifar": Target(
        pickles.FILES, lambda root: use(read_cifar(root)), names=("cifar100", "cifar10")
    ),
    "image": Target(pictures.FILES, lambda root: read_image(root / "toy.png")),
    "folder": Target(pictures.TREES, read_tree),
    "recipe": Target(alone("toy.yaml", records.YAML), lambda root: load_recipe(root / "toy.yaml")),
    "signature": Target(
        alone("toy.json", records.changed_json(records.SIGNATURE)),
        lambda root: load_signature(root / "toy.json"),
    ),
    "run": Target(
        one_replaced(
            {name: each for name, each in records.RUN.items() if name != "recipe.yaml"},
            lambda name: records.changed_json(records.RUN[name]),
        ).map(lambda files: {**files, "recipe.yaml": records.RUN["recipe.yaml"]}),
        read_one_run,
    ),
    "record": Target(
        alone("toy.json", records.changed_json(records.RECORD)),
        lambda root: load_record(root / "toy.json"),
    ),
}
