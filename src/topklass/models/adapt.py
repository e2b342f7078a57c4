"""Adapting networks to other images and other classes."""

import torch
from torch import nn

from topklass.longtail import CosineClassifier


def take_grey(network: nn.Module) -> None:
    """Let a network of colour images take grey ones, with the scores of grey images in colour.

    The weights of the first convolution are summed over its three channels. This is right for
    random and for trained weights.

    Args:
        network: a network whose first convolution has three channels; changed in place.

    Example:
        >>> network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> images = torch.randn(2, 1, 5, 5)
        >>> expected = network(images.expand(2, 3, 5, 5))
        >>> take_grey(network)
        >>> torch.allclose(network(images), expected, atol=1e-5)
        True
    """
    kind = type(network).__name__
    if getattr(network, "transform_input", False):
        raise ValueError(f"{kind} with transform_input, as when pretrained, needs channels=3")
    first = next((module for module in network.modules() if isinstance(module, nn.Conv2d)), None)
    if first is None or first.in_channels != 3:
        given = "no convolution" if first is None else f"one of {first.in_channels}"
        raise ValueError(f"channels=1 needs a first convolution of 3 channels, {kind} has {given}")
    first.weight = nn.Parameter(first.weight.detach().sum(1, keepdim=True))
    first.in_channels = 1


def find_head(network: nn.Module, outputs: int) -> tuple[str, nn.Linear | CosineClassifier]:
    """Find the layer that gives the scores, and its name: the last one with so many outputs.

    Args:
        network: a classifier.
        outputs: its number of classes.

    Returns:
        The layer's name in ``network.named_modules()``, and the layer.

    Example:
        >>> find_head(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)), 8)
        ('2', Linear(in_features=8, out_features=8, bias=True))
    """
    found = [
        (name, module)
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear | CosineClassifier) and module.out_features == outputs
    ]
    if not found:
        raise ValueError(
            f"{type(network).__name__} has no linear layer with {outputs} outputs as its last "
            "layer: take another network, or none of pretrained weights, a cosine head, "
            "fused_head and shard_classes"
        )
    return found[-1]


def replace_head(network: nn.Module, outputs: int, classes: int, scale: float | None) -> None:
    """Put a new last layer into a network: cosines times a scale, or a linear one without scale.

    Args:
        network: a classifier; changed in place.
        outputs: its number of classes.
        classes: the number of classes that it should have.
        scale: that of :class:`topklass.CosineClassifier`; None for a linear layer.

    Example:
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1000))
        >>> replace_head(network, 1000, 5, scale=None)
        >>> network[-1]
        Linear(in_features=8, out_features=5, bias=True)
    """
    name, old = find_head(network, outputs)
    assert isinstance(old, nn.Linear)
    new: nn.Module
    if scale is None:
        new = nn.Linear(old.in_features, classes, bias=old.bias is not None)
    else:
        new = CosineClassifier(old.in_features, classes, scale)
    network.set_submodule(name, new)


def try_images(network: nn.Module, channels: int, size: int) -> None:
    """Require that a network takes images of this size.

    Args:
        network: a classifier, in training mode.
        channels: channels of the images.
        size: their height and width.
    """
    network.eval()
    try:
        with torch.no_grad():
            network(torch.zeros(1, channels, size, size))
    except (AssertionError, RuntimeError) as error:
        raise ValueError(
            f"{type(network).__name__} cannot take images of {size}×{size}: {error}"
        ) from error
    network.train()
