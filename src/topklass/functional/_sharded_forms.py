"""What ranks tell each other about their classes: the losses that can be computed from it.

Each form of a loss says what a rank tells of its classes in each row, what all ranks know of the
row then, and how losses follow from that.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, nan
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from topklass._checks import check_count
from topklass._collectives import ClassShards
from topklass._transforms import can_read_values, spread_nan
from topklass.functional._contract import RowLoss, working
from topklass.functional.hinge import hinge
from topklass.functional.noised import NoisedHinge
from topklass.functional.smooth import SmoothHinge
from topklass.functional.topk_cross_entropy import ListMixture, losses_of_states
from topklass.operators.row_states import row_states
from topklass.reference.power_sums import LARGEST_K, wide_dtype, working_dtype
from topklass.reference.row_states import (
    States,
    merged,
    shorter,
    smooth_gap_every_label,
)


class Told(NamedTuple):
    """What a rank knows of its own classes, for each row."""

    numbers: Tensor
    """For all ranks, (R, m), in float64."""
    places: Tensor
    """The classes that the numbers are about, for this rank alone, (R, ·)."""
    label: Tensor
    """The label's score, 0 if it is not here, (R, 1)."""


class Known(NamedTuple):
    """What every rank knows of the row after the exchange."""

    numbers: Tensor
    """The same on all ranks, (R, ·)."""
    places: Tensor
    """The classes that they are about; n for those of other ranks, (R, ·)."""


class ShardedLoss(Protocol):
    """A loss of rows in a form for ranks that have (R, n) scores of their own classes."""

    @property
    def loss(self) -> RowLoss:
        """Its parameters; margins are those of this rank's classes."""

    @property
    def longest(self) -> int:
        """The longest list, below the number of classes."""

    def check(self, dtype: torch.dtype) -> None:
        """Require parameters that this form serves."""

    def tell(self, scores: Tensor, labels: Tensor, every: bool) -> Told:
        """Look at the scores once; labels are (R, 1), −1 where they are not here."""

    def know(self, numbers: Tensor, places: Tensor, shards: ClassShards) -> Known:
        """From the numbers of all ranks, (W, R, m)."""

    def of_label(self, known: Known, score: Tensor, margin: float | Tensor) -> Tensor:
        """Losses (R, 1) of labels with these scores and margins."""

    def of_classes(self, scores: Tensor, known: Known, margin: float | Tensor) -> Tensor:
        """Losses (R, n) of each of this rank's classes as the label."""


def sharded_form(loss: RowLoss, rank: int) -> ShardedLoss:
    """The form of a loss for ranks that have slices of the classes."""
    if isinstance(loss, (SmoothHinge, ListMixture)):
        return ShardedLists(loss)
    if isinstance(loss, NoisedHinge):
        return ShardedNoised(loss, _seed(loss.generator) + rank)
    raise NotImplementedError(
        "for classes that are split over ranks there are the smooth loss, top-k cross-entropy, "
        "LDAM and the noised loss with samples, not this loss. Gather the logits first: "
        "logits.redistribute(placements=[Replicate()] * logits.device_mesh.ndim)"
    )


def _seed(generator: torch.Generator | None) -> int:
    """Drawn from a generator, or from PyTorch's own."""
    device = torch.device("cpu") if generator is None else generator.device
    return int(torch.randint(2**62, (), generator=generator, device=device))


