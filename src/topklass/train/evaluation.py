"""What a finished run is worth: accuracies by list, by the average over views, by superclass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import functional

from topklass import predict_topk, topk_accuracy
from topklass.data import Dataset, Split
from topklass.functional import target_rank
from topklass.train.batches import EvaluationBatches
from topklass.train.details import printable
from topklass.train.engine import (
    EVALUATION_BATCH,
    SIGNATURE,
    accuracies,
    predictions,
)
from topklass.train.file_batches import FileEvaluationBatches
from topklass.train.file_views import several_views, worker_count
from topklass.train.problem import naming_recipe, prepare_data
from topklass.train.recipe import Recipe
from topklass.train.restore import RECIPE, load_best, read_recipe
from topklass.train.signature import load_signature


class Run(NamedTuple):
    """A finished run, ready to be used."""

    recipe: Recipe
    dataset: Dataset
    network: nn.Module
    """In evaluation mode, with the weights of the best checkpoint; from bytes to logits. On the
    accelerator if there is one."""


def load_run(run: str | Path, dataset: Dataset | None = None) -> Run:
    """Load the best checkpoint of a run.

    Args:
        run: its folder.
        dataset: instead of the recipe's.
    """
    run = Path(run)
    recipe = read_recipe(run)
    if dataset is None:
        with naming_recipe(run / RECIPE):
            dataset = prepare_data(recipe)
    signature = load_signature(run / SIGNATURE)
    if tuple(printable(dataset.classes)) != signature.classes:
        raise ValueError(
            f"{run} was trained on other classes than {dataset.name} has: load it with the data "
            "set that was given to train, as load_run(run, dataset)"
        )
    network = load_best(run, recipe, signature)
    return Run(recipe, dataset, network.to(best_device()).eval())


def best_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else found


def evaluate(run: Run) -> dict[str, Any]:
    """Test accuracies of a run.

    Returns:
        ``accuracy``: micro and macro, by length of the list; ``views``: top-k accuracy with k as in
        the recipe, of the image alone (of a file, the crop at its centre) and of the average over
        shifted (and mirrored) views, by softmax and by marginals; ``superclasses``: top-1 and top-k
        accuracy by superclass.
    """
    recipe, dataset, network = run
    labels = dataset.test.labels.cpu()
    logits = predictions(recipe, network, dataset.test)
    by_length = accuracies(target_rank(logits, labels), dataset)
    lists: dict[str, list[Tensor]] = {"softmax": [], "marginals": []}
    for crops in logits_of_views(recipe, network, dataset.test):
        number = crops.shape[1]
        for method, found in lists.items():
            found.append(predict_topk(crops, recipe.k, crop_dim=1, method=method).labels)
    by_method = {method: in_list(torch.cat(found), labels) for method, found in lists.items()}
    alone = in_list(logits.topk(recipe.k).indices, labels)
    return {
        "lengths": [int(length) for length in by_length["micro"]],
        "accuracy": {average: list(each.values()) for average, each in by_length.items()},
        "views": {"number": number, "one": alone, **by_method},
        "superclasses": {
            name: by_superclass(logits, labels, division.of_class, division.names, recipe.k)
            for name, division in dataset.superclasses.items()
        },
    }


@torch.no_grad()
def logits_of_views(recipe: Recipe, network: nn.Module, split: Split) -> Iterator[Tensor]:
    """Batches of logits (N, views, C), on the CPU."""
    device = next(network.parameters()).device
    for views_of_batch in view_batches(recipe, split):
        logits = network(views_of_batch.flatten(0, 1).to(device)).float().cpu()
        yield logits.unflatten(0, views_of_batch.shape[:2])


def view_batches(recipe: Recipe, split: Split) -> Iterator[Tensor]:
    """All images with their views, (N, views, channels, H, W)."""
    images, labels = split.images, split.labels
    if isinstance(images, Tensor):
        for batch, _ in EvaluationBatches(images, labels, EVALUATION_BATCH // 10):
            yield torch.stack(views(batch, recipe), 1)
        return
    size, view = max(1, recipe.batch_size // 10), several_views(recipe)
    for batch, _ in FileEvaluationBatches(images, labels, size, view, worker_count(recipe)):
        yield batch


def views(images: Tensor, recipe: Recipe) -> list[Tensor]:
    """The image shifted into the corners and the centre, and mirrored if training mirrored it."""
    if recipe.pad == 0:
        return [images, images.flip(-1)] if recipe.flip else [images]
    mode = {"zero": "constant", "edge": "edge"}[recipe.border]
    padded = functional.pad(images, [recipe.pad // 2], padding_mode=mode)
    crops: list[Tensor] = list(functional.ten_crop(padded, list(images.shape[-2:])))
    return crops if recipe.flip else crops[:5]


def in_list(lists: Tensor, labels: Tensor) -> float:
    """Share of labels that are in their lists, (N, k)."""
    return (lists == labels[:, None]).any(1).float().mean().item()


def by_superclass(
    logits: Tensor, labels: Tensor, of_class: Tensor, names: tuple[str, ...], k: int
) -> list[dict[str, Any]]:
    """Accuracies of the samples of each superclass that has some."""
    group = of_class.cpu()[labels]
    rows = []
    for number, name in enumerate(names):
        mine = group == number
        if mine.any():
            top = topk_accuracy(logits[mine], labels[mine], (1, k)).tolist()
            rows.append({"name": name, "samples": int(mine.sum()), "top1": top[0], "topk": top[1]})
    return rows
