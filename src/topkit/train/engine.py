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
from topkit.data import Dataset, Normalize, Split, random_crop
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
    batches = training_batches(recipe, dataset.train)
    assert dataset.validation is not None
    validation = evaluation_batches(dataset.validation)
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
    device = trainer.strategy.root_device
    for each in (batches, validation):
        each.share(trainer.global_rank, trainer.world_size, device)
    last = resumable(run / LAST) if resume else None
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
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        network = models.build(
            recipe.model,
            len(dataset.classes),
            channels=in_memory(dataset.train).shape[1],
            head=recipe.head,
        )
    return nn.Sequential(Normalize.of(dataset.train), network)


def training_batches(recipe: Recipe, split: Split) -> TrainingBatches:
    """Batches, augmented as the recipe says."""
    augment = partial(random_crop, pad=recipe.pad, flip=recipe.flip, border=recipe.border)
    return TrainingBatches(in_memory(split), split.labels, recipe.batch_size, recipe.seed, augment)


def evaluation_batches(split: Split) -> EvaluationBatches:
    """Batches of all samples."""
    return EvaluationBatches(in_memory(split), split.labels, EVALUATION_BATCH)


def in_memory(split: Split) -> Tensor:
    """The images of a split, if they are a tensor."""
    if not isinstance(split.images, Tensor):
        raise NotImplementedError(
            "the images are read from files; only images in memory can be trained on so far"
        )
    return split.images


def finish(
    recipe: Recipe, run: Path, dataset: Dataset, network: nn.Module, seconds: float
) -> dict[str, Any]:
    """Measure the best checkpoint on the test set, and write the record of the run."""
    best = load_checkpoint(run / BEST)
    take_weights(network, best)
    logits = predictions(network, dataset.test)
    lengths, accuracy = accuracies(logits, dataset.test.labels.cpu())
    record = {
        "recipe": asdict(recipe),
        "data": dict(dataset.record),
        "classes": len(dataset.classes),
        "parameters": models.count_parameters(network),
        "epoch": best["epoch"],
        "test": {
            average: dict(zip(map(str, lengths), values, strict=True))
            for average, values in accuracy.items()
        },
        "seconds": round(seconds, 1),
        "versions": {
            "topkit": topkit.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    write_json(run / RESULT, record)
    return record


def accuracies(logits: Tensor, labels: Tensor) -> tuple[list[int], dict[str, list[float]]]:
    """Lengths of lists, and their accuracies, micro and macro."""
    lengths = [k for k in LENGTHS if k <= logits.shape[1]]
    return lengths, {
        average: topkit.topk_accuracy(logits, labels, lengths, average).tolist()
        for average in ("micro", "macro")
    }


def take_weights(network: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Give a network its weights of a checkpoint."""
    prefix = "network."
    state = checkpoint["state_dict"].items()
    network.load_state_dict({n.removeprefix(prefix): v for n, v in state if n.startswith(prefix)})


@torch.no_grad()
def predictions(network: nn.Module, split: Split) -> Tensor:
    """Logits of all images, on the CPU."""
    network.eval()
    device = next(network.parameters()).device
    batches = evaluation_batches(split)
    return torch.cat([network(images.to(device)).float().cpu() for images, _ in batches])
