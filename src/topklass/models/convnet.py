"""A small convolutional network that trains in minutes on a CPU."""

from torch import Tensor, nn

from topklass._checks import check_count


class ConvNet(nn.Module):
    """Five convolutions with batch normalisation and ReLU, and global average pooling.

    Convolutions with stride 2 go from 32×32 images over 16×16 and 8×8 to 4×4 features. Most of the
    work is in few pixels with many channels, which suits a CPU, best in the memory format
    ``torch.channels_last``. Images of any size.

    Args:
        classes: number of classes.
        channels: channels of the images.
        width: number of channels after the first convolution; there are 4 times as many features.

    Example:
        >>> import torch
        >>> network = ConvNet(classes=10, channels=1).to(memory_format=torch.channels_last)
        >>> network(torch.zeros(2, 1, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, classes: int, channels: int = 3, *, width: int = 32) -> None:
        super().__init__()
        check_count("classes", classes)
        check_count("channels", channels)
        check_count("width", width)
        self.features = nn.Sequential(
            *_convolution(channels, width, size=5, stride=2),
            *_convolution(width, 2 * width, stride=2),
            *_convolution(2 * width, 2 * width),
            *_convolution(2 * width, 4 * width, stride=2),
            *_convolution(4 * width, 4 * width),
        )
        self.classifier = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, channels, H, W) to scores (N, classes)."""
        scores: Tensor = self.classifier(self.features(images).mean((2, 3)))
        return scores


def _convolution(width: int, out: int, size: int = 3, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(width, out, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return [convolution, nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
