"""Parts of the training set: held out, balanced, long-tailed. Seeded and recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from topklass._checks import check_count, check_number
from topklass.data.dataset import Dataset, class_counts
from topklass.data.seeds import generator


def hold_out(dataset: Dataset, size: int, seed: int = 0) -> Dataset:
    """Take a class-balanced validation set from the training set.

    Args:
        dataset: one without a validation set.
        size: number of images; classes get the same number, or one more.
        seed: which images, and which classes get one more.

    Returns:
        The dataset with ``validation``, and ``train`` without these images.

    Example:
        >>> from topklass.data import Split
        >>> split = Split(torch.zeros(6, 1, 4, 4, dtype=torch.uint8), torch.arange(6) % 2)
        >>> data = hold_out(Dataset("toy", split, split, ("cat", "dog")), size=2)
        >>> data.validation.labels, data.counts
        (tensor([0, 1]), tensor([2, 2]))
    """
    if dataset.validation is not None:
        raise ValueError(f"{dataset.name} has a validation set already")
    wanted = _balanced_counts(dataset, size, seed)
    held = _choose(dataset, wanted, generator(seed, "hold out"))
    return dataset.changed(
        {"step": "hold_out", "size": size, "seed": seed},
        train=dataset.train.take((~held).nonzero().squeeze(1)),
        validation=dataset.train.take(held.nonzero().squeeze(1)),
    )


def balanced_subset(dataset: Dataset, size: int, seed: int = 0) -> Dataset:
    """Keep so many training images, the same number of every class (Berrada et al., section 5.2).

    Args:
        dataset: any.
        size: number of images to keep; classes keep the same number, or one more.
        seed: which images. With the same seed a smaller subset is a part of a larger one.

    Returns:
        The dataset with a smaller ``train``.

    Example:
        >>> from topklass.data import Split
        >>> split = Split(torch.zeros(6, 1, 4, 4, dtype=torch.uint8), torch.arange(6) % 2)
        >>> balanced_subset(Dataset("toy", split, split, ("cat", "dog")), size=4).counts
        tensor([2, 2])
    """
    wanted = _balanced_counts(dataset, size, seed)
    step = {"step": "balanced_subset", "size": size, "seed": seed}
    return _kept(dataset, wanted, step)


def long_tail(dataset: Dataset, imbalance: float = 100.0, seed: int = 0) -> Dataset:
    r"""Keep ever fewer training images of later classes.

    .. math:: n_c = n_{max} \, I^{-c/(C-1)}, \qquad c = 0 \dots C-1

    as in CIFAR-100-LT (Cao et al. 2019). Counts are rounded down, but not to 0.

    Args:
        dataset: any; n_max is the number of training images of its smallest class.
        imbalance: I, how many times more images the first class has than the last; at least 1.
        seed: which images.

    Returns:
        The dataset with a smaller ``train``; its ``counts`` are what margins are made of.

    Example:
        >>> from topklass.data import Split
        >>> labels = torch.arange(3).repeat_interleave(100)
        >>> split = Split(torch.zeros(300, 1, 4, 4, dtype=torch.uint8), labels)
        >>> long_tail(Dataset("toy", split, split, ("cat", "dog", "cow"))).counts
        tensor([100,  10,   1])
    """
    check_number("imbalance", imbalance, positive=True)
    if imbalance < 1:
        raise ValueError(f"imbalance must be at least 1, got imbalance={imbalance}")
    most, classes = int(dataset.counts.min()), len(dataset.classes)
    if most == 0:
        raise ValueError("a class without training images cannot be a part of a long tail")
    wanted = [most * imbalance ** (-c / max(classes - 1, 1)) for c in range(classes)]
    # 1e-9: a count that is whole stays whole
    counts = torch.tensor([max(1, int(count + 1e-9)) for count in wanted])
    step = {"step": "long_tail", "imbalance": float(imbalance), "seed": seed}
    return _kept(dataset, counts, step)


def _kept(dataset: Dataset, wanted: Tensor, step: dict[str, Any]) -> Dataset:
    kept = _choose(dataset, wanted, generator(step["seed"], "subset"))
    return dataset.changed(step, train=dataset.train.take(kept.nonzero().squeeze(1)))


def _balanced_counts(dataset: Dataset, size: int, seed: int) -> Tensor:
    """How many of each class, (C), to have so many in all."""
    check_count("size", size, len(dataset.train), "the number of training images")
    classes = len(dataset.classes)
    wanted = torch.full((classes,), size // classes)
    wanted[torch.randperm(classes, generator=generator(seed, "one more"))[: size % classes]] += 1
    lacking = ((class_counts(dataset.train, classes).cpu() < wanted).nonzero()).squeeze(1)
    if len(lacking):
        name, count = dataset.classes[lacking[0]], int(dataset.counts[lacking[0]])
        raise ValueError(
            f"{size} images with the same number of each class take {int(wanted[lacking[0]])} of "
            f"{name!r}, which has {count} training images: choose a smaller size"
        )
    return wanted


def _choose(dataset: Dataset, wanted: Tensor, stream: torch.Generator) -> Tensor:
    """Mask (N) of so many random training images of each class."""
    labels = dataset.train.labels.cpu()
    shuffled = torch.randperm(len(labels), generator=stream)
    order = shuffled[labels[shuffled].argsort(stable=True)]
    counts = torch.bincount(labels, minlength=len(wanted))
    starts = counts.cumsum(0) - counts
    rank = torch.arange(len(labels)) - starts[labels[order]]
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    chosen[order] = rank < wanted[labels[order]]
    return chosen
