"""Networks of torchvision and timm. Nothing is downloaded unless weights are asked for."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

from topklass._checks import did_you_mean
from topklass._extras import requires

TIMM = "timm/"
"""What the names of timm's networks begin with."""
AUXILIARY = ("aux1", "aux2", "AuxLogits")
"""Classifiers of inner layers, with scores of their own in training."""


def torchvision_names() -> list[str]:
    """List the names of torchvision's classifiers.

    Example:
        >>> "resnet18" in torchvision_names()
        True
    """
    names: list[str] = torchvision.models.list_models(module=torchvision.models)
    return names


def torchvision_parameters(name: str) -> int:
    """Tell the number of parameters of a classifier of torchvision, with 1,000 classes.

    Example:
        >>> torchvision_parameters("resnet18")
        11689512
    """
    count: int = torchvision.models.get_model_weights(name).DEFAULT.meta["num_params"]
    return count


def torchvision_network(
    name: str, classes: int, image_size: int | None, pretrained: bool, options: dict[str, Any]
) -> tuple[nn.Module, int]:
    """Build a network of torchvision.

    Args:
        name: one of :func:`torchvision_names`.
        classes: number of classes, if the weights are random.
        image_size: for networks that need to know it.
        pretrained: whether to load torchvision's best weights.
        options: those of the network.

    Returns:
        The network without auxiliary classifiers, and its number of classes.
    """
    options = {**_size_option(name, image_size), **options}
    if pretrained:
        weights = torchvision.models.get_model_weights(name).DEFAULT
        classes = len(weights.meta["categories"])
        copy = f"save {weights.url} in {Path(torch.hub.get_dir(), 'checkpoints')}"
        with _weights_only(), _naming_weights(str(weights), copy):
            network = torchvision.models.get_model(name, weights=weights, **options)
    else:
        if name in ("googlenet", "inception_v3"):
            options = {"init_weights": True, **options}
        network = torchvision.models.get_model(name, num_classes=classes, **options)
    if hasattr(network, "aux_logits"):
        network.aux_logits = False
        for part in AUXILIARY:
            if hasattr(network, part):
                setattr(network, part, None)
    return network, classes


def timm_network(
    name: str,
    classes: int,
    channels: int,
    image_size: int | None,
    pretrained: bool,
    options: dict[str, Any],
) -> nn.Module:
    """Build a network of timm.

    Args:
        name: timm's name, without the "timm/" in front.
        classes: number of classes.
        channels: channels of the images.
        image_size: for networks that need to know it.
        pretrained: whether to load timm's weights.
        options: those of the network.

    Returns:
        The network.
    """
    with requires(f"{TIMM}{name}", "timm", install="timm"):
        timm = import_module("timm")
    if not timm.is_model(name):  # so no name can be an address
        near = did_you_mean(name, timm.list_models())
        raise ValueError(f"timm {timm.__version__} has no network {name!r}.{near}")
    if image_size is not None and _has_fixed_size(timm.get_pretrained_cfg(name)):
        options = {"img_size": image_size, **options}
    copy = "build it where they can be downloaded, and copy the cache of huggingface_hub from there"
    with _weights_only(), _naming_weights(f"the weights of {TIMM}{name}", copy):
        network: nn.Module = timm.create_model(
            name, pretrained=pretrained, num_classes=classes, in_chans=channels, **options
        )
    return network


def _size_option(name: str, image_size: int | None) -> dict[str, Any]:
    if image_size is None:
        return {}
    if name.startswith("vit_"):
        return {"image_size": image_size}
    return {"input_size": (image_size, image_size)} if name.startswith("maxvit_") else {}


def _has_fixed_size(config: Any) -> bool:
    return config is not None and bool(config.fixed_input_size)


@contextmanager
def _weights_only() -> Iterator[None]:
    """Let ``torch.load`` read tensors only, also where torchvision or timm call it otherwise."""
    variable = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


@contextmanager
def _naming_weights(name: str, copy: str) -> Iterator[None]:
    """Say which weights were not downloaded, why, and how to get them without a network."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{name} could not be downloaded ({error}); {copy}, or take pretrained=False"
        ) from error
