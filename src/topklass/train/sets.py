"""Sets of labels on the test images of a run: coverage and size of every method."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from topklass import ConformalSets, TopKSets
from topklass.data.seeds import generator
from topklass.metrics import SetCoverage, SetSize
from topklass.train.engine import predictions
from topklass.train.evaluation import Run
from topklass.train.prediction import scale_of
from topklass.train.problem import with_validation

SETS_FIGURE = "sets.png"
CALIBRATE_ON = ("validation", "test")
AT_ONCE = 1024
"""Images whose sets are made at once."""
HALF = 0.5
"""Weight of the thresholds of classes in "LAC between"."""

Sets = ConformalSets | TopKSets
Each = TypeVar("Each")


def compare_sets(
    run: Run,
    alpha: float = 0.1,
    *,
    max_size: int | None = None,
    calibrate_on: str = "validation",
    console: Console | None = None,
) -> dict[str, Any]:
    """Calibrate every kind of sets, and measure it on the test images.

    Args:
        run: of :func:`topklass.train.load_run`.
        alpha: how often the right label may be missing.
        max_size: largest number of labels, or None.
        calibrate_on: ``"validation"``, the images that have chosen the checkpoint, or ``"test"``, a
            random half of the test images, the other half of which is measured.
        console: where progress is shown; None for silence.

    Returns:
        ``sets``: for each method its name, ``coverage`` (micro, macro, that of the worst class),
        mean ``size``, share of ``empty`` sets, and coverage ``by_class``, None without test images;
        ``left_out``: why methods are missing; ``counts``: training images of each class.
    """
    if calibrate_on not in CALIBRATE_ON:
        raise ValueError(f"calibrate_on must be validation or test, got {calibrate_on!r}")
    recipe, classes = run.recipe, len(run.dataset.classes)
    dataset = with_validation(run.dataset, recipe)
    assert dataset.validation is not None
    temperature = scale_of(recipe, classes)["temperature"]

    def logits_of(name: str) -> tuple[Tensor, Tensor]:
        split = dataset.splits[name]
        with progress(console, f"{name} images") as watch:
            logits = predictions(recipe, run.network, split, watch)
        return logits / temperature, split.labels.cpu()

    new, labels = logits_of("test")
    if calibrate_on == "validation":
        known, target = logits_of("validation")
        warn_of_other_labels(run, target, labels)
    else:
        order = torch.randperm(len(labels), generator=generator(recipe.seed, "half of the test"))
        first, second = order.tensor_split(2)
        known, target, new, labels = new[first], labels[first], new[second], labels[second]
    found: list[dict[str, Any]] = []
    left_out: list[str] = []
    for name, make in methods(alpha, max_size, dataset.counts.cpu(), recipe.k).items():
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*cannot be covered")  # the table shows it
                title, sets = make(known, target, generator(recipe.seed, "sets", name))
        except ValueError as error:
            left_out.append(f"{name}: {error}")
            continue
        found.append({"name": title, **measure(sets, new, labels, classes)})
    if len(found) == 1:  # top-k, which always can
        raise ValueError(left_out[0])
    return {
        "alpha": alpha,
        "max_size": max_size,
        "calibrated_on": {"images": calibrate_on, "number": len(target)},
        "test": len(labels),
        "counts": dataset.counts.tolist(),
        "sets": found,
        "left_out": left_out,
    }


Make = Callable[[Tensor, Tensor, torch.Generator], tuple[str, Sets]]
"""From logits, labels and a source of random numbers to calibrated sets with their name."""


def methods(alpha: float, max_size: int | None, counts: Tensor, k: int) -> dict[str, Make]:
    """What is compared, by name."""

    def fixed(name: str, **options: Any) -> Make:
        sets = ConformalSets(alpha, max_size=max_size, **options)
        return lambda *samples: (name, sets.calibrate(*samples[:2], generator=samples[2]))

    def tuned(name: str, score: str) -> Make:
        def make(logits: Tensor, target: Tensor, stream: torch.Generator) -> tuple[str, Sets]:
            sets = ConformalSets.tuned(
                logits, target, alpha, score=score, max_size=max_size, generator=stream
            )
            free = f", k_reg = {sets.k_reg}" if score == "aps" and sets.penalty else ""
            return f"{name}, λ = {sets.penalty:g}{free}", sets

        return make

    lists = k if max_size is None else min(k, max_size)
    return {
        "top-k": lambda *_: (f"top-{lists}", TopKSets(lists)),
        "LAC": fixed("LAC", score="lac"),
        "APS": fixed("APS"),
        "RAPS": tuned("RAPS", "aps"),
        "SAPS": tuned("SAPS", "saps"),
        "PAS": fixed("PAS", score="pas", counts=counts),
        "LAC by class": fixed("LAC by class", score="lac", calibration="class"),
        "LAC between": fixed(
            "LAC, half by class", score="lac", calibration="class", class_weight=HALF
        ),
        "LAC by cluster": fixed("LAC by cluster", score="lac", calibration="clustered"),
    }


def measure(sets: Sets, logits: Tensor, labels: Tensor, classes: int) -> dict[str, Any]:
    """Coverage and size of sets."""
    averages = {name: SetCoverage(classes, name) for name in ("micro", "macro")}
    by_class, size, empty = SetCoverage(classes, None), SetSize(), 0
    for rows, right in zip(*(torch.split(each, AT_ONCE) for each in (logits, labels)), strict=True):
        members = sets(rows)
        for metric in (*averages.values(), by_class):
            metric.update(members, right)
        size.update(members)
        empty += int((~members.any(1)).sum())
    shares = [None if math.isnan(share) else share for share in by_class.compute().tolist()]
    coverage = {name: metric.compute().item() for name, metric in averages.items()}
    return {
        "coverage": {**coverage, "worst": min(share for share in shares if share is not None)},
        "size": size.compute().item(),
        "empty": empty / len(labels),
        "by_class": shares,
    }


def warn_of_other_labels(run: Run, validation: Tensor, test: Tensor) -> None:
    """Warn if validation labels are noisy, or classes not as frequent as in the test images."""
    advice = "the coverage asked for may be missed; --calibrate-on test takes half of the others"
    if run.recipe.noise and run.recipe.noisy_validation:
        warnings.warn(f"validation labels are noisy: {advice}", stacklevel=3)
    if are_unlike(validation, test, len(run.dataset.classes)):
        warnings.warn(
            f"classes are not as frequent in the validation images as in the test images: {advice}",
            stacklevel=3,
        )


def are_unlike(labels: Tensor, others: Tensor, classes: int) -> bool:
    """Whether a tenth more of the samples are of other classes than chance explains.

    Example:
        >>> few, many = torch.arange(10) % 2, torch.zeros(10, dtype=torch.long)
        >>> are_unlike(few, few, 2), are_unlike(few.repeat(100), many.repeat(100), 2)
        (False, True)
    """
    shares = [torch.bincount(each, minlength=classes) / len(each) for each in (labels, others)]
    distance = 0.5 * float((shares[0] - shares[1]).abs().sum())
    chance = math.sqrt(classes / (2 * math.pi) * (1 / len(labels) + 1 / len(others)))
    return distance > 0.1 + chance


@contextmanager
def progress(
    console: Console | None, what: str
) -> Iterator[Callable[[Iterable[Each]], Iterable[Each]]]:
    """A bar on a terminal, which moves with what is iterated."""
    if console is None or not console.is_terminal:
        yield lambda steps: steps
        return
    with Progress(console=console, transient=True) as bar:
        yield lambda steps: bar.track(steps, description=what)