@dataclass(frozen=True)
class ShardedLists:
    """Losses of gaps of lists: the states of rows with as many heads as the longest list.

    For every label, one head more.
    """

    loss: SmoothHinge | ListMixture

    @property
    def longest(self) -> int:
        return max(self.loss.lengths)

    def check(self, dtype: torch.dtype) -> None:
        largest = LARGEST_K[working_dtype(dtype)]
        check_count("k", self.longest, largest, f"for {dtype} and classes split over ranks")

    def tell(self, scores: Tensor, labels: Tensor, every: bool) -> Told:
        count = self.longest + every
        states, places, label = row_states(scores, labels, count, self.loss.temperature)
        return Told(torch.cat(states, 1), places, label)

    def know(self, numbers: Tensor, places: Tensor, shards: ClassShards) -> Known:
        heads, sums = numbers.movedim(0, 1).chunk(2, -1)
        whole, chosen = merged(heads, sums, self.loss.temperature)
        count = heads.shape[-1]
        own = (chosen // count == shards.rank) & (whole.heads != -inf)
        found = places.gather(1, chosen % count)
        return Known(torch.cat(whole, 1), torch.where(own, found, shards.size))

    def of_label(self, known: Known, score: Tensor, margin: float | Tensor) -> Tensor:
        return losses_of_states(self.loss, States(*known.numbers.chunk(2, 1)), score, margin)

    def of_classes(self, scores: Tensor, known: Known, margin: float | Tensor) -> Tensor:
        states, temperature = States(*known.numbers.chunk(2, 1)), self.loss.temperature
        wide = scores.to(wide_dtype(scores))
        gaps = [
            smooth_gap_every_label(
                wide, shorter(states, k + 1, temperature), known.places, k, temperature
            )
            for k in self.loss.lengths
        ]
        return self.loss.of_gaps(gaps, margin)


@dataclass(frozen=True)
class ShardedNoised:
    """The sampled noised hinge: the k + 1 largest scores under each noise vector.

    Noise that is not given is drawn by each rank for its own classes, from a seed of its own.
    """

    loss: NoisedHinge
    seed: int = 0
    """Of this rank's noise."""

    @property
    def longest(self) -> int:
        return self.loss.k

    def check(self, dtype: torch.dtype) -> None:
        """Serves all parameters."""

    def tell(self, scores: Tensor, labels: Tensor, every: bool) -> Told:
        count = self.loss.k + 1
        missing = max(0, count - scores.shape[1])
        scores = F.pad(working(scores), (0, missing), value=-inf)
        if scores.requires_grad:
            scores.register_hook(spread_nan)  # type: ignore[no-untyped-call]
        tops = []
        for noise in self._noise(scores, scores.shape[1] - missing):
            shift = F.pad(self.loss.epsilon * noise, (0, missing)).to(scores.dtype)
            tops.append((scores + shift).topk(count, 1).values)
        label = scores.gather(1, labels.clamp(min=0)).masked_fill(labels < 0, 0.0)
        wide = wide_dtype(scores)
        return Told(torch.cat(tops, 1).to(wide), labels, label.to(wide))

    def know(self, numbers: Tensor, places: Tensor, shards: ClassShards) -> Known:
        count = self.loss.k + 1
        ranks, rows, _ = numbers.shape
        every = (
            numbers.reshape(ranks, rows, self.loss.samples, count).permute(1, 2, 0, 3).flatten(2)
        )
        top = every.topk(count, -1).values
        rival = top[..., -1].mean(1, keepdim=True)
        spoilt = top[..., 0].isnan().any(1, keepdim=True)
        if can_read_values(spoilt) and not spoilt.any():
            return Known(rival, places)
        # NaN for all that ranks have told, so that the gradient is NaN on all of them.
        told = every.flatten(1).masked_fill(~spoilt, 0.0).sum(1, keepdim=True)
        return Known(torch.where(spoilt, told * nan, rival), places)

    def of_label(self, known: Known, score: Tensor, margin: float | Tensor) -> Tensor:
        return self.loss.scale * hinge(margin, known.numbers, score)

    def of_classes(self, scores: Tensor, known: Known, margin: float | Tensor) -> Tensor:
        return self.of_label(known, scores.to(known.numbers.dtype), margin)

    def _noise(self, scores: Tensor, classes: int) -> Iterator[Tensor]:
        """Noise vectors for (R, n) scores, one after another."""
        if self.loss.noise is not None:
            yield from self.loss.noise.unbind(-1)
            return
        generator = torch.Generator(scores.device).manual_seed(self.seed)
        for _ in range(self.loss.samples):
            yield torch.randn(
                (len(scores), classes),
                generator=generator,
                dtype=scores.dtype,
                device=scores.device,
            )
