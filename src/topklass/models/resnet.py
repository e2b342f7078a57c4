"""ResNets of torchvision with a stem for small images."""

from typing import Any

from torch import nn
from torchvision.models import get_model


def small_resnet(name: str, classes: int, channels: int = 3, **options: Any) -> nn.Module:
    """Build a ResNet that keeps the resolution of images until its second stage.

    The first convolution is 3×3 instead of 7×7 with stride 2, and there is no max-pooling, as in
    the networks of He et al. (2016) for CIFAR-10.

    Args:
        name: a ResNet of torchvision, such as "resnet18".
        classes: number of classes.
        channels: channels of the images.
        **options: those of torchvision's network.

    Returns:
        The network, with random weights.

    Example:
        >>> import torch
        >>> small_resnet("resnet18", classes=10)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    network: nn.Module = get_model(name, weights=None, num_classes=classes, **options)
    stem = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    network.conv1 = stem
    network.maxpool = nn.Identity()
    return network
