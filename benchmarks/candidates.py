"""The losses that are timed side by side, with what each of them must equal."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import topklass
from experiments import peers
from topklass import NoisedTopKLoss, SmoothTopKLoss

K = 5
EPSILON, SAMPLES = 0.2, 10
"""Noise of the noised losses."""

BASE = "cross-entropy"
OURS = f"topklass, k = {K}"

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Candidate:
    """A loss under the name of the tables."""

    name: str
    family: Literal["cross-entropy", "smooth", "noised", "exact"]
    loss: Loss
    k: int = K
    most_logits: float = inf
    """Beyond it takes too much time or memory."""
    published: bool = False


def on_gpu() -> list[Candidate]:
    """Cross-entropy, ours by the default and by the reference algorithm, the published losses."""
    return [
        Candidate(BASE, "cross-entropy", F.cross_entropy),
        Candidate(f"{BASE}, compiled", "cross-entropy", compiled(F.cross_entropy)),
        *(
            Candidate(
                f"topklass, k = {k}", "smooth", SmoothTopKLoss(k=k), k, inf if k <= 32 else 1e7
            )
            for k in (K, 10, 20, 50)
        ),
        Candidate(f"{OURS}, reference", "smooth", reference(SmoothTopKLoss(k=K))),
        Candidate("topklass, noised", "noised", noised()),
        Candidate("topklass, noised exact", "exact", noised(None), most_logits=1e7),
        Candidate("topklass, noised, reference", "noised", reference(noised())),
        *published(),
    ]


def on_cpu() -> list[Candidate]:
    """Cross-entropy and ours, eager and compiled, the published losses."""
    return [
        Candidate(BASE, "cross-entropy", F.cross_entropy),
        Candidate(f"{BASE}, compiled", "cross-entropy", compiled(F.cross_entropy)),
        Candidate("topklass", "smooth", SmoothTopKLoss(k=K)),
        Candidate("topklass, compiled", "smooth", compiled(SmoothTopKLoss(k=K))),
        Candidate("topklass, noised", "noised", noised()),
        *published(),
    ]


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


def noised(samples: int | None = SAMPLES) -> NoisedTopKLoss:
    return NoisedTopKLoss(k=K, epsilon=EPSILON, samples=samples)


def compiled(loss: Loss) -> Loss:
    return torch.compile(loss, fullgraph=True, dynamic=False)


def reference(loss: Loss) -> Loss:
    """The same loss in plain PyTorch operations."""

    def run(logits: Tensor, target: Tensor) -> Tensor:
        with topklass.use_backend("reference"):
            return loss(logits, target)

    return run
