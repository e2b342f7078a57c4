"""What a training run is: every setting, from YAML or the command line, saved with the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import yaml

from topklass._files import write_whole
from topklass.train.criterion import did_you_mean, loss_info, surplus

SCHEDULES = ("one-cycle", "cosine", "steps", "constant")
NOISES = ("superclass", "block", "symmetric")
AVERAGES = ("micro", "macro")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
LOSS_OPTIONS = ("tau", "margin", "epsilon", "samples", "scale", "gamma", "first_guess")


def setting(help: str, default: Any = MISSING, **options: Any) -> Any:
    """A field with a line for the command line's help."""
    if default is not MISSING:
        options["default"] = default
    return field(metadata={"help": help}, **options)


@dataclass(frozen=True)
class Recipe:
    """All settings of a run; two runs of the same recipe on the same machine are the same."""

    data: str = setting("name of a data set, or a path", "glyphs")
    data_options: dict[str, Any] = setting(  # noqa: RUF009 a field, like the others
        "options of the data set, for example classes: 300", default_factory=dict
    )
    noise: float = setting("probability that a training label is replaced", 0.0)
    noise_kind: str = setting(f"by what: {', '.join(NOISES)}", "superclass")
    subset: int | None = setting("training images to keep, the same of each class", None)
    imbalance: float | None = setting("largest class over smallest, for a long tail", None)
    validation: int = setting("images held out if there is no validation set; 0: a tenth", 0)

    model: str = setting("name of a network, see `topklass models`", "convnet")
    head: str = setting("last layer: linear, or cosine for margin losses", "linear")
    pretrained: bool = setting("begin with weights of ImageNet, which are downloaded", False)

    loss: str = setting("name of a loss, see `topklass losses`", "smooth")
    k: int = setting("length of the list, of the loss and of the accuracy to choose by", 5)
    tau: float | None = setting("temperature of the smooth loss", None)
    margin: float | None = setting("margin of the loss; the largest one where classes differ", None)
    epsilon: float | None = setting("size of the noise of the noised loss", None)
    samples: int | None = setting("noise vectors; 0 for the exact expectation", None)
    scale: float | None = setting("scale of a loss for cosine scores", None)
    gamma: float | None = setting("exponent of the focal loss", None)
    first_guess: float | None = setting(
        "share of lists of one in top-k cross-entropy, which trains the order, too", None
    )
    match_gradient: bool = setting(
        "multiply the loss such that cross-entropy's learning rate fits it", True
    )

    epochs: int = setting("passes over the training images", 30)
    batch_size: int = setting("images of a step, over all devices", 256)
    pad: int = setting("training images are shifted by up to so many pixels", 4)
    border: str = setting("what comes in from outside then: zero, or edge", "zero")
    cutout: int = setting("height and width of a grey square on training images in memory", 0)
    cutmix: float = setting(
        "probability that a step's images get a part of another one, and of its label", 0.0
    )
    flip: bool | None = setting(
        "mirror half of the training images; not for letters; unless given, only image files", None
    )
    crop: int = setting("height and width of what is seen of an image file", 224)
    resize: int | None = setting("its shorter side before the crop; 8/7 of crop unless given", None)
    workers: int | None = setting(
        "processes that read image files for a device; unless given, its cores, at most 16", None
    )
    learning_rate: float = setting("of SGD, for cross-entropy", 0.1)
    momentum: float = setting("of Nesterov", 0.9)
    weight_decay: float = setting("of all parameters", 5e-4)
    ema: float | None = setting(
        "decay of a moving average of the weights, to be used instead of them; 0.999 or so", None
    )
    schedule: str = setting(f"of the learning rate: {', '.join(SCHEDULES)}", "one-cycle")
    milestones: tuple[float, ...] = setting(
        "shares of the training after which steps divide by 10", (0.5, 0.75)
    )
    average: str = setting("accuracy to choose by: micro, or macro over classes", "micro")
    patience: int | None = setting("epochs without improvement after which to stop", None)

    seed: int = setting("of data, weights, order, augmentation and noise", 0)
    precision: str = setting(f"one of {', '.join(PRECISIONS)}", "32-true")
    compile: bool = setting("compile the training step: half a minute, then it is faster", False)
    devices: int = setting("number of devices on each machine", 1)
    nodes: int = setting("number of machines", 1)
    strategy: str = setting("of Lightning: auto, ddp, fsdp, ...", "auto")

    def __post_init__(self) -> None:
        for name, choices in (
            ("schedule", SCHEDULES),
            ("noise_kind", NOISES),
            ("average", AVERAGES),
            ("precision", PRECISIONS),
            ("head", ("linear", "cosine")),
            ("border", ("zero", "edge")),
        ):
            if getattr(self, name) not in choices:
                given = getattr(self, name)
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {given!r}")
        for name in ("k", "epochs", "batch_size", "crop", "devices", "nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.shorter_side < self.crop:
            raise ValueError(f"resize must be at least crop={self.crop}, got {self.resize}")
        if self.workers is not None and self.workers < 0:
            raise ValueError(f"workers must not be negative, got {self.workers}")
        for name, right, expected in (
            ("learning_rate", self.learning_rate > 0, "positive"),
            ("momentum", 0 <= self.momentum < 1, "at least 0 and less than 1"),
            ("weight_decay", self.weight_decay >= 0, "at least 0"),
        ):
            if not right:
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name):g}")
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"patience must be at least 1, got {self.patience}")
        if self.cutout < 0:
            raise ValueError(f"cutout must not be negative, got {self.cutout}")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema must lie between 0 and 1, got {self.ema}")
        if self.ema is not None and self.strategy == "fsdp":
            raise ValueError("ema needs whole weights on each device, not strategy='fsdp'")
        for name in ("noise", "cutmix"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a probability, got {getattr(self, name)}")
        self.loss_options()

    @property
    def shorter_side(self) -> int:
        """Of an image file, after it was resized; 256 for crops of 224."""
        return round(self.crop * 8 / 7) if self.resize is None else self.resize

    def loss_options(self) -> dict[str, Any]:
        """The loss's parameters that are set, or that the head asks for (Garcin, section 4.5)."""
        info = loss_info(self.loss)
        options: dict[str, Any] = {**(info.on_cosines if self.head == "cosine" else info.on_logits)}
        given = {name: getattr(self, name) for name in LOSS_OPTIONS}
        options.update({name: value for name, value in given.items() if value is not None})
        if options.get("samples") == 0:
            options["samples"] = None
        if wrong := surplus(self.loss, options):
            raise ValueError(f"the loss {self.loss!r} has no {wrong}")
        return options

    def with_changes(self, changes: Mapping[str, Any]) -> Recipe:
        """The same recipe with other values of some settings."""
        check_names(changes)
        return replace(self, **{name: _typed(name, value) for name, value in changes.items()})

    def save(self, path: Path) -> None:
        """Write all settings as YAML."""
        settings = {**asdict(self), "milestones": list(self.milestones)}
        text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
        write_whole(path, lambda file: file.write(text.encode()))


def load_recipe(path: Path) -> Recipe:
    """Read a recipe; what it does not set has its default."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no recipe {path}")
    try:
        settings = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if settings is None:
        settings = {}
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold settings as `name: value`, got {settings!r}")
    return Recipe().with_changes(settings)


def check_names(settings: Mapping[str, Any]) -> None:
    """Require settings that a recipe has."""
    known = [each.name for each in fields(Recipe)]
    for name in settings:
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise ValueError(f"a recipe has no {name!r}.{hint} It has: {', '.join(known)}")


def _typed(name: str, value: Any) -> Any:
    """A value of YAML as the type of the setting: ``1e-3`` is a string there, ``1`` no float."""
    expected = _types()[name]
    if value is None and NoneType in get_args(expected):
        return value
    if expected in (float, float | None):
        return _number(name, value, float)
    if expected in (int, int | None):
        return _number(name, value, int)
    if expected in (bool, bool | None) and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    if expected is str and not isinstance(value, str):
        raise ValueError(f"{name} must be a word, got {value!r}")
    if name == "data_options" and not isinstance(value, dict):
        raise ValueError(f"{name} must be options as `name: value`, got {value!r}")
    if name == "milestones":
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{name} must be a list of numbers, got {value!r}")
        return tuple(_number(name, share, float) for share in value)
    return value


@cache
def _types() -> dict[str, Any]:
    """The type of each setting, evaluated once."""
    return get_type_hints(Recipe)


def _number(name: str, value: Any, kind: type[float] | type[int]) -> float | int:
    if kind is int and type(value) is int:  # a float would round a large one
        return value
    try:
        number = float(value)
        if isinstance(value, bool) or (kind is int and number != int(number)):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        what = "an integer" if kind is int else "a number"
        raise ValueError(f"{name} must be {what}, got {value!r}") from None
    return kind(number)
