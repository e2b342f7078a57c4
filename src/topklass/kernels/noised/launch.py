"""The noised top-k and its loss on a GPU: no tensor of noise, sparse gradients."""

from math import sqrt
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from topklass._checks import Options
from topklass.kernels.noised.gradient import ROWS, Kept, noised_gradient_kernel
from topklass.kernels.noised.loss import Numbers, Tile, Work, noised_kernel
from topklass.kernels.smooth.launch import (
    MOST_PROGRAMS,
    alignment,
    launch,
    margins_and_number,
    new_counter,
    new_gradient,
    new_result,
    of_no_rows,
    power_of_two,
    room_for_heads,
    row_stride,
    rows_of,
    shared_counter,
)
from topklass.kernels.smooth.row_constants import Outputs
from topklass.kernels.smooth.row_state import Problem

FEW_ROWS = 1024
"""Up to so many, programs leave a GPU idle while they wait, and take more together."""

STEP = 256
"""Classes that are read together where many are near the k-th largest: 128 registers on sm_90."""

Sampling = tuple[Tensor, Tensor, Tensor, Tensor]
"""Result, chosen classes, slopes, and a buffer that begins with the total weight."""


class HingeLoss(Protocol):
    """The parameters of the noised loss, sampled or exact."""

    @property
    def k(self) -> int:
        """Length of the list."""

    @property
    def epsilon(self) -> float:
        """Size of the noise."""

    @property
    def margin(self) -> float | Tensor:
        """A number, or one per class."""

    @property
    def scale(self) -> float:
        """Multiplies the loss."""


class NoisedLoss(HingeLoss, Protocol):
    """The parameters of the sampled loss."""

    @property
    def samples(self) -> int:
        """Number of noise vectors."""

    @property
    def generator(self) -> torch.Generator | None:
        """Source of the noise."""


class Sampled(NamedTuple):
    """The parameters of a noised top-k, or of the hinge loss above it."""

    k: int
    """Rank."""
    epsilon: float
    samples: int
    margin: float = 0.0
    scale: float = 1.0


def of_loss(loss: NoisedLoss, margin: float) -> Sampled:
    """The label competes with the (k + 1)-th largest score."""
    k, samples = int(loss.k) + 1, int(loss.samples)
    return Sampled(k, float(loss.epsilon), samples, margin, float(loss.scale))


def draw_seed(scores: Tensor, generator: torch.Generator | None) -> Tensor:
    """A seed that stays on the device: nothing waits for it, and a CUDA graph draws it anew."""
    return torch.randint(2**62, (1,), generator=generator, device=scores.device)


def room_for_samples(samples: int) -> int:
    """Samples in a tile: noise comes in fours."""
    return max(4, power_of_two(samples))


def tile_and_warps(rows: int, columns: int, k: int, samples: int) -> tuple[int, int]:
    """Candidates that get their noise together, at least as many as there are heads, and warps.

    Example:
        >>> tile_and_warps(256, 1000, 5, 3), tile_and_warps(256, 1000, 5, 10)
        ((128, 1), (32, 4))
        >>> tile_and_warps(4096, 1000, 5, 3), tile_and_warps(4096, 1000, 5, 10)
        ((32, 1), (32, 1))
    """
    few_rows, few_samples = rows <= FEW_ROWS, samples <= 4
    tile = 128 if few_rows and few_samples and columns >= 512 else 32
    return max(tile, room_for_heads(k)), 4 if few_rows and not few_samples else 1


def enough(k: int) -> int:
    """Classes that should exceed a threshold, as in the reference: k do in 99.5 % of samples."""
    return int(k + 3 * sqrt(k) + 2)


def new_outputs(scores: Tensor, samples: int, reduction: str) -> Sampling:
    """Room for the result, the chosen classes, the slopes, and two sums for each program."""
    rows = scores.shape[0]
    return (
        new_result(scores, reduction),
        scores.new_empty((rows, samples), dtype=torch.int32),
        scores.new_empty(rows, dtype=torch.float32),
        scores.new_empty(1 + 2 * MOST_PROGRAMS, dtype=torch.float64),
    )


def choose(
    problem: Problem,
    seed: Tensor,
    sampled: Sampled,
    ignore_index: int,
    reduction: str,
    counter: Tensor,
) -> Sampling:
    """The noised top-k or the reduced loss, and what the gradient needs."""
    scores, k, samples = problem.scores, sampled.k, sampled.samples
    rows, columns = scores.shape
    programs = min(rows, MOST_PROGRAMS)
    block = min(512, max(32, power_of_two(columns)))
    together, warps = tile_and_warps(rows, columns, k, samples)
    candidates = scores.new_empty(programs * 2 * block, dtype=torch.int32)
    result, chosen, slopes, buffer = new_outputs(scores, samples, reduction)
    launch(
        noised_kernel,
        (programs,),
        warps,
        scores,
        problem,
        Work(seed, candidates, chosen, slopes),
        Outputs(buffer, counter, result),
        Numbers(sampled.epsilon, sampled.margin, sampled.scale),
        rows,
        columns,
        scores.stride(0),
        samples,
        int(ignore_index),
        Tile(
            k,
            room_for_heads(k),
            room_for_samples(samples),
            block,
            min(block, STEP),
            together,
            enough(k),
            alignment(scores),
            reduction,
        ),
    )
    return result, chosen, slopes, buffer


