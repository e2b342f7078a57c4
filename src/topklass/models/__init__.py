"""Networks for training; this needs torchvision: ``pip install topklass[train]``.

>>> network = build("convnet", classes=100, channels=1)
>>> count_parameters(network)
291012
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from topklass._checks import check_count, did_you_mean
from topklass._extras import requires

with requires("topklass.models", "torchvision", install="topklass[train]"):
    import torchvision as _torchvision  # noqa: F401

from topklass.models.adapt import replace_head, take_grey, try_images
from topklass.models.convnet import ConvNet
from topklass.models.densenet import DenseNet
from topklass.models.resnet import small_resnet
from topklass.models.zoo import (
    TIMM,
    timm_network,
    torchvision_names,
    torchvision_network,
    torchvision_parameters,
)

__all__ = ["ConvNet", "DenseNet", "available", "build", "count_parameters", "small_resnet"]

HEADS = ("linear", "cosine")


class _Model(NamedTuple):
    make: Callable[..., nn.Module]
    line: str


OWN = {
    "convnet": _Model(ConvNet, "small, for 32×32 images on the CPU; 0.28 M parameters and a head"),
    "densenet40-12": _Model(
        partial(DenseNet, 40, 12), "small images, Huang et al. 2017; 1.1 M parameters"
    ),
    "densenet40-40": _Model(
        partial(DenseNet, 40, 40), "small images, Huang et al. 2017; 10.7 M parameters"
    ),
    "densenet40-40-bc": _Model(
        partial(DenseNet, 40, 40, bottleneck=True),
        "the network of the code of Berrada et al. 2018 and Garcin et al. 2022; 1.9 M parameters",
    ),
    "resnet18-small": _Model(
        partial(small_resnet, "resnet18"), "small images, 3×3 stem; 11.2 M parameters"
    ),
    "resnet50-small": _Model(
        partial(small_resnet, "resnet50"), "small images, 3×3 stem; 23.7 M parameters"
    ),
}
"""Networks for small images; parameters are those with 100 classes."""


def available() -> dict[str, str]:
    """List the networks that :func:`build` makes, and a line about each.

    Besides these it makes ``"timm/NAME"``, any network of timm, where timm is installed.

    Returns:
        A dictionary from names to lines.

    Example:
        >>> available()["resnet18"]
        'torchvision; 11.7 M parameters with 1,000 classes'
    """
    lines = {name: model.line for name, model in OWN.items()}
    for name in torchvision_names():
        millions = torchvision_parameters(name) / 1e6
        lines[name] = f"torchvision; {millions:.1f} M parameters with 1,000 classes"
    return lines


def build(
    name: str,
    classes: int,
    *,
    channels: int = 3,
    image_size: int | None = None,
    head: str = "linear",
    scale: float | None = None,
    pretrained: bool = False,
    **options: Any,
) -> nn.Module:
    """Build a network by its name.

    Args:
        name: one of :func:`available`, or ``"timm/NAME"``.
        classes: number of classes.
        channels: 3 for colour images, 1 for grey ones. A network of torchvision then has, with the
            same seed, the scores that it would have for grey images in colour.
        image_size: height and width of the images. Networks of one size are built for it, and it is
            an error if the network cannot take them. None skips this.
        head: "linear" for an ``nn.Linear`` as the last layer, "cosine" for a
            :class:`topklass.CosineClassifier`.
        scale: that of the cosine head; 1 unless given, which suits losses with a scale of their
            own.
        pretrained: whether to download weights of ImageNet, for networks of torchvision and timm.
            The last layer is new, unless there are as many classes as in ImageNet.
        **options: those of the network, such as ``dropout`` of :class:`DenseNet`.

    Returns:
        The network, in training mode, which maps images (N, channels, H, W) to scores (N, classes).

    Example:
        >>> import torch
        >>> network = build("resnet18-small", 20, channels=1, head="cosine")
        >>> network(torch.randn(2, 1, 32, 32)).shape
        torch.Size([2, 20])
    """
    _check(name, classes, channels, image_size, head, scale, pretrained)
    outputs = classes
    if name in OWN:
        network = OWN[name].make(classes=classes, channels=channels, **options)
    elif name.startswith(TIMM):
        short = name[len(TIMM) :]
        network = timm_network(short, classes, channels, image_size, pretrained, options)
    else:
        network, outputs = torchvision_network(name, classes, image_size, pretrained, options)
        if channels == 1:
            take_grey(network)
    if head == "cosine":
        replace_head(network, outputs, classes, 1.0 if scale is None else scale)
    elif outputs != classes:
        replace_head(network, outputs, classes, None)
    if image_size is not None:
        try_images(network, channels, image_size)
    return network


def count_parameters(model: nn.Module) -> int:
    """Count the parameters of a network; shared ones count once.

    Example:
        >>> count_parameters(nn.Linear(3, 2))
        8
    """
    return sum(parameter.numel() for parameter in model.parameters())


def _check(
    name: str,
    classes: int,
    channels: int,
    image_size: int | None,
    head: str,
    scale: float | None,
    pretrained: bool,
) -> None:
    names = [*OWN, *torchvision_names()]
    if name not in names and not name.startswith(TIMM):
        raise ValueError(
            f"there is no network {name!r}.{did_you_mean(name, names)} There are: "
            f"{', '.join(names)} and, with timm installed, timm/NAME"
        )
    check_count("classes", classes)
    if channels not in (1, 3):
        raise ValueError(f"channels must be 1 (grey) or 3 (colour), got channels={channels!r}")
    if image_size is not None:
        check_count("image_size", image_size)
    if head not in HEADS:
        raise ValueError(f"head must be one of {', '.join(HEADS)}, got {head!r}")
    if scale is not None and head != "cosine":
        raise ValueError(f"scale={scale} is that of the cosine head, got head={head!r}")
    if pretrained and name in OWN:
        raise ValueError(
            f"{name} has no pretrained weights: take pretrained=False, or a network of torchvision"
        )
