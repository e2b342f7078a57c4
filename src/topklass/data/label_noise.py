"""Wrong labels, seeded and recorded: within superclasses, within blocks, among all classes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from topklass._checks import is_number
from topklass.data.dataset import Dataset, Split
from topklass.data.seeds import generator

BLOCK = 5


def superclass_noise(
    dataset: Dataset, p: float, seed: int = 0, *, validation: bool = False
) -> Dataset:
    """Replace training labels by labels of the same superclass (Berrada et al., section 5.1).

    With probability p a label is replaced by one of its superclass, drawn uniformly,
    the old one included: of a superclass of 5, p · 4/5 of the labels change.

    Args:
        dataset: one with superclasses.
        p: probability of resampling a label, 0 to 1.
        seed: which labels, and by which.
        validation: whether to resample validation labels, too.

    Returns:
        The dataset with other labels.

    Example:
        >>> from topklass.data import Split, Superclasses
        >>> split = Split(torch.zeros(4, 1, 4, 4, dtype=torch.uint8), torch.arange(4))
        >>> kinds = {"kind": Superclasses(("pet", "farm"), torch.tensor([0, 0, 1, 1]))}
        >>> toy = Dataset("toy", split, split, ("cat", "dog", "cow", "pig"), superclasses=kinds)
        >>> noisy = superclass_noise(toy, p=1.0).train.labels
        >>> kinds["kind"].of_class[noisy]
        tensor([0, 0, 1, 1])
    """
    if not dataset.superclasses:
        raise ValueError(
            f"{dataset.name} has no superclasses: block noise and symmetric noise need none "
            "(--noise-kind symmetric)"
        )
    by, division = next(iter(dataset.superclasses.items()))
    step = {"step": "superclass_noise", "by": by}
    return _with_noise(dataset, division.of_class, p, seed, step, validation)


def block_noise(dataset: Dataset, p: float, seed: int = 0, *, validation: bool = False) -> Dataset:
    """Replace training labels by labels of the same block of five consecutive classes.

    With probability p the label y becomes y − y mod 5 + U{0, …, 4}. On the alphabetical labels of
    CIFAR-100 the published code of Berrada et al. and of Garcin et al. does this, although both
    papers say superclass: compare with the numbers that they print under this noise.

    Args:
        dataset: any.
        p: probability of resampling a label, 0 to 1.
        seed: which labels, and by which.
        validation: whether to resample validation labels, too.

    Returns:
        The dataset with other labels.

    Example:
        >>> split = Split(torch.zeros(10, 1, 4, 4, dtype=torch.uint8), torch.arange(10))
        >>> noisy = block_noise(Dataset("toy", split, split, tuple("abcdefghij")), p=1.0)
        >>> noisy.train.labels // 5
        tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 1])
    """
    group = torch.arange(len(dataset.classes)) // BLOCK
    step = {"step": "block_noise", "block": BLOCK}
    return _with_noise(dataset, group, p, seed, step, validation)


def symmetric_noise(
    dataset: Dataset, p: float, seed: int = 0, *, validation: bool = False
) -> Dataset:
    """Replace training labels by labels of any class.

    With probability p a label is replaced by one of all C classes, drawn uniformly, the old
    one included: p · (C − 1)/C of the labels change.

    Args:
        dataset: any.
        p: probability of resampling a label, 0 to 1.
        seed: which labels, and by which.
        validation: whether to resample validation labels, too.

    Returns:
        The dataset with other labels.

    Example:
        >>> split = Split(torch.zeros(1000, 1, 4, 4, dtype=torch.uint8), torch.zeros(1000).long())
        >>> noisy = symmetric_noise(Dataset("toy", split, split, ("cat", "dog")), p=0.4)
        >>> noisy.record["steps"][0]["changed"]  # about 0.4 · 1/2 of all
        188
    """
    group = torch.zeros(len(dataset.classes), dtype=torch.int64)
    return _with_noise(dataset, group, p, seed, {"step": "symmetric_noise"}, validation)


def _with_noise(
    dataset: Dataset,
    group: Tensor,
    p: float,
    seed: int,
    step: Mapping[str, object],
    validation: bool,
) -> Dataset:
    """Resample labels within their group of classes, (C)."""
    if not is_number(p) or not 0 <= p <= 1:
        raise ValueError(f"p must be a probability, from 0 to 1, got p={p!r}")
    splits = {"train": dataset.train}
    if validation and dataset.validation is not None:
        splits["validation"] = dataset.validation
    noisy, changed = {}, {}
    for name, split in splits.items():
        clean = split.labels
        labels = _resampled(clean.cpu(), group.cpu(), p, generator(seed, "noise", name))
        noisy[name] = Split(split.images, labels.to(clean.device))
        changed[name] = int((noisy[name].labels != clean).sum())
    record = {**step, "p": float(p), "seed": seed, "changed": changed.pop("train")}
    if changed:
        record["changed_validation"] = changed["validation"]
    return dataset.changed(record, **noisy)


def _resampled(labels: Tensor, group: Tensor, p: float, stream: torch.Generator) -> Tensor:
    """Labels (N), resampled with probability p, uniformly from the classes of their group."""
    members = group.argsort(stable=True)
    sizes = torch.bincount(group)
    starts = sizes.cumsum(0) - sizes
    again, which = torch.rand(2, len(labels), generator=stream, dtype=torch.float64)
    own = group[labels]
    drawn = members[starts[own] + (which * sizes[own]).long()]
    return torch.where(again < p, drawn, labels)