def shares(
    outgoing: Tensor,
    scores: Tensor,
    labels: Tensor | None,
    saved: tuple[Tensor | None, ...],
    mean: bool,
) -> Tensor:
    """The gradient (R, n), scaled by the outgoing one, () or (R)."""
    kept = Kept(*saved)
    (rows, columns), samples = scores.shape, kept.chosen.shape[1]
    result = torch.zeros_like(scores, memory_format=torch.contiguous_format)
    launch(
        noised_gradient_kernel,
        (-(-rows // ROWS.value),),
        1,
        scores,
        labels,
        kept,
        outgoing,
        result,
        rows,
        columns,
        samples,
        row_stride(outgoing),
        room_for_samples(samples),
        mean,
    )
    return result


def forward(
    scores: Tensor, labels: Tensor, loss: NoisedLoss, options: Options, differentiate: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The reduced loss of (R, n) scores, float32, or (R) losses; and what the gradient needs.

    The latter are the chosen classes, the slopes of rows and the total weight.
    """
    margins, margin = margins_and_number(loss.margin, scores)
    problem = rows_of(scores, labels, margins, options.weight)
    seed = draw_seed(scores, loss.generator)
    counter, sampled = shared_counter(scores), of_loss(loss, margin)
    result, *saved = choose(
        problem, seed, sampled, options.ignore_index, options.reduction, counter
    )
    return result, tuple(saved)


def backward(
    outgoing: Tensor,
    scores: Tensor,
    labels: Tensor,
    saved: tuple[Tensor, ...],
    loss: NoisedLoss,
    options: Options,
) -> Tensor:
    """The gradient (R, n), scaled by the outgoing one, () or (R)."""
    return shares(outgoing, scores, labels, saved, options.reduction == "mean")


def noised_topk(
    scores: Tensor, k: int, epsilon: float, samples: int, generator: torch.Generator | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The average k-th largest noised score of (R, n) scores, (R); and what the gradient needs."""
    seed = draw_seed(scores, generator)
    sampled = Sampled(int(k), float(epsilon), int(samples))
    counter = shared_counter(scores)
    value, chosen, slopes, _ = choose(rows_of(scores), seed, sampled, 0, "none", counter)
    return value, (chosen, slopes)


def noised_topk_gradient(outgoing: Tensor, scores: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
    """The gradient (R, n) of the noised top-k, scaled by the outgoing one, (R)."""
    return shares(outgoing, scores, None, (*saved, None), False)


# The same for torch.compile and torch.export, which do not look inside custom operators.


def traced(scores: Tensor, labels: Tensor, loss: NoisedLoss, options: Options) -> Tensor:
    """The loss, differentiable, as ``forward`` returns it."""
    margins, margin = margins_and_number(loss.margin, scores)
    sampled = of_loss(loss, margin)
    seed = draw_seed(scores, loss.generator)
    numbers = [sampled.epsilon, sampled.margin, sampled.scale]
    given = (options.weight, options.ignore_index, options.reduction)
    result, *_ = noised(scores, labels, margins, seed, sampled.k, sampled.samples, *numbers, *given)
    return cast(Tensor, result)


@torch.library.custom_op("topklass::noised", mutates_args=())
def noised(
    scores: Tensor,
    labels: Tensor,
    margins: Tensor | None,
    seed: Tensor,
    k: int,
    samples: int,
    epsilon: float,
    margin: float,
    scale: float,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The reduced loss, and what the gradient needs."""
    if scores.shape[0] == 0:
        result, *others = new_outputs(scores, samples, reduction)
        return (of_no_rows(result, reduction), *others)  # type: ignore[return-value]
    problem = rows_of(scores, labels, margins, weight)
    sampled = Sampled(k, epsilon, samples, margin, scale)
    return choose(problem, seed, sampled, ignore_index, reduction, new_counter(scores))


@noised.register_fake
def _(
    scores: Tensor,
    labels: Tensor,
    margins: Tensor | None,
    seed: Tensor,
    k: int,
    samples: int,
    *rest: Any,
) -> tuple[Tensor, ...]:
    return new_outputs(scores, samples, rest[-1])


@torch.library.custom_op("topklass::noised_gradient", mutates_args=())
def noised_gradient(
    outgoing: Tensor,
    scores: Tensor,
    labels: Tensor,
    chosen: Tensor,
    slopes: Tensor,
    buffer: Tensor,
    mean: bool,
) -> Tensor:
    """The gradient of the reduced loss."""
    if scores.shape[0] == 0:
        return new_gradient(scores)
    return shares(outgoing, scores, labels, (chosen, slopes, buffer), mean)


@noised_gradient.register_fake
def _(outgoing: Tensor, scores: Tensor, *_: Any) -> Tensor:
    return new_gradient(scores)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    scores, labels, *_, reduction = inputs
    ctx.mean = reduction == "mean"
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(scores, labels, *output[1:])


def _backward(ctx: Any, outgoing: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return noised_gradient(outgoing, *ctx.saved_tensors, ctx.mean), *(None,) * 11


noised.register_autograd(_backward, setup_context=_setup_context)
