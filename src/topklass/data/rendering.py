"""Characters as images: clean masks by Pillow, then distorted in batches by PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from math import pi
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from topklass._extras import extra
from topklass.data.characters import Character, face_files

OVERSAMPLING = 2
BATCH = 256
"""Images at a time: what fits into the cache."""


def masks(characters: Sequence[Character], size: int) -> tuple[Tensor, Tensor]:
    """Every character in every face that has it, centred, without distortion.

    Args:
        characters: the classes.
        size: height and width of the images to be made; masks have twice as much.

    Returns:
        Ink, uint8 (masks, side, side), and where the mask of a class in a face is,
        int64 (classes, faces), −1 where the face does not have it.
    """
    side = OVERSAMPLING * size
    fonts = [_Face(str(file), side) for file in face_files()]
    where = torch.full((len(characters), len(fonts)), -1)
    found: list[Tensor] = []
    for index, character in enumerate(characters):
        for face in character.faces:
            ink = fonts[face].ink(character.text)
            if ink.any():
                where[index, face] = len(found)
                found.append(ink)
    return torch.stack(found), where


class _Face:
    """A font in the size that fits a square of the given side, and in smaller ones."""

    def __init__(self, path: str, side: int) -> None:
        self.path = path
        self.side = side
        self.fonts: dict[int, Any] = {}

    def ink(self, text: str) -> Tensor:
        """The character in the middle of the square; smaller if it would not fit."""
        image_font = extra("PIL.ImageFont")
        points, room = round(0.88 * self.side), round(0.92 * self.side)
        while True:
            if points not in self.fonts:
                basic = image_font.Layout.BASIC
                self.fonts[points] = image_font.truetype(self.path, points, layout_engine=basic)
            mask = self.fonts[points].getmask(text, mode="L")
            width, height = mask.size
            if max(width, height) <= room:
                break
            points = min(points - 1, points * room // max(width, height))
        square = torch.zeros(self.side, self.side, dtype=torch.uint8)
        if width and height:
            top, left = (self.side - height) // 2, (self.side - width) // 2
            drawn = torch.frombuffer(bytearray(bytes(mask)), dtype=torch.uint8)
            square[top : top + height, left : left + width] = drawn.view(height, width)
        return square


def draw(
    ink: Tensor,
    where: Tensor,
    per_class: int,
    stream: torch.Generator,
    *,
    distortion: float,
    noise: float,
) -> Tensor:
    """So many images of each class, dark on light, each in a random face and distorted.

    Args:
        ink: see :func:`masks`.
        where: see :func:`masks`.
        per_class: images of each class.
        stream: where the random numbers come from.
        distortion: strength of turn, shear, stretch and shift.
        noise: largest standard deviation of the noise, of 1 between black and white.

    Returns:
        Images, uint8 (classes · per_class, 1, size, size), sorted by class.
    """
    size = ink.shape[1] // OVERSAMPLING
    chosen = _random_masks(where, per_class, stream)
    draws = torch.rand(len(chosen), 10, generator=stream)
    images = torch.empty(len(chosen), 1, size, size, dtype=torch.uint8)
    for start in range(0, len(chosen), BATCH):
        part = slice(start, start + BATCH)
        clean = ink[chosen[part], None].float() / 255
        moved = _distorted(clean, draws[part], size, distortion)
        images[part] = _photographed(moved, draws[part], noise, stream)
    return images


def _random_masks(where: Tensor, per_class: int, stream: torch.Generator) -> Tensor:
    """Indices of masks, (classes · per_class): every face of a class is as likely."""
    faces = (where >= 0).sum(1, keepdim=True)
    ranks = (torch.rand(len(where), per_class, generator=stream) * faces).long()
    present_first = (where < 0).to(torch.uint8).argsort(dim=1, stable=True)
    return where.gather(1, present_first.gather(1, ranks)).flatten()


def _distorted(clean: Tensor, draws: Tensor, size: int, strength: float) -> Tensor:
    """Turn up to 11°, shear to 0.15, stretch to 1.13, shift to 1/16 of the side, then blur."""
    moves = strength * (2 * draws[:, :6, None, None] - 1)
    turn, shear, wide, high, right, down = moves.unbind(1)
    turn, shear = turn * pi / 16, shear * 0.15
    wide, high = (wide * 0.12).exp(), (high * 0.12).exp()
    cos, sin = turn.cos(), turn.sin()
    centres = (2 * torch.arange(size) + 1) / size - 1
    x, y = wide * centres, high * centres[:, None]
    across = cos * x + ((shear * cos - sin) * y + right / 8)
    along = sin * x + ((shear * sin + cos) * y + down / 8)
    moved = F.grid_sample(clean, torch.stack([across, along], 3), align_corners=False)
    blurred = F.avg_pool2d(F.avg_pool2d(moved, 3, 1, 1), 3, 1, 1)
    return moved.lerp(blurred, draws[:, 6, None, None, None])


def _photographed(ink: Tensor, draws: Tensor, noise: float, stream: torch.Generator) -> Tensor:
    """Ink on paper, each of a random brightness, with noise, as bytes."""
    paper, dark, grain = draws[:, 7:, None, None].unsqueeze(2).unbind(1)
    image = (1 - 0.35 * paper) * (1 - ink) + 0.4 * dark * ink
    image += noise * grain * torch.randn(image.shape, generator=stream)
    return (255 * image).round_().clamp_(0, 255).to(torch.uint8)
