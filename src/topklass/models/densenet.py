"""DenseNet for small images (Huang et al. 2017)."""

import torch
from torch import Tensor, nn

from topklass._checks import check_count, check_number

BLOCKS = 3


class DenseNet(nn.Module):
    r"""Layers that each see the outputs of all layers before them in their block.

    .. math:: x_l = H_l([x_0, x_1, \dots, x_{l-1}])

    (Huang et al. 2017, equation 2), with H of batch normalisation, ReLU and a 3×3 convolution to
    ``growth`` channels. There are three blocks of (depth − 4) / 3 layers. Between them are
    transitions: normalisation, ReLU, a 1×1 convolution and 2×2 average pooling. Images of any size
    from 4×4 on.

    The BC form has half as many layers, each with a 1×1 convolution to 4 ``growth`` channels before
    the 3×3 one, and transitions that halve the channels. The first convolution has 16 channels, or
    2 ``growth`` in the BC form (section 3, "Implementation Details").

    Args:
        depth: number of layers with weights, 4 more than a multiple of 3, or of 6 in the BC form.
        growth: number of channels that each layer adds.
        classes: number of classes.
        channels: channels of the images.
        bottleneck: whether to build the BC form.
        dropout: probability of zeros after each convolution but the first. The paper takes 0.2 for
            data without augmentation and 0 otherwise.

    Example:
        >>> network = DenseNet(40, 12, classes=10)
        >>> network(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        depth: int,
        growth: int,
        classes: int,
        channels: int = 3,
        *,
        bottleneck: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        layers = _layers_of_block(depth, bottleneck)
        check_count("growth", growth)
        check_count("classes", classes)
        check_count("channels", channels)
        check_number("dropout", dropout, positive=False)
        width = 2 * growth if bottleneck else 16
        parts: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False)]
        for block in range(BLOCKS):
            if block:
                narrow = width // 2 if bottleneck else width
                parts += [*_convolution(width, narrow, 1, dropout), nn.AvgPool2d(2)]
                width = narrow
            parts += [_DenseBlock(layers, width, growth, bottleneck, dropout)]
            width += layers * growth
        self.features = nn.Sequential(*parts, nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.classifier = nn.Linear(width, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights as He et al. (2015), which the paper refers to."""
        for module in self.features.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.classifier.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, channels, H, W) to scores (N, classes)."""
        scores: Tensor = self.classifier(self.features(images).mean((2, 3)))
        return scores


class _DenseBlock(nn.ModuleList):
    """Keeps all outputs; the last one is their concatenation."""

    def __init__(
        self, layers: int, width: int, growth: int, bottleneck: bool, dropout: float
    ) -> None:
        super().__init__(
            _DenseLayer(width + layer * growth, growth, bottleneck, dropout)
            for layer in range(layers)
        )

    def forward(self, images: Tensor) -> Tensor:
        outputs = [images]
        for layer in self:
            outputs.append(layer(*outputs))
        return torch.cat(outputs, 1)


class _DenseLayer(nn.Module):
    def __init__(self, width: int, growth: int, bottleneck: bool, dropout: float) -> None:
        super().__init__()
        parts = []
        if bottleneck:
            parts += _convolution(width, 4 * growth, 1, dropout)
            width = 4 * growth
        self.parts = nn.Sequential(*parts, *_convolution(width, growth, 3, dropout))

    def forward(self, *outputs: Tensor) -> Tensor:
        added: Tensor = self.parts(torch.cat(outputs, 1))
        return added


def _convolution(width: int, out: int, size: int, dropout: float) -> list[nn.Module]:
    """Normalisation, ReLU, convolution and, if any, dropout."""
    parts: list[nn.Module] = [
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.Conv2d(width, out, size, padding=size // 2, bias=False),
    ]
    return [*parts, nn.Dropout(dropout)] if dropout else parts


def _layers_of_block(depth: int, bottleneck: bool) -> int:
    """How many layers each block has: besides them are the first, the last and two transitions."""
    check_count("depth", depth)
    convolutions = BLOCKS * (2 if bottleneck else 1)
    layers, rest = divmod(depth - 4, convolutions)
    if rest or layers < 1:
        form = "DenseNet-BC" if bottleneck else "DenseNet"
        raise ValueError(
            f"depth of a {form} must be 4 more than a multiple of {convolutions}, got depth={depth}"
        )
    return layers
