"""Data of the programs: twelve classes in four groups of three that look alike.

At best the first guess is right for a third of the samples, and a list of three for all.
"""

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import topklass

CLASSES, FEATURES = 12, 16


def samples(count: int, seed: int) -> TensorDataset:
    """Features around the centre of the label's group, and labels."""
    centres = torch.randn(CLASSES // 3, FEATURES, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    noise = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(3 * centres[labels // 3] + noise, labels)


def report(logits: Tensor, labels: Tensor) -> None:
    """Print how often the label is the first guess, and in the first three."""
    first, list_of_three = topklass.topk_accuracy(logits, labels, k=(1, 3)).tolist()
    print(f"top-1 accuracy {first:.3f}, top-3 accuracy {list_of_three:.3f}")
