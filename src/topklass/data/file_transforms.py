"""Pictures of any size as tensors: resize 256, crop 224 (Berrada et al., section 5.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from topklass._extras import extra


def random_view(
    picture: Any,
    stream: torch.Generator,
    *,
    resize: int = 256,
    crop: int = 224,
    flip: bool = True,
) -> Tensor:
    """A random crop for training, half of the time mirrored.

    Args:
        picture: a Pillow image, or a uint8 tensor (channels, H, W).
        stream: where the random numbers come from: ``generator(seed, epoch, index)`` makes the
            result a function of these.
        resize: what the smaller side becomes.
        crop: height and width of the result.
        flip: whether to mirror left and right.

    Returns:
        A uint8 tensor (channels, crop, crop).

    Example:
        >>> from topklass.data import generator
        >>> picture = torch.zeros(3, 40, 60, dtype=torch.uint8)
        >>> random_view(picture, generator(0), resize=32, crop=24).shape
        torch.Size([3, 24, 24])
    """
    image = resized(picture, resize, crop)
    spare = torch.tensor(image.shape[-2:]) - crop + 1
    top, left = (torch.rand(2, generator=stream, dtype=torch.float64) * spare).long().tolist()
    image = image[:, top : top + crop, left : left + crop]
    mirrored = flip and bool(torch.randint(2, (), generator=stream))
    return image.flip(-1) if mirrored else image.contiguous()


def fixed_views(picture: Any, *, resize: int = 256, crop: int = 224, ten: bool = True) -> Tensor:
    """The crops of a picture at test: corners, centre, and the same of the mirror image.

    Args:
        picture: a Pillow image, or a uint8 tensor (channels, H, W).
        resize: what the smaller side becomes.
        crop: height and width of a crop.
        ten: ten crops (Krizhevsky et al. 2012), or the centre alone.

    Returns:
        A uint8 tensor (10, channels, crop, crop), or with 1 in place of 10.

    Example:
        >>> picture = torch.zeros(3, 40, 60, dtype=torch.uint8)
        >>> fixed_views(picture, resize=32, crop=24).shape
        torch.Size([10, 3, 24, 24])
    """
    functional, image = (
        extra("torchvision.transforms.v2.functional"),
        resized(picture, resize, crop),
    )
    if ten:
        return torch.stack(functional.ten_crop(image, [crop]))
    centre: Tensor = functional.center_crop(image, [crop])
    return centre[None]


def resized(picture: Any, resize: int, crop: int) -> Tensor:
    """The picture as a uint8 tensor, its smaller side of the given length."""
    if crop > resize:
        raise ValueError(f"crop must be at most resize, got crop={crop} and resize={resize}")
    functional = extra("torchvision.transforms.v2.functional")
    small = functional.resize(picture, [resize], antialias=True)
    return small if isinstance(small, Tensor) else functional.pil_to_tensor(small)
