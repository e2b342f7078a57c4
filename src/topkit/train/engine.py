"""From a recipe to a finished run."""

from __future__ import annotations

import platform
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from torch import Tensor, nn

import topkit
from topkit import models
from topkit.data import Dataset, Normalize, random_crop
from topkit.train.batches import EvaluationBatches, TrainingBatches
from topkit.train.criterion import build_loss, gradient_scale
from topkit.train.files import before, load_checkpoint, write_json
from topkit.train.module import Classifier
from topkit.train.problem import prepare_data
from topkit.train.recipe import Recipe, load_recipe
from topkit.train.trainer import make_trainer, quiet

LAST, BEST = "checkpoints/last.ckpt", "checkpoints/best.ckpt"
RECIPE, RESULT = "recipe.yaml", "result.json"
LENGTHS = tuple(range(1, 11))
"""Of the lists whose accuracy is recorded."""
EVALUATION_BATCH = 1024


def train(
    recipe: Recipe,
    run: Path,
    *,
    resume: bool = False,
    dataset: Dataset | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train by a recipe, and leave checkpoints, logs and results in the folder ``run``.

    Ctrl-C ends it after the current step, with a checkpoint; so does a termination signal.

    Args:
        recipe: all settings.
        run: a folder, new unless an interrupted run is continued there.
        resume: continue from the last checkpoint; the result is that of a run without interruption.
        dataset: instead of the recipe's, as ``prepare_data`` would return it.
        console: where progress is shown; None for silence.

    Returns:
        The record that is also written to ``run/result.json``; of several processes only the first
        has it.
    """
    first = getattr(rank_zero_only, "rank", 0) == 0
    if first:
        check_run(recipe, run, resume)
    if dataset is None:
        dataset = prepare_data(recipe)
    network = make_network(recipe, dataset)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batches = training_batches(recipe, dataset, device)
    assert dataset.validation is not None
    validation = EvaluationBatches(
        *in_memory(dataset.validation.images, dataset.validation.labels, device), EVALUATION_BATCH
    )
    scale = gradient_scale(recipe.loss, recipe.k) if recipe.match_gradient else 1.0
    if console is not None and scale != 1:
        console.print(
            f"The loss is multiplied by {scale:g}, so that cross-entropy's learning rate fits it."
        )
    module = Classifier(
        network,
        build_loss(recipe.loss, recipe.k, dataset.counts, recipe.loss_options()),
        recipe,
        len(dataset.classes),
        recipe.epochs * len(batches),
        scale,
    )
    if first:  # not before: whatever is wrong has been said by now
        run.mkdir(parents=True, exist_ok=True)
        recipe.save(run / RECIPE)
    with quiet():
        trainer = make_trainer(recipe, run, module, console)
    for each in (batches, validation):
        each.share(trainer.global_rank, trainer.world_size)
    last = resumable(run / LAST)
    if last is not None:  # Lightning restores the loader in the middle of an epoch, not at its end
        epoch, step = divmod(load_checkpoint(last)["global_step"], len(batches))
        batches.load_state_dict({"epoch": epoch, "step": step})
    began = time.perf_counter()
    with quiet():
        trainer.fit(module, batches, validation, ckpt_path=last)
    seconds = time.perf_counter() - began
    return finish(recipe, run, dataset, network.to(device), seconds) if first else {}


def check_run(recipe: Recipe, run: Path, resume: bool) -> None:
    """See that nothing is overwritten, or that an interrupted run can be continued."""
    saved = run / RECIPE
    if resume:
        if not saved.exists():
            raise FileNotFoundError(f"there is no run to continue in {run}: it has no {RECIPE}")
        if load_recipe(saved) != recipe:
            raise ValueError(
                f"{saved} is another recipe than the one given: continue without other options, or "
                "train in another folder"
            )
    elif saved.exists():
        raise FileExistsError(
            f"there is a run in {run} already: continue it with --resume, or choose another folder"
        )


def resumable(last: Path) -> Path | None:
    """The last checkpoint, if there is one or one before it."""
    return last if last.exists() or before(last).exists() else None


def make_network(recipe: Recipe, dataset: Dataset) -> nn.Module:
    """The recipe's network, from bytes to logits; its weights depend on the seed alone."""
    images = dataset.train.images
    if not isinstance(images, Tensor):
        raise NotImplementedError(
            f"{dataset.name} is read from files; only images in memory can be trained on so far"
        )
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        network = models.build(
            recipe.model, len(dataset.classes), channels=images.shape[1], head=recipe.head
        )
    return nn.Sequential(Normalize.of(dataset.train), network)


def training_batches(recipe: Recipe, dataset: Dataset, device: torch.device) -> TrainingBatches:
    """Augmented batches on the device."""
    augment = partial(random_crop, pad=recipe.pad, flip=recipe.flip, border=recipe.border)
    images, labels = in_memory(dataset.train.images, dataset.train.labels, device)
    return TrainingBatches(images, labels, recipe.batch_size, recipe.seed, augment)


def in_memory(images: Any, labels: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images and labels on the device."""
    return images.to(device), labels.to(device)


def finish(
    recipe: Recipe, run: Path, dataset: Dataset, network: nn.Module, seconds: float
) -> dict[str, Any]:
    """Measure the best checkpoint on the test set, and write the record of the run."""
    best = load_checkpoint(run / BEST)
    take_weights(network, best)
    logits, labels = predictions(network, dataset.test.images, dataset.test.labels)
    lengths = [k for k in LENGTHS if k <= len(dataset.classes)]
    accuracy = {
        average: dict(
            zip(
                map(str, lengths),
                topkit.topk_accuracy(logits, labels, lengths, average=average).tolist(),
                strict=True,
            )
        )
        for average in ("micro", "macro")
    }
    record = {
        "recipe": asdict(recipe),
        "data": dict(dataset.record),
        "classes": len(dataset.classes),
        "parameters": models.count_parameters(network),
        "epoch": best["epoch"],
        "test": accuracy,
        "seconds": round(seconds, 1),
        "versions": {
            "topkit": topkit.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    write_json(run / RESULT, record)
    return record


def take_weights(network: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Give a network its weights of a checkpoint."""
    prefix = "network."
    state = checkpoint["state_dict"].items()
    network.load_state_dict({n.removeprefix(prefix): v for n, v in state if n.startswith(prefix)})


@torch.no_grad()
def predictions(network: nn.Module, images: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of all images, and their labels, on the CPU."""
    network.eval()
    device = next(network.parameters()).device
    batches = EvaluationBatches(*in_memory(images, labels, device), EVALUATION_BATCH)
    logits = [network(batch).float().cpu() for batch, _ in batches]
    return torch.cat(logits), labels.cpu()
