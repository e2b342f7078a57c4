"""From a recipe to a finished run."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from torch import Tensor, nn

from topklass import models
from topklass._files import ADVICE, WriteError, lock_folder, remove_parts
from topklass._provenance import commit, versions
from topklass.data import Dataset, Split, cutout, random_crop
from topklass.functional.accuracy import among_largest, averaged, count_by_class
from topklass.train.batches import Batch, EvaluationBatches, ShuffledBatches, TrainingBatches
from topklass.train.criterion import loss_info
from topklass.train.details import DETAILS, RESULT, details, hardware, read_details, read_result
from topklass.train.file_batches import FileEvaluationBatches, FileTrainingBatches
from topklass.train.file_check import advice_on_broken_files, require_readable
from topklass.train.file_views import centre_view, training_view, worker_count
from topklass.train.files import load_checkpoint, put_in_place
from topklass.train.heads import Head
from topklass.train.module import Classifier
from topklass.train.problem import naming_recipe, prepare_data, with_validation
from topklass.train.processes import (
    ending_with_launcher,
    naming_ended_ranks,
    warn_of_few_cores,
)
from topklass.train.recipe import Recipe, changes, has_changed
from topklass.train.records import BrokenFileError, write_record
from topklass.train.restore import (
    BEST,
    LAST,
    MAY_CHANGE,
    RECIPE,
    load_from,
    load_weights,
    read_recipe,
    resumable,
)
from topklass.train.sharded_head import check_can_split
from topklass.train.signature import (
    build_network,
    load_signature,
    require_same_data,
    signature_of,
)
from topklass.train.trainer import METRICS, fit, make_trainer, quiet, write_epochs

SIGNATURE = "signature.json"
LENGTHS = tuple(range(1, 11))
"""Of the lists whose accuracy is recorded."""
EVALUATION_BATCH = 1024


def train(
    recipe: Recipe,
    run: str | Path,
    *,
    resume: bool = False,
    dataset: Dataset | None = None,
    console: Console | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train by a recipe, and leave checkpoints, logs and results in the folder ``run``.

    Ctrl-C ends it after the current step, with a checkpoint; so does a termination signal.

    Args:
        recipe: all settings.
        run: a folder, new unless an interrupted run is continued there.
        resume: continue from the last checkpoint; the result is that of a run without interruption.
            A finished run is left as it is, unless one of its records is broken, which is made
            again.
        dataset: instead of the recipe's, without label noise. Without validation images a
            tenth of the training images is held out.
        console: where progress is shown; None for silence.
        callbacks: more of Lightning's.

    Returns:
        The record that is also written to ``run/result.json``; of several processes only the first
        has it.
    """
    run = Path(run)
    first = getattr(rank_zero_only, "rank", 0) == 0
    if first:
        check_run(recipe, run, resume)
    if resume and is_complete(run):
        return read_result(run) if first else {}
    with ending_with_launcher(), lock_folder(run) if first else nullcontext():
        return _train(recipe, run, resume, dataset, console, callbacks, first)


