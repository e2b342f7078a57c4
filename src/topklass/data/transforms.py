"""Batches of small images, augmented and normalised on their device.

torchvision's transforms draw from the global generator, and the same crop for a whole batch; these
are functions of a generator, and every image of a batch is transformed by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from topklass.data.dataset import Split

if TYPE_CHECKING:
    from typing_extensions import Self

BORDERS = ("zero", "edge")
GREY = 128


def random_crop(
    images: Tensor,
    stream: torch.Generator,
    *,
    pad: int = 4,
    flip: bool = True,
    border: str = "zero",
) -> Tensor:
    """Shift images at random, and mirror half of them: pad, random crop of the old size, flip.

    The augmentation of CIFAR in Berrada et al., section 5.1, of every image by itself. The few
    random numbers come from the CPU, so that they are the same for every device.

    Args:
        images: (N, channels, H, W), any type, on any device.
        stream: where the random numbers come from, on the CPU: ``generator(seed, epoch, step)``
            makes the result a function of these and of the images.
        pad: largest shift, in pixels.
        flip: whether to mirror left and right; not for letters.
        border: what comes in from outside: "zero", or "edge", the nearest pixel of the image.

    Returns:
        Images of the same shape, type and device.

    Example:
        >>> from topklass.data import generator
        >>> image = torch.arange(1, 10, dtype=torch.uint8).view(1, 1, 3, 3)
        >>> random_crop(image, generator(0), pad=1, flip=False)
        tensor([[[[4, 5, 6],
                  [7, 8, 9],
                  [0, 0, 0]]]], dtype=torch.uint8)
    """
    if border not in BORDERS:
        raise ValueError(f"border must be one of {', '.join(BORDERS)}, got {border!r}")
    if pad < 0:
        raise ValueError(f"pad must not be negative, got pad={pad}")
    count, channels, height, width = images.shape
    moves = torch.randint(-pad, pad + 1, (count, 2), generator=stream)
    mirrored = torch.randint(2, (count, 1), generator=stream) * int(flip)
    draws = torch.cat([moves, mirrored], 1).to(images.device, non_blocking=True)
    down, right, mirror = draws.unsqueeze(2).unbind(1)
    rows = torch.arange(height, device=images.device) + down
    across = torch.arange(width, device=images.device)
    columns = torch.where(mirror.bool(), width - 1 - across, across) + right
    inner_rows, inner_columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    pixels = (inner_rows[:, :, None] * width + inner_columns[:, None]).flatten(1)
    pixels = pixels[:, None].expand(-1, channels, -1)
    result = images.flatten(2).gather(2, pixels).view(images.shape)
    if border == "zero":
        inside = (rows == inner_rows)[:, :, None] & (columns == inner_columns)[:, None]
        result = result * inside.unsqueeze(1)
    return result


def cutout(images: Tensor, stream: torch.Generator, *, size: int) -> Tensor:
    """Cover a square of each image with grey (DeVries and Taylor 2017).

    Its centre is anywhere in the image, so that it may hang over the edge.

    Args:
        images: (N, channels, H, W), uint8, on any device.
        stream: where the random numbers come from, on the CPU.
        size: height and width of the square; 0 leaves the images as they are.

    Returns:
        Images of the same shape, type and device.

    Example:
        >>> from topklass.data import generator
        >>> cutout(torch.zeros(1, 1, 2, 4, dtype=torch.uint8), generator(0), size=2)
        tensor([[[[  0, 128, 128,   0],
                  [  0,   0,   0,   0]]]], dtype=torch.uint8)
    """
    if size < 0:
        raise ValueError(f"size must not be negative, got size={size}")
    count, _, *lengths = images.shape
    covered = []
    for length in lengths:
        first = torch.randint(length, (count, 1), generator=stream) - size // 2
        away = torch.arange(length, device=images.device) - first.to(images.device)
        covered.append((away >= 0) & (away < size))
    rows, columns = covered
    return images.masked_fill((rows[:, :, None] & columns[:, None]).unsqueeze(1), GREY)


def cutmix(images: Tensor, stream: torch.Generator) -> tuple[Tensor, Tensor, float]:
    """Paste the same rectangle of another image into each image (Yun et al. 2019).

    Its share of the area is uniform on [0, 1], apart from what hangs over the edge.

    Args:
        images: (N, channels, H, W), any type, on any device.
        stream: where the random numbers come from, on the CPU.

    Returns:
        Images of the same shape, type and device; for each the index of the other one; and the
        share of its own area that is left, which is the weight of its own label.

    Example:
        >>> from topklass.data import generator
        >>> images = torch.tensor([1, 2], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 1, 2, 3)
        >>> mixed, others, share = cutmix(images, generator(5))
        >>> mixed[0, 0], others, round(share, 2)
        (tensor([[1, 1, 1],
                [2, 2, 1]], dtype=torch.uint8), tensor([1, 0]), 0.67)
    """
    count, _, *lengths = images.shape
    others = torch.randperm(count, generator=stream).to(images.device, non_blocking=True)
    side, *centre = torch.rand(3, generator=stream).tolist()
    edges = []
    for length, middle in zip(lengths, centre, strict=True):
        half = sqrt(side) * length / 2
        ends = (middle * length - half, middle * length + half)
        edges.append(slice(*(round(min(max(end, 0), length)) for end in ends)))
    rows, columns = edges
    mixed = images.clone()
    mixed[..., rows, columns] = images[others][..., rows, columns]
    pasted = (rows.stop - rows.start) * (columns.stop - columns.start)
    return mixed, others, 1 - pasted / (lengths[0] * lengths[1])


def mixup(images: Tensor, stream: torch.Generator) -> tuple[Tensor, Tensor, float]:
    """Blend each image with another one (Zhang et al. 2018, with α = 1).

    Args:
        images: (N, channels, H, W), any type, on any device.
        stream: where the random numbers come from, on the CPU.

    Returns:
        Images of the same shape, type and device; for each the index of the other one; and its own
        share, uniform on [0, 1], which is the weight of its own label.

    Example:
        >>> from topklass.data import generator
        >>> images = torch.tensor([0, 100], dtype=torch.uint8).view(2, 1, 1, 1)
        >>> mixed, others, share = mixup(images, generator(5))
        >>> mixed.flatten(), others, round(share, 2)
        (tensor([33, 67], dtype=torch.uint8), tensor([1, 0]), 0.67)
    """
    others = torch.randperm(len(images), generator=stream).to(images.device, non_blocking=True)
    share = float(torch.rand((), generator=stream))
    if images.is_floating_point():
        return torch.lerp(images[others], images, share), others, share
    mixed = torch.lerp(images[others].float(), images.float(), share)
    return mixed.round().to(images.dtype), others, share


class Normalize(nn.Module):
    """From bytes to numbers with mean 0 and deviation 1 in each channel.

    Args:
        mean: of each channel, for pixels from 0 to 1.
        std: standard deviation of each channel; 0 counts as 1.

    Example:
        >>> images = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
        >>> Normalize.of(Split(images, torch.tensor([0, 1])))(images).flatten()
        tensor([-1.,  1.])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> None:
        super().__init__()
        mean, std = torch.as_tensor(mean).float(), torch.as_tensor(std).float()
        if mean.dim() != 1 or mean.shape != std.shape:
            raise ValueError(
                "mean and std must have one number for each channel, "
                f"got shapes {tuple(mean.shape)} and {tuple(std.shape)}"
            )
        self.register_buffer("mean", mean)
        self.register_buffer("std", torch.where(std > 0, std, 1.0))

    @classmethod
    def of(cls, split: Split) -> Self:
        """With mean and deviation of a split in memory; this synchronises with the device."""
        if not isinstance(split.images, Tensor):
            raise TypeError(
                "pictures that are read on demand have no cheap statistics: pass mean and std, "
                "for example those of ImageNet: Normalize(*topklass.data.IMAGENET)"
            )
        if len(split) == 0:
            raise ValueError("a split without images has no mean")
        sums = torch.zeros(2, split.images.shape[1], dtype=torch.int64, device=split.images.device)
        for part in split.images.tensor_split(-(-len(split) // 4096)):
            pixels = part.long().movedim(1, 0).flatten(1)
            sums += torch.stack([pixels.sum(1), pixels.square().sum(1)])
        number = split.images[:, 0].numel()
        mean = [total / number / 255 for total in sums[0].tolist()]
        # in whole numbers, so that a constant channel has a deviation of 0
        spread = [number * squares - total * total for total, squares in sums.T.tolist()]
        return cls(mean, [sqrt(value) / number / 255 for value in spread])

    def forward(self, images: Tensor) -> Tensor:
        """Images (…, channels, H, W) of bytes as float32."""
        scale = 1 / (255 * self.std)
        shift = self.mean / self.std
        return images.float() * scale[:, None, None] - shift[:, None, None]

    def extra_repr(self) -> str:
        """Show the channels."""
        return f"channels={len(self.mean)}"


IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation of the channels of ImageNet."""
