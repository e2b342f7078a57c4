"""The losses that are timed side by side, with what each of them must equal."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import topklass
from experiments import peers
from topklass import (
    NoisedTopKLoss,
    ShortListLoss,
    SmoothTopKLoss,
    SparseTarget,
    TopKCrossEntropyLoss,
)
from topklass._targets import Target

K = 5
SMOOTHING = 0.1
FEW = (2, 16)
"""Classes of a :class:`topklass.SparseTarget`."""
EPSILON, SAMPLES = 0.2, 10
"""Noise of the noised losses, as in the paper."""
WIDE = 1.0
"""Noise by default, which brings many more classes near the k-th largest."""

BASE = "cross-entropy"
OURS = f"topklass, k = {K}"
SMOOTHED = ", smoothing"
"""Ends the name of a loss with label smoothing."""

Loss = Callable[[Tensor, Target], Tensor]
"""Of logits and a target, the mean."""


@dataclass(frozen=True)
class Candidate:
    """A loss under the name of the tables."""

    name: str
    family: Literal["reference", "smooth", "noised", "exact"]
    """How it is verified; "reference": against itself, in plain PyTorch and float64."""
    loss: Loss
    k: int = K
    most_logits: float = inf
    """Beyond it takes too much time or memory."""
    published: bool = False
    classes: int = 1
    """Of the target of a row."""
    epsilon: float = EPSILON
    """Noise, for the families that have some."""

    def target(self, labels: Tensor, classes: int) -> Target:
        """Labels as this loss takes them: alone, or with other classes that count less."""
        if self.classes == 1:
            return labels
        others = torch.arange(self.classes, device=labels.device)
        indices = (labels[:, None] + others * (classes // self.classes)) % classes
        weights = 0.5 ** (1.0 + others)
        return SparseTarget(indices, (weights / weights.sum()).expand(indices.shape).contiguous())


def on_gpu() -> list[Candidate]:
    """Cross-entropy, ours by the default and by the reference algorithm, the published losses."""
    return [
        base(),
        Candidate(f"{BASE}, compiled", "reference", compiled(F.cross_entropy)),
        *(
            Candidate(
                f"topklass, k = {k}", "smooth", SmoothTopKLoss(k=k), k, inf if k <= 32 else 1e7
            )
            for k in (K, 10, 20, 32, 50)
        ),
        Candidate(f"{OURS}, reference", "smooth", reference(SmoothTopKLoss(k=K))),
        Candidate("topklass, noised", "noised", noised()),
        Candidate("topklass, noised exact", "exact", noised(None)),
        Candidate("topklass, noised, wide", "noised", noised(epsilon=WIDE), epsilon=WIDE),
        Candidate("topklass, noised exact, wide", "exact", noised(None, WIDE), epsilon=WIDE),
        Candidate("topklass, noised, reference", "noised", reference(noised())),
        *published(),
    ]


def on_cpu() -> list[Candidate]:
    """Cross-entropy and ours, eager and compiled, the published losses."""
    return [
        base(),
        Candidate(f"{BASE}, compiled", "reference", compiled(F.cross_entropy)),
        Candidate("topklass", "smooth", SmoothTopKLoss(k=K)),
        Candidate("topklass, compiled", "smooth", compiled(SmoothTopKLoss(k=K))),
        Candidate("topklass, noised", "noised", noised()),
        *published(),
    ]


def with_few_classes() -> list[Candidate]:
    """The smooth loss of class indices, and of a few classes for each row."""
    ours = SmoothTopKLoss(k=K)
    few = (Candidate(f"{OURS}, {m} classes", "reference", ours, classes=m) for m in FEW)
    return [base(), Candidate(OURS, "smooth", ours), *few]


def with_smoothing() -> list[Candidate]:
    """Losses with and without label smoothing."""
    kinds: dict[str, Callable[..., Loss]] = {
        BASE: lambda **options: partial(F.cross_entropy, **options),
        OURS: partial(SmoothTopKLoss, K),
        f"top-k cross-entropy, k = {K}": partial(TopKCrossEntropyLoss, K),
        f"short list, k = {K}": partial(ShortListLoss, K),
    }
    return [
        Candidate(name + end, "reference", new(label_smoothing=smoothing))
        for name, new in kinds.items()
        for end, smoothing in (("", 0.0), (SMOOTHED, SMOOTHING))
    ]


def base() -> Candidate:
    return Candidate(BASE, "reference", F.cross_entropy)


def published() -> list[Candidate]:
    """The papers' own losses, as far as they are installed."""
    found = []
    if smooth_loss := peers.smooth(K):
        loss = Candidate("published smooth loss", "smooth", smooth_loss, K, 3e7, True)
        found.append(loss)
    if noised_loss := peers.noised(K, EPSILON, SAMPLES):
        most = 40e9 / (4 * 4 * SAMPLES)  # four float32 tensors with one number per sample in 40 GB
        found.append(Candidate("published noised loss", "noised", noised_loss, K, most, True))
    return found


def noised(samples: int | None = SAMPLES, epsilon: float = EPSILON) -> NoisedTopKLoss:
    return NoisedTopKLoss(k=K, epsilon=epsilon, samples=samples)


def compiled(loss: Loss) -> Loss:
    return torch.compile(loss, fullgraph=True, dynamic=False)


def reference(loss: Loss) -> Loss:
    """The same loss in plain PyTorch operations."""

    def run(logits: Tensor, target: Target) -> Tensor:
        with topklass.use_backend("reference"):
            return loss(logits, target)

    return run