def _train(
    recipe: Recipe,
    run: Path,
    resume: bool,
    dataset: Dataset | None,
    console: Console | None,
    callbacks: Sequence[Callback],
    first: bool,
) -> dict[str, Any]:
    """What each of several processes does."""
    with naming_recipe(run / RECIPE) if resume else nullcontext():
        dataset = prepare_data(recipe) if dataset is None else with_validation(dataset, recipe)
        signature = signature_of(recipe, dataset)
        network = build_network(recipe, signature, pretrained=recipe.pretrained)
    if resume:
        require_same_data(run / SIGNATURE, signature)
    batches = training_batches(recipe, dataset.train)
    assert dataset.validation is not None
    validation = evaluation_batches(recipe, dataset.validation)
    processes = recipe.devices * recipe.nodes
    if recipe.shard_classes and processes > 1:
        check_can_split(network, len(dataset.classes), processes)
    if first and console is not None:
        console.print(description(recipe, dataset, network), markup=False, soft_wrap=True)
    if first and console is not None and recipe.match and loss_info(recipe.loss).matched:
        console.print(
            "The loss is taken on the scale of cross-entropy, whose learning rate then fits it "
            "(--no-match for the paper's scale)."
        )
    parameters = models.count_parameters(network)  # before it is divided
    module = Classifier(
        network,
        recipe.criterion(dataset.counts),
        recipe,
        len(dataset.classes),
        recipe.epochs * len(batches),
    )
    if first:  # not before: all mistakes in the settings have been found by now
        if not resume:
            require_readable(dataset, worker_count(recipe))
        (run / RESULT).unlink(missing_ok=True)
        for folder in (run, run / "checkpoints"):
            remove_parts(folder)
        run.mkdir(parents=True, exist_ok=True)
        recipe.save(run / RECIPE)
        signature.save(run / SIGNATURE)
    with quiet():
        trainer = make_trainer(recipe, run, module, console, callbacks)
    if first:
        warn_of_few_cores(trainer)
    device = trainer.strategy.root_device
    for each in (batches, validation):
        each.share(trainer.global_rank, trainer.world_size, device)
    last = resumable(run / LAST) if resume else None
    if last is not None:  # Lightning restores the loader in the middle of an epoch, not at its end
        last, checkpoint = load_from(last, recipe, network)
        epoch, step = divmod(checkpoint["global_step"], len(batches))
        batches.load_state_dict({"epoch": epoch, "step": step})
    module.began = time.perf_counter()
    with advice_on_full_disks(run), advice_on_broken_files():
        try:
            fit(trainer, module, batches, validation, ckpt_path=last)
        finally:
            if recipe.compile:  # free its graphs; a process may have but a few compilations
                torch.compiler.reset()
        seconds = time.perf_counter() - module.began
        if not first and module.head.processes == 1:
            return {}

        def ranks(checkpoint: dict[str, Any]) -> Tensor:
            whole = build_network(recipe, signature)  # the trained one may be in pieces
            load_weights(whole, checkpoint)
            head = module.head.with_network(whole)
            return label_ranks(recipe, whole.to(device), dataset.test, head)

        with naming_ended_ranks(trainer):
            tested = test_checkpoints(run, ranks)
        if not first:
            return {}
        write_epochs(run / METRICS, module.epochs)
        measured = {
            "parameters": parameters,
            "seconds": round(seconds, 1),
            "hardware": hardware(device),
        }
        return finish(recipe, run, dataset, tested, module.epochs, measured)


def is_complete(run: Path) -> bool:
    """Whether a run is finished, and its records are whole; a warning names one that is not."""
    if not (run / RESULT).exists():
        return False
    try:
        read_result(run), read_details(run), load_signature(run / SIGNATURE)
    except (BrokenFileError, FileNotFoundError) as error:
        warnings.warn(str(error), stacklevel=2)
        return False
    return True


@contextmanager
def advice_on_full_disks(run: Path) -> Iterator[None]:
    """Add to the error of a file that cannot be written how to go on."""
    try:
        yield
    except WriteError as error:
        raise WriteError(f"{error}, and continue with --resume") from error
    except OSError as error:  # of TensorBoard
        if error.errno not in ADVICE:
            raise
        sentence = f"cannot write into {run}: {error.strerror}; {ADVICE[error.errno]}"
        raise WriteError(f"{sentence}, and continue with --resume") from error


def description(recipe: Recipe, dataset: Dataset, network: nn.Module) -> str:
    """A line about data and network."""
    assert dataset.validation is not None
    splits = {
        "training": dataset.train,
        "validation": dataset.validation,
        "test": dataset.test,
    }
    images = ", ".join(f"{len(split):,} {name}" for name, split in splits.items())
    millions = models.count_parameters(network) / 1e6
    suits = recipe.model != "convnet" or isinstance(dataset.train.images, Tensor)
    return (
        f"{dataset.name}: {len(dataset.classes):,} classes; {images} images; {recipe.model}, "
        f"{millions:.2f} M parameters"
        + ("" if suits else " (made for small images; for files take --model resnet18 or larger)")
    )


def check_run(recipe: Recipe, run: Path, resume: bool) -> None:
    """Check that nothing is overwritten, or that there is a run to continue."""
    saved = run / RECIPE
    if resume:
        if not saved.exists():
            raise FileNotFoundError(f"there is no run to continue in {run}: it has no {RECIPE}")
        if differing := changes(recipe, read_recipe(run), MAY_CHANGE):
            raise ValueError(
                f"{saved} is another recipe than the one given, {differing}: continue with no "
                "options but those of data and hardware, or train in another folder"
            )
        if resumable(run / LAST) is None and has_changed(saved):  # no checkpoint to compare with
            raise BrokenFileError(
                f"{saved} has changed since it was written, and there is no checkpoint yet: train "
                "without --resume"
            )
    elif saved.exists() and (resumable(run / LAST) or (run / RESULT).exists()):
        raise FileExistsError(
            f"there is a run in {run} already: continue it with --resume, or choose another folder"
        )


