"""What a run's network takes and what its outputs mean: enough to use it without its data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from reprlib import repr

import torch
from torch import Tensor, nn

from topklass import models
from topklass.data import IMAGENET, Dataset, Normalize, Split
from topklass.train.criterion import loss_info
from topklass.train.details import printable
from topklass.train.file_views import centre_view
from topklass.train.recipe import Recipe
from topklass.train.records import REMAKE, BrokenFileError, naming, read_record, write_record

COSINE_SCALE = 16.0
"""Of a cosine head, for losses that do not scale its scores themselves."""


@dataclass(frozen=True)
class Signature:
    """Images that a network takes, and the classes of its logits.

    Args:
        classes: their names.
        channels: 1 for grey images, 3 for colour.
        height: of the images.
        width: of the images.
        resize: the shorter side of a picture before the crop of that size; None where the network
            saw small images whole.
        mean: of each channel, subtracted from pixels from 0 to 1.
        std: of each channel, by which they are divided then.
    """

    classes: tuple[str, ...]
    channels: int
    height: int
    width: int
    resize: int | None
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        write_record(path, asdict(self))


def load_signature(path: Path) -> Signature:
    """Read it from JSON."""
    record = read_record(path, Signature)
    with naming(path, REMAKE.format(path.parent)):
        for name in ("classes", "mean", "std"):
            record[name] = tuple(record[name])
        signature = Signature(**record)
        if signature.channels not in (1, 3) or min(signature.height, signature.width) < 1:
            raise ValueError("it must have images with 1 or 3 channels and some pixels")
        if not len(signature.mean) == len(signature.std) == signature.channels:
            raise ValueError("it must have a mean and a deviation of each channel")
        return signature


def require_same_data(path: Path, now: Signature) -> None:
    """Require the signature that a run began with; one that is broken is made again."""
    try:
        before = load_signature(path)
    except (BrokenFileError, FileNotFoundError):
        return
    for name in (each.name for each in fields(Signature)):
        if (was := getattr(before, name)) != (found := getattr(now, name)):
            raise ValueError(
                f"the data have changed since {path} was written: {name} was {repr(was)} and is "
                f"{repr(found)}; restore the data, or train in another folder"
            )


def signature_of(recipe: Recipe, dataset: Dataset) -> Signature:
    """The signature of a network for a data set."""
    images = dataset.train.images
    resize = None if isinstance(images, Tensor) else recipe.shorter_side
    example = images[0] if isinstance(images, Tensor) else centre_view(recipe)(images[0])
    channels, height, width = example.shape
    normal = normalization(dataset.train, channels)
    mean, std = tuple(normal.mean.tolist()), tuple(normal.std.tolist())
    return Signature(tuple(printable(dataset.classes)), channels, height, width, resize, mean, std)


def normalization(split: Split, channels: int) -> Normalize:
    """By the images in memory; files are not all read for it, but have ImageNet's statistics.

    Grey ones have the mean over its channels.
    """
    if split.in_memory:
        return Normalize.of(split)
    mean, std = torch.tensor(IMAGENET)
    return Normalize(mean, std) if channels == 3 else Normalize(mean.mean()[None], std.mean()[None])


def build_network(recipe: Recipe, signature: Signature, *, pretrained: bool = False) -> nn.Module:
    """The recipe's network, from bytes to logits; its random weights depend on the seed alone.

    The memory format is channels last, the fastest one on CPUs and GPUs. Weights of ImageNet are
    only needed to begin training, not to load a checkpoint.
    """
    scaled = recipe.head == "cosine" and loss_info(recipe.loss).scores_need_scale
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        network = models.build(
            recipe.model,
            len(signature.classes),
            channels=signature.channels,
            image_size=None if signature.resize is None else signature.height,
            head=recipe.head,
            scale=COSINE_SCALE if scaled else None,
            pretrained=pretrained,
        )
    whole = nn.Sequential(Normalize(signature.mean, signature.std), network)
    return whole.to(memory_format=torch.channels_last)
