"""Last layers with their losses, in one and one after the other, and what each must equal."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import topklass.functional as TF
from topklass.functional import _linear_function

K = 5
MIXTURE = {1: 0.5, 5: 0.5}

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of input (N, d), weight (C, d) and labels (N), the mean."""
Exact = Callable[[Tensor, Tensor], Tensor]
"""Of logits and labels, the losses of rows."""

PLAIN = "layer, then F.cross_entropy"
PLAIN_SMOOTH = f"layer, then smooth, k = {K}"
CHUNKS = "chunks, cross-entropy"
OURS = f"chunks, smooth, k = {K}"
LISTS = f"chunks, top-k cross-entropy, k = {K}"
MIXED = f"chunks, mixture of 1 and {K}"
BY_ROWS = f"chunks of rows, smooth, k = {K}"
BY_CLASSES = f"chunks of classes, smooth, k = {K}"
TORCH = "torch, linear_cross_entropy"
LIGER = "Liger-Kernel, cross-entropy"
CUT = "cut-cross-entropy"


@dataclass(frozen=True)
class Candidate:
    """A layer with its loss under the name of the tables."""

    name: str
    exact: Exact
    loss: Loss


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, reduction="none")


def smooth(logits: Tensor, target: Tensor) -> Tensor:
    return TF.smooth_topk_loss(logits, target, K, reduction="none")


def lists(logits: Tensor, target: Tensor) -> Tensor:
    return TF.topk_cross_entropy(logits, target, K, reduction="none")


def mixture(logits: Tensor, target: Tensor) -> Tensor:
    return TF.topk_cross_entropy(logits, target, MIXTURE, reduction="none")


def candidates(chunk_bytes: int | None = None) -> list[Candidate]:
    """Ours with so much memory for a chunk, and peers that are installed."""

    def plain(loss: Callable[..., Tensor], **parameters: int) -> Loss:
        return lambda x, w, y: loss(F.linear(x, w), y, **parameters)

    def chunks(loss: Callable[..., Tensor], k: int | dict[int, float]) -> Loss:
        return lambda x, w, y: loss(x, w, y, k, chunk_bytes=chunk_bytes)

    def forced(by_classes: bool) -> Loss:
        def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
            with patch.object(_linear_function, "fewer_bytes", lambda *_: by_classes):
                return TF.linear_smooth_topk_loss(x, w, y, K, chunk_bytes=chunk_bytes)

        return loss

    found = [
        Candidate(PLAIN, cross_entropy, plain(F.cross_entropy)),
        Candidate(PLAIN_SMOOTH, smooth, plain(TF.smooth_topk_loss, k=K)),
        Candidate(CHUNKS, cross_entropy, chunks(TF.linear_topk_cross_entropy, 1)),
        Candidate(OURS, smooth, chunks(TF.linear_smooth_topk_loss, K)),
        Candidate(LISTS, lists, chunks(TF.linear_topk_cross_entropy, K)),
        Candidate(MIXED, mixture, chunks(TF.linear_topk_cross_entropy, MIXTURE)),
        Candidate(BY_ROWS, smooth, forced(False)),
        Candidate(BY_CLASSES, smooth, forced(True)),
    ]
    return found + [Candidate(name, cross_entropy, loss) for name, loss in peers().items()]


def peers() -> dict[str, Loss]:
    """Cross-entropy in one with the layer, by others."""
    found: dict[str, Loss] = {}
    theirs = getattr(F, "linear_cross_entropy", None)
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if theirs is not None and options is not None:
        found[TORCH] = lambda x, w, y: theirs(x, w, y, options=options())
    if find_spec("liger_kernel") is not None:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        found[LIGER] = lambda x, w, y: liger_fused_linear_cross_entropy(x, w, y)
    if find_spec("cut_cross_entropy") is not None:
        from cut_cross_entropy import linear_cross_entropy

        found[CUT] = lambda x, w, y: linear_cross_entropy(x, w, y)
    return found