def training_batches(recipe: Recipe, split: Split) -> ShuffledBatches:
    """Batches, augmented as the recipe says."""
    images, labels, size, seed = split.images, split.labels, recipe.batch_size, recipe.seed
    if not isinstance(images, Tensor):
        view, workers = training_view(recipe), worker_count(recipe)
        return FileTrainingBatches(images, labels, size, seed, view, workers)
    flip = bool(recipe.flip)
    shift = partial(random_crop, pad=recipe.pad, flip=flip, border=recipe.border)

    def augment(images: Tensor, stream: torch.Generator) -> Tensor:
        shifted = shift(images, stream)
        return cutout(shifted, stream, size=recipe.cutout) if recipe.cutout else shifted

    return TrainingBatches(images, labels, size, seed, augment)


def evaluation_batches(recipe: Recipe, split: Split) -> EvaluationBatches | FileEvaluationBatches:
    """Batches of all samples."""
    images, labels = split.images, split.labels
    if isinstance(images, Tensor):
        return EvaluationBatches(images, labels, EVALUATION_BATCH)
    view, workers = centre_view(recipe), worker_count(recipe)
    return FileEvaluationBatches(images, labels, recipe.batch_size, view, workers)


class Tested(NamedTuple):
    """A checkpoint on the test images."""

    epoch: int
    ranks: Tensor
    """How many logits are larger than the label's, (N)."""


def test_checkpoints(run: Path, ranks: Callable[[dict[str, Any]], Tensor]) -> tuple[Tested, Tested]:
    """The best and the last checkpoint; ``ranks`` returns those of the test labels."""
    best = load_checkpoint(run / BEST, predecessor=False)  # that is of another epoch
    last = load_checkpoint(run / LAST)
    tested = Tested(best["epoch"], ranks(best))
    if last["epoch"] == best["epoch"]:
        return tested, tested
    return tested, Tested(last["epoch"], ranks(last))


def finish(
    recipe: Recipe,
    run: Path,
    dataset: Dataset,
    tested: tuple[Tested, Tested],
    epochs: list[dict[str, float]],
    measured: dict[str, Any],
) -> dict[str, Any]:
    """Write the records of a run that was tested."""
    for path in (run / BEST, run / LAST):
        put_in_place(path)
    best, last = tested
    record = {
        "recipe": asdict(recipe),
        "data": dict(dataset.record),
        "classes": len(dataset.classes),
        "epoch": best.epoch,
        "test": accuracies(best.ranks, dataset),
        "test_last": accuracies(last.ranks, dataset),
        "versions": versions(),
        "commit": commit(),
        **measured,
    }
    write_record(run / DETAILS, details(dataset, best.ranks, epochs))
    write_record(run / RESULT, record)
    return record


def accuracies(ranks: Tensor, dataset: Dataset) -> dict[str, dict[str, float]]:
    """Test accuracies of lists from the ranks of labels, by average and by length, for JSON."""
    labels, classes = dataset.test.labels.cpu(), len(dataset.classes)
    lengths = tuple(k for k in LENGTHS if k <= classes)
    counts = count_by_class(among_largest(ranks, lengths), labels, classes, ignore_index=-100)
    return {
        average: dict(zip(map(str, lengths), averaged(*counts, average).tolist(), strict=True))
        for average in ("micro", "macro")
    }


@torch.no_grad()
def label_ranks(recipe: Recipe, network: nn.Module, split: Split, head: Head) -> Tensor:
    """Ranks of all labels, on the CPU; logits are those of a batch at most."""
    network.eval()
    device = next(network.parameters()).device
    batches = evaluation_batches(recipe, split)
    batches.share(head.rank, head.processes, device)
    found = []
    for images, labels in batches:
        output = network(images.to(device))
        found.append(head.ranks(output, head.targets(labels.to(device))))
    return head.in_order(torch.cat(found)).cpu()


@torch.no_grad()
def predictions(
    recipe: Recipe,
    network: nn.Module,
    split: Split,
    watch: Callable[[Iterable[Batch]], Iterable[Batch]] = iter,
) -> Tensor:
    """Logits of all images, on the CPU; ``watch`` passes the batches on, and may show progress."""
    network.eval()
    device = next(network.parameters()).device
    batches = watch(evaluation_batches(recipe, split))
    return torch.cat([network(images.to(device)).float().cpu() for images, _ in batches])
