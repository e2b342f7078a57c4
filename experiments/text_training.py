"""Losses on texts: a network with one hidden layer, which trains in seconds on a CPU."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from copy import deepcopy
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import cast

import torch
from torch import Tensor, nn

from experiments.experiment import Record, Request, device
from experiments.grid import Planned
from experiments.rows import short
from experiments.texts import Vectors, made_up, read_texts
from experiments.training import TrainingExperiment
from topklass import CosineClassifier, DeferredReweighting
from topklass._provenance import commit, versions
from topklass.data import Dataset, Split, generator
from topklass.functional import topk_accuracy
from topklass.train.details import hardware
from topklass.train.engine import LENGTHS
from topklass.train.problem import harder
from topklass.train.recipe import Recipe

HIDDEN, DROPOUT = 512, 0.5


class TextExperiment(TrainingExperiment):
    """An experiment that trains all runs of a plan on texts, with AdamW and no checkpoints."""

    samples = "texts"
    long_without_gpu = False

    def read(self, data: Path | None) -> tuple[Dataset, str]:
        """The texts, and a hash of those of the test."""
        return read(data)

    def finished(self, run: Planned, folder: Path) -> None:
        """Nothing: a run leaves its row, and no files."""

    def train(
        self, runs: list[Planned], request: Request, keep: Callable[[Planned, Record], object]
    ) -> None:
        """Train these runs, and call ``keep`` with the row of each when it ends."""
        rows = train_runs(runs, request.data, request.at_once)
        for number, (run, row) in enumerate(rows, 1):
            keep(run, row)
            shares = [f"{100 * row['test']['micro'][k - 1]:.1f}" for k in (1, run.recipe.k)]
            done = f"{number} of {len(runs)}"
            request.say(f"{run.name}: {' / '.join(shares)} %  ({done}, {row['seconds']:.0f} s)")


@cache
def read(data: Path | None) -> tuple[Dataset, str]:
    """The texts of a folder; None for those that are made up."""
    return made_up() if data is None else read_texts(data)


def train_runs(
    runs: list[Planned], data: Path | None, at_once: int
) -> Iterator[tuple[Planned, Record]]:
    """Runs and their rows, as they end."""
    if at_once == 1:
        yield from ((run, train_row(run, data)) for run in runs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(at_once, context, torch.set_num_threads, (1,)) as pool:
        started = {pool.submit(train_row, run, data): run for run in runs}
        try:
            for ended in as_completed(started):
                yield started[ended], ended.result()
        finally:
            pool.shutdown(cancel_futures=True)


def train_row(run: Planned, data: Path | None) -> Record:
    """Train a run; the row of the record is that of :func:`experiments.rows.row_of`.

    The best epoch is that with the largest mean of top-1 and top-k accuracy.
    """
    start, (texts, images) = time.perf_counter(), read(data)
    recipe, dataset = run.recipe, harder(texts, run.recipe)
    held = cast("Split", dataset.validation)
    lengths = list(dict.fromkeys((1, recipe.k)))
    validation: list[list[float]] = []
    both: list[float] = []
    best: dict[str, Tensor] = {}

    def after_epoch(network: nn.Module) -> None:
        validation.append(accuracies(network, held, lengths, recipe.average))
        both.append(short(fmean(validation[-1])))
        if both[-1] > max(both[:-1], default=-1):
            best.update(deepcopy(network.state_dict()))

    network = train(recipe, dataset, after_epoch)
    highest = [max(values) for values in zip(*validation, strict=True)]
    fitted = accuracies(network, dataset.train, lengths)
    last = tested(network, dataset)
    network.load_state_dict(best)
    return {
        **run.row,
        "test": tested(network, dataset),
        "test_last": last,
        "validation": {**dict(zip(map(str, lengths), highest, strict=True)), "both": max(both)},
        "training": dict(zip(map(str, lengths), fitted, strict=True)),
        "gradient": [],
        "curves": {},
        "classes": len(dataset.classes),
        "epoch": 1 + both.index(max(both)),
        "epochs": recipe.epochs,
        "seconds": round(time.perf_counter() - start, 1),
        "hardware": hardware(device()),
        "versions": versions(),
        "commit": commit(),
        "images": images,
    }


def train(
    recipe: Recipe, dataset: Dataset, after_epoch: Callable[[nn.Module], object]
) -> nn.Module:
    """A trained network; ``after_epoch`` is called with it after each epoch, to test it."""
    features, labels = vectors_of(dataset.train), dataset.train.labels
    size = recipe.batch_size
    torch.manual_seed(recipe.seed)
    network = build(features.shape[1], len(dataset.classes), recipe.head)
    criterion = recipe.criterion(dataset.counts)
    rate, decay = recipe.learning_rate, recipe.weight_decay
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=decay)
    steps = recipe.epochs * -(-len(labels) // size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps)
    for epoch in range(recipe.epochs):
        for module in criterion.modules():  # it may be inside another
            if isinstance(module, DeferredReweighting):
                module.set_epoch(epoch)
        network.train()
        order = torch.randperm(len(labels), generator=generator(recipe.seed, "order", epoch))
        for batch in torch.split(order, size):
            optimizer.zero_grad()
            criterion(network(features[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()
        after_epoch(network.eval())
    return network


def build(features: int, classes: int, head: str) -> nn.Module:
    """A network with one hidden layer and dropout."""
    last = CosineClassifier if head == "cosine" else nn.Linear
    return nn.Sequential(
        nn.Linear(features, HIDDEN), nn.ReLU(), nn.Dropout(DROPOUT), last(HIDDEN, classes)
    )


def vectors_of(split: Split) -> Tensor:
    """The vectors of all texts of a split."""
    return cast("Vectors", split.images).rows


def tested(network: nn.Module, dataset: Dataset) -> dict[str, list[float]]:
    """Test accuracies by how they are averaged."""
    return {
        average: accuracies(network, dataset.test, LENGTHS, average)
        for average in ("micro", "macro")
    }


@torch.no_grad()
def accuracies(
    network: nn.Module, split: Split, lengths: Sequence[int], average: str = "micro"
) -> list[float]:
    """Accuracies of lists of these lengths."""
    found = topk_accuracy(network(vectors_of(split)), split.labels, lengths, average)
    return [short(share) for share in found.tolist()]
