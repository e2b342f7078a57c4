"""Small image folders for tests of training."""

from pathlib import Path

import torch
from PIL import Image

CLASSES = 6


def write_folder(root: Path, train: int = 12, others: int = 4) -> Path:
    """Six noisy patterns in colour, of two sizes, so many of each."""
    stream = torch.Generator().manual_seed(0)
    patterns = torch.randint(0, 256, (CLASSES, 3, 6, 6), generator=stream).float()
    for split, count in (("train", train), ("val", others), ("test", others)):
        for label in range(CLASSES):
            folder = root / split / f"class {label}"
            folder.mkdir(parents=True)
            for number in range(count):
                size = (20, 26) if number % 2 else (24, 18)
                image = torch.nn.functional.interpolate(patterns[label][None], size)[0]
                image = image + 40 * torch.randn(image.shape, generator=stream)
                pixels = image.clamp(0, 255).to(torch.uint8).permute(1, 2, 0)
                Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    return root
