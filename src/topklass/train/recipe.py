"""What a training run is: every setting, from YAML or the command line, saved with the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from hashlib import blake2b
from math import inf
from pathlib import Path
from reprlib import repr as short
from typing import Any, get_args, get_type_hints

import torch
import yaml
from torch import Tensor, nn

import topklass
from topklass._checks import did_you_mean, is_number
from topklass._files import write_whole
from topklass.reference.power_sums import LARGEST_K
from topklass.train.criterion import (
    LOSSES,
    build_loss,
    loss_info,
    unknown_options,
)
from topklass.train.records import naming

CHOICES = {
    "noise_kind": ("superclass", "block", "symmetric"),
    "head": ("linear", "cosine"),
    "border": ("zero", "edge"),
    "schedule": ("one-cycle", "cosine", "steps", "constant"),
    "average": ("micro", "macro"),
    "best_by": ("top-k", "both"),
    "precision": ("32-true", "bf16-mixed", "16-mixed"),
}
"""Settings that are one of several words."""
BOUNDS = (
    *((name, 1, inf) for name in ("k", "epochs", "batch_size", "crop", "devices", "nodes")),
    *((name, 0, inf) for name in ("workers", "pad", "cutout", "weight_decay", "momentum")),
    *((name, 0, 1) for name in ("noise", "cutmix", "mixup", "label_smoothing", "reweight_from")),
    ("logit_adjustment", 0, inf),
    ("patience", 1, inf),
    ("validation", 0, inf),
    ("seed", -(2**63), 2**64 - 1),  # of torch.manual_seed
)
"""Settings with a smallest and a largest value."""
TYPES = {int: "an integer", float: "a number", bool: "true or false", str: "a word"}
LOSS_OPTIONS = (
    *("tau", "margin", "epsilon", "samples", "scale", "gamma", "first_guess", "temperature"),
)
HEADER = "# All settings of a run, to the line `...`"
"""Begins a recipe that was saved, so that one that was cut off is noticed."""
CHECKSUM = "# checksum: "
"""Begins the next line of it, with a hash of the settings as they were written."""
AROUND_LOSS = ("label_smoothing", "logit_adjustment", "reweight_from")
"""Settings that change any loss."""
SHARDED = "fsdp"
"""The strategy that divides all weights among devices."""
DATA, NETWORK, LOSS, TRAINING, HARDWARE = "Data", "Network", "Loss", "Training", "Hardware"
"""Groups of settings, in the help of the command."""


def setting(group: str, help: str, default: Any) -> Any:
    """A field with its group and a line for the help of the command."""
    metadata = {"group": group, "help": help}
    if isinstance(default, dict):
        return field(metadata=metadata, default_factory=dict)
    return field(metadata=metadata, default=default)


@dataclass(frozen=True)
class Recipe:
    """All settings of a run; two runs of the same recipe on the same machine are identical.

    Example:
        >>> recipe = Recipe(data="glyphs", noise=0.4, loss="smooth", k=3)
        >>> recipe.epochs, recipe.learning_rate  # as for all that is not set, the default
        (30, 0.1)
    """

    data: str = setting(DATA, "Name of a data set, or a path; see `topklass data`.", "glyphs")
    data_options: dict[str, Any] = setting(DATA, "Options of the data set.", {})  # noqa: RUF009
    noise: float = setting(DATA, "Probability that a training label is resampled.", 0.0)
    noise_kind: str = setting(
        DATA, "From which classes: superclass, block, or symmetric (all).", "superclass"
    )
    noisy_validation: bool = setting(
        DATA, "Resample validation labels in the same way; test labels stay clean.", False
    )
    subset: int | None = setting(DATA, "Training images to keep, equally many per class.", None)
    imbalance: float | None = setting(
        DATA, "Make a long tail: size of the largest class over the smallest.", None
    )
    validation: int = setting(
        DATA, "Images to hold out if there is no validation set; 0 for a tenth.", 0
    )
    pad: int = setting(DATA, "Shift training images by up to this many pixels.", 4)
    border: str = setting(DATA, "How to fill shifted images: zero, or edge.", "zero")
    flip: bool | None = setting(
        DATA, "Mirror half of the training images; by default image files only.", None
    )
    cutout: int = setting(DATA, "Side of a grey square on training images in memory.", 0)
    cutmix: float = setting(DATA, "Probability of CutMix in a step.", 0.0)
    mixup: float = setting(DATA, "Probability of mixup in a step without CutMix.", 0.0)
    crop: int = setting(DATA, "Side of the crops of image files.", 224)
    resize: int | None = setting(
        DATA, "Shorter side of image files before the crop; 8/7 of it by default.", None
    )

    model: str = setting(NETWORK, "Name of a network; see `topklass models`.", "convnet")
    head: str = setting(NETWORK, "Last layer: linear, or cosine for margin losses.", "linear")
    pretrained: bool = setting(NETWORK, "Start from weights of ImageNet (downloaded).", False)

    loss: str = setting(LOSS, "Name of a loss; see `topklass losses`.", "short-list")
    k: int = setting(LOSS, "Length of the list, in the loss and the monitored accuracy.", 5)
    tau: float | None = setting(LOSS, "Temperature of the smooth loss.", None)
    margin: float | None = setting(
        LOSS, "Margin; the largest one for losses with a margin per class.", None
    )
    epsilon: float | None = setting(LOSS, "Scale of the noise in the noised loss.", None)
    samples: int | None = setting(LOSS, "Noise samples; 0 for the exact expectation.", None)
    scale: float | None = setting(LOSS, "Scale of losses for cosine scores.", None)
    gamma: float | None = setting(LOSS, "Exponent of the focal loss.", None)
    first_guess: float | None = setting(
        LOSS, "Weight of the top-1 term in top-k cross-entropy.", None
    )
    temperature: float | None = setting(
        LOSS,
        "Temperature T of losses that are probabilities: T times the loss of logits / T.",
        None,
    )
    label_smoothing: float | None = setting(
        LOSS, "Share of the target spread over all classes; the default is 0, or the loss's.", None
    )
    logit_adjustment: float | None = setting(
        LOSS, "Add so many times the log of the class frequencies to the logits in training.", None
    )
    reweight_from: float | None = setting(
        LOSS, "Weight classes by their counts after this share of the training.", None
    )
    match: bool = setting(
        LOSS, "Take the smooth loss on the scale of cross-entropy: its learning rate fits.", True
    )

    epochs: int = setting(TRAINING, "Passes over the training images.", 30)
    batch_size: int = setting(TRAINING, "Images per step, over all devices.", 256)
    learning_rate: float = setting(TRAINING, "Learning rate of SGD.", 0.1)
    momentum: float = setting(TRAINING, "Nesterov momentum.", 0.9)
    weight_decay: float = setting(TRAINING, "Weight decay of all parameters.", 5e-4)
    schedule: str = setting(
        TRAINING, "Learning rate: one-cycle, cosine, steps, or constant.", "one-cycle"
    )
    milestones: tuple[float, ...] = setting(
        TRAINING, "Fractions of the training at which steps divide by 10.", (0.5, 0.75)
    )
    ema: float | None = setting(
        TRAINING, "Decay of a moving average of the weights, used instead of them.", None
    )
    best_by: str = setting(
        TRAINING,
        "Accuracy to choose the best epoch by: top-k, or both (the mean of top-1 and top-k).",
        "top-k",
    )
    average: str = setting(TRAINING, "Average of that accuracy: micro, or macro.", "micro")
    patience: int | None = setting(TRAINING, "Stop after this many epochs without gain.", None)
    seed: int = setting(TRAINING, "Seed of data, weights, order and augmentation.", 0)

    precision: str = setting(HARDWARE, "32-true, bf16-mixed, or 16-mixed.", "32-true")
    compile: bool = setting(HARDWARE, "Compile the training step (half a minute).", False)
    devices: int = setting(HARDWARE, "Devices per machine.", 1)
    nodes: int = setting(HARDWARE, "Machines.", 1)
    strategy: str = setting(
        HARDWARE, "auto, ddp, fsdp (divides all weights), or another strategy of Lightning.", "auto"
    )
    shard_classes: bool = setting(
        HARDWARE, "Split the classes of the last layer over the devices, with ddp or fsdp.", False
    )
    fused_head: bool = setting(
        HARDWARE, "Take the last layer and the loss in one, without all logits in memory.", False
    )
    workers: int | None = setting(
        HARDWARE, "Processes per device that read files; by default its cores, at most 16.", None
    )

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                given = getattr(self, name)
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {short(given)}")
        for name, low, high in BOUNDS:
            value = getattr(self, name)
            if value is not None and not (is_number(value) and low <= value <= high):
                expected = f"at least {low}" if high == inf else f"from {low} to {high}"
                raise ValueError(f"{name} must be {expected}, got {value!r}")
        for name, right, expected in (
            ("learning_rate", self.learning_rate > 0, "positive"),
            ("momentum", self.momentum < 1, "less than 1"),
            ("ema", self.ema is None or 0 < self.ema < 1, "between 0 and 1"),
            ("resize", self.shorter_side >= self.crop, f"at least crop={self.crop}"),
        ):
            if not right:
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)}")
        options = self.loss_options()
        if self.shard_classes or self.fused_head:
            self._check_head(options)

    @property
    def shorter_side(self) -> int:
        """The shorter side of image files after resizing; 256 for crops of 224."""
        return round(self.crop * 8 / 7) if self.resize is None else self.resize

    def loss_options(self) -> dict[str, Any]:
        """Parameters of the loss: those set, and defaults for the head (Garcin, section 4.5)."""
        info = loss_info(self.loss)
        options: dict[str, Any] = {**(info.on_cosines if self.head == "cosine" else info.on_logits)}
        given = {name: getattr(self, name) for name in LOSS_OPTIONS}
        options.update({name: value for name, value in given.items() if value is not None})
        if options.get("samples") == 0:
            options["samples"] = None
        if wrong := unknown_options(self.loss, options):
            raise ValueError(f"the loss {self.loss!r} has no {wrong}")
        return options

    def _check_head(self, options: dict[str, Any]) -> None:
        """Require settings that the special forms of the last layer work with."""
        if self.shard_classes and self.fused_head:
            raise ValueError(
                "shard_classes and fused_head exclude each other: leave one of them out"
            )
        name = "shard_classes" if self.shard_classes else "fused_head"
        kind = "sharded" if self.shard_classes else "fused"
        if not getattr(loss_info(self.loss), kind):
            served = ", ".join(each for each, info in LOSSES.items() if getattr(info, kind))
            raise ValueError(f"{name} works with the losses {served}, got {self.loss!r}")
        for right, expected in (
            (not self.compile, "a network that is not compiled: leave out compile"),
            (options.get("samples", 1) is not None, "sampled noise, not samples=0"),
            (self.fused_head or self.k <= LARGEST_K[torch.float32], "k up to 32"),
            (
                self.fused_head or self.strategy in ("auto", "ddp", SHARDED),
                "strategy auto, ddp or fsdp",
            ),
            (self.fused_head or self.precision != "16-mixed", "precision 32-true or bf16-mixed"),
            (self.shard_classes or self.strategy != SHARDED, "a strategy other than fsdp"),
            (
                self.shard_classes or self.head == "linear",
                "head linear; shard_classes also takes cosine",
            ),
            (
                self.shard_classes or self.logit_adjustment is None,
                "no logit_adjustment; shard_classes takes it",
            ),
            (
                self.shard_classes or self.reweight_from is None,
                "no reweight_from; shard_classes takes it",
            ),
        ):
            if not right:
                raise ValueError(f"{name} needs {expected}")

    def criterion(self, counts: Tensor) -> nn.Module:
        """The loss for training samples of these class counts, with all that changes it."""
        name, k = self.loss, self.k
        if name == "cross-entropy" and (self.shard_classes or self.fused_head):
            name, k = "topk-cross-entropy", 1  # the same, of this package
        loss = build_loss(
            name,
            k,
            counts,
            self.loss_options(),
            label_smoothing=self.label_smoothing,
            match=self.match,
        )
        if self.reweight_from is not None:
            start = round(self.reweight_from * self.epochs)
            loss = topklass.DeferredReweighting(loss, counts, start)
        if self.logit_adjustment is not None:
            loss = topklass.LogitAdjustment(loss, counts, self.logit_adjustment)
        return loss

    def with_changes(self, changes: Mapping[str, Any]) -> Recipe:
        """The same recipe with other values of some settings."""
        check_names(changes)
        return replace(self, **{name: _checked(name, value) for name, value in changes.items()})

    def as_yaml(self) -> str:
        """All settings."""
        settings = {**asdict(self), "milestones": list(self.milestones)}
        text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, explicit_end=True)
        return f"{HEADER}\n{CHECKSUM}{_hash(text)}\n{text}"

    def save(self, path: Path) -> None:
        """Write all settings as YAML."""
        write_whole(path, lambda file: file.write(self.as_yaml().encode()))


def has_changed(path: Path) -> bool:
    """Whether a recipe has changed since it was saved; False for one that was written by hand."""
    _, checksum, rest = path.read_text(encoding="utf-8").partition(CHECKSUM)
    written, _, settings = rest.partition("\n")
    return checksum != "" and written != _hash(settings)


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()


def load_recipe(path: Path) -> Recipe:
    """Read a recipe; what it does not set has its default.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "recipe.yaml")
        ...     _ = path.write_text("loss: smooth", encoding="utf-8")
        ...     load_recipe(path).loss
        'smooth'
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no recipe {path}")
    with naming(path, "correct it", "is not a valid recipe"):
        return parse_recipe(path.read_text(encoding="utf-8"))


def parse_recipe(text: str) -> Recipe:
    """A recipe from YAML; what it does not set has its default."""
    if text.startswith(HEADER) and not text.rstrip().endswith("..."):
        raise ValueError("its end is missing, the line `...`")
    settings = yaml.safe_load(text)
    if not isinstance(settings, dict) or not settings:
        raise ValueError(f"it must hold settings as `name: value`, got {short(settings)}")
    return Recipe().with_changes(settings)


def changes(recipe: Recipe, other: Recipe, but: Iterable[str] = ()) -> str:
    """The settings in which a recipe differs from another, in words.

    Args:
        recipe: the one.
        other: the other.
        but: settings that may differ.

    Example:
        >>> changes(Recipe(k=3, patience=2), Recipe())
        'k 3 instead of 5, patience 2 instead of none'
    """
    found = []
    for name in (each.name for each in fields(Recipe) if each.name not in but):
        one, two = (getattr(each, name) for each in (recipe, other))
        if one != two:
            written = ["none" if value is None else value for value in (one, two)]
            found.append(f"{name} {written[0]} instead of {written[1]}")
    return ", ".join(found)


def check_names(settings: Mapping[str, Any]) -> None:
    """Require settings that a recipe has."""
    known = [each.name for each in fields(Recipe)]
    for name in settings:
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise ValueError(f"a recipe has no {short(name)}.{hint} It has: {', '.join(known)}")


def _checked(name: str, value: Any) -> Any:
    """A value of YAML, if it has the type of the setting; ``1`` and ``1e-3`` count as floats."""
    if name == "data_options":
        if isinstance(value, dict):
            return value
        raise ValueError(f"{name} must be options as `name: value`, got {short(value)}")
    if name == "milestones":
        with suppress(TypeError, ValueError):
            return tuple(float(share) for share in value)
        raise ValueError(f"{name} must be a list of numbers, got {short(value)}")
    kinds = get_args(_types()[name]) or (_types()[name],)
    if float in kinds and isinstance(value, int | str) and not isinstance(value, bool):
        with suppress(ValueError):  # YAML takes 1e-3 for a word
            return float(value)
    if type(value) not in kinds:
        raise ValueError(f"{name} must be {TYPES[kinds[0]]}, got {short(value)}")
    return value


@cache
def _types() -> dict[str, Any]:
    """The type of each setting."""
    return get_type_hints(Recipe)
