"""The smooth top-k loss up to k = 10 on a GPU, and what launches of all kernels share.

The forward pass reads the scores once, for the states of rows (``row_state.py``), and turns these
into losses and the constants of their gradients (``row_constants.py``), in one launch where the
batch is small. The backward pass reads the scores once more and writes their gradient
(``gradient.py``).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from math import e, gcd, log2, nan
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from topklass._checks import Options
from topklass.kernels.smooth.gradient import gradient_kernel
from topklass.kernels.smooth.row_constants import Numbers, Outputs, smooth_loss_kernel
from topklass.kernels.smooth.row_state import Problem, Tile, row_state_kernel
from topklass.reference.power_sums import LARGEST_K_IN_FLOAT32

LOG2_E = log2(e)
MOST_PROGRAMS = 4096
"""Enough to fill a GPU; each takes several tiles."""
MOST_PIECES = 2048
"""Rows times the pieces of each, unless there are more rows."""
SMALL = 2**22
"""Up to this many scores a launch costs more than what it does."""
LARGEST_K_JOINED = 16
"""Beyond it two kernels use fewer registers, and compile faster, than one."""

_counters: dict[tuple[int, int], Tensor] = {}


class SmoothLoss(Protocol):
    """The parameters of the smooth loss."""

    @property
    def k(self) -> int:
        """Length of the list."""

    @property
    def tau(self) -> float:
        """Temperature."""

    @property
    def margin(self) -> float | Tensor:
        """A number, or one per class."""


class GivenLoss(NamedTuple):
    """A smooth loss as custom operators receive it."""

    k: int
    tau: float
    margin: float | Tensor


class Plan(NamedTuple):
    """How the work on rows is divided."""

    states: Tile
    """Of the first kernel."""
    constants: Tile
    """Of the second."""
    gradient: Tile
    """Of the third."""
    warps: int
    """Of the kernel that reads the states."""
    parts: int
    """Pieces of a row, each for one program."""
    piece: int
    """Columns of a piece."""
    programs: int
    """Programs of the second kernel."""


# What launches of all kernels share.


def launch(kernel: Any, grid: tuple[int, ...], warps: int, scores: Tensor, *rest: Any) -> None:
    """Run ``kernel[grid](*rest)`` on the device of the scores."""
    if scores.is_cuda and scores.get_device() != torch.cuda.current_device():
        with torch.cuda.device(scores.device):
            kernel[grid](*rest, num_warps=warps)
    else:
        kernel[grid](*rest, num_warps=warps)


def new_counter(scores: Tensor) -> Tensor:
    """A counter at 0: for compiled calls, whose memory may belong to a CUDA graph."""
    return scores.new_zeros(1, dtype=torch.float64)


def shared_counter(scores: Tensor) -> Tensor:
    """A counter at 0 that every launch leaves at 0: for eager calls, which need not set it to 0.

    Launches on one stream follow each other and share theirs. A CUDA graph gets its own, since it
    may be replayed on any stream.
    """
    if not scores.is_cuda or torch.cuda.is_current_stream_capturing():
        return new_counter(scores)
    index = scores.get_device()
    key = (index, torch.cuda.current_stream(index).cuda_stream)
    if key not in _counters:
        _counters[key] = new_counter(scores)
    return _counters[key]


def rows_of(
    scores: Tensor,
    labels: Tensor | None = None,
    margins: Tensor | None = None,
    weight: Tensor | None = None,
    chances: Tensor | None = None,
) -> Problem:
    """What kernels read, each row in one piece; scores alone may begin anywhere in memory."""
    whole = scores if scores.stride(1) == 1 else scores.contiguous()
    others = (labels, margins, weight, chances)
    return Problem(whole, *(t if t is None else _aligned(t) for t in others))


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor at an address for which kernels are compiled in any case."""
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def margins_and_number(margin: float | Tensor, scores: Tensor) -> tuple[Tensor | None, float]:
    """Margins of classes and 0, or none and a number."""
    if not isinstance(margin, Tensor):
        return None, float(margin)
    if margin.dim() == 0 and margin.device.type == "cpu" and not torch.compiler.is_compiling():
        return None, float(margin)  # a copy to the device would wait for it
    margin = margin.to(scores.device, torch.float32)
    return margin.expand(scores.shape[1]).contiguous(), 0.0


def new_result(scores: Tensor, reduction: str) -> Tensor:
    """Room for losses of rows, or for their sum or mean."""
    return scores.new_empty(scores.shape[0] if reduction == "none" else (), dtype=torch.float32)


def of_no_rows(result: Tensor, reduction: str) -> Tensor:
    """The loss of an empty batch, as cross-entropy has it."""
    return result.fill_(nan if reduction == "mean" else 0.0)


def new_gradient(scores: Tensor) -> Tensor:
    """Room for a gradient, contiguous."""
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


def row_stride(outgoing: Tensor) -> int:
    """From one row's outgoing gradient to the next; 0 if they share one."""
    return outgoing.stride(0) if outgoing.dim() else 0


def alignment(scores: Tensor) -> int:
    """What divides the beginnings and the lengths of rows, as far as it matters for reading."""
    return gcd(scores.stride(0), scores.shape[1], 16)


def power_of_two(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def room_for_heads(k: int) -> int:
    """Slots for k heads."""
    return max(2, power_of_two(k))


def halves(value: float) -> tuple[float, float]:
    """A number as the sum of two of single precision, in which kernels take their arguments."""
    high = value * (2.0**29 + 1)
    high -= high - value  # the 24 leading bits
    return high, value - high


# The launches of the smooth loss; the operators of polynomials use them too.


@lru_cache(maxsize=1024)
def plan(
    rows: int, columns: int, aligned: int, k: int, reduction: str = "none", exact: bool = False
) -> Plan:
    """Tiles that keep a GPU busy: one warp for a tile, several tiles for a row, or the reverse."""
    slots = room_for_heads(k)
    precision = 2 if exact else int(k > LARGEST_K_IN_FLOAT32)
    small = rows * columns <= SMALL and columns <= 2**14
    joined = small and k <= LARGEST_K_JOINED and not exact
    if joined and columns > 1024:
        block, warps = 4096, 8
    else:
        widest = 512 if k <= LARGEST_K_IN_FLOAT32 else 256
        block, warps = min(widest, max(32, power_of_two(columns))), 1
    parts, piece = 1, columns
    if not joined:
        tiles = -(-columns // block)
        piece = -(-tiles // max(1, min(tiles // 4, MOST_PIECES // rows, 32))) * block
        parts = -(-columns // piece)
    states = Tile(k, slots, max(1, 256 // block), block, precision, aligned)
    if joined:
        constants = replace(states, reads=True, reduction=reduction)
    else:
        tall = 1 if parts > 1 else max(1, 32 // slots)
        constants = Tile(k, slots, tall, parts=power_of_two(parts), reduction=reduction)
    wide = min(1024, max(32, power_of_two(columns)))
    mean = "mean" if reduction == "mean" else "none"
    gradient = replace(states, rows=max(1, 256 // wide), block=wide, reduction=mean)
    programs = min(-(-rows // constants.rows), MOST_PROGRAMS)
    return Plan(states, constants, gradient, warps, parts, piece, programs)


def new_buffer(scores: Tensor, k: int) -> Tensor:
    """Room for a number, the states of rows, and two sums for each program, at most."""
    states = torch.sym_max(scores.shape[0], MOST_PIECES)
    size = 1 + states * (3 * k + 2) + 2 * MOST_PROGRAMS
    return scores.new_empty(size, dtype=torch.float64)


def read_states(problem: Problem, buffer: Tensor, temperature: float, plan: Plan) -> None:
    """Write the states of rows into the buffer."""
    scores = problem.scores
    rows, columns = scores.shape
    launch(
        row_state_kernel,
        (-(-rows // plan.states.rows), plan.parts),
        plan.warps,
        scores,
        problem,
        buffer,
        rows,
        columns,
        scores.stride(0),
        plan.piece,
        LOG2_E / temperature,
        plan.states,
    )


def write_gradient(
    problem: Problem,
    buffer: Tensor,
    outgoing: Tensor,
    temperature: float,
    plan: Plan,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient (R, n) from the constants in the buffer, scaled by the outgoing one, () or (R).

    For the mean it is divided by the buffer's first number. It is written into ``out``, if given.
    """
    scores, tile = problem.scores, plan.gradient
    rows, columns = scores.shape
    result = new_gradient(scores) if out is None else out
    launch(
        gradient_kernel,
        (-(-rows // tile.rows), -(-columns // tile.block)),
        1,
        scores,
        problem,
        buffer,
        outgoing,
        result,
        rows,
        columns,
        scores.stride(0),
        plan.parts,
        row_stride(outgoing),
        LOG2_E / temperature,
        tile,
    )
    return result


def forward(
    scores: Tensor,
    labels: Tensor,
    loss: SmoothLoss,
    options: Options,
    differentiate: bool,
    counter: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The reduced loss of (R, n) scores, float32, or (R) losses; and what the gradient needs.

    The latter is a buffer with the constants of rows, a by-product of the loss.
    """
    counter = shared_counter(scores) if counter is None else counter
    margins, margin = margins_and_number(loss.margin, scores)
    problem = rows_of(scores, labels, margins, options.weight)
    scores = problem.scores
    rows, columns = scores.shape
    k, tau = int(loss.k), float(loss.tau)
    tiles = plan(rows, columns, alignment(scores), k, options.reduction)
    buffer, result = new_buffer(scores, k), new_result(scores, options.reduction)
    if not tiles.constants.reads:
        read_states(problem, buffer, k * tau, tiles)
    launch(
        smooth_loss_kernel,
        (tiles.programs,),
        tiles.warps if tiles.constants.reads else 1,
        scores,
        problem,
        Outputs(buffer, counter, result),
        Numbers(*halves(tau), *halves(margin), LOG2_E / (k * tau)),
        rows,
        columns,
        scores.stride(0),
        tiles.parts,
        int(options.ignore_index),
        tiles.constants,
    )
    return result, (buffer,)


def backward(
    outgoing: Tensor,
    scores: Tensor,
    labels: Tensor,
    saved: tuple[Tensor, ...],
    loss: SmoothLoss,
    options: Options,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient (R, n), scaled by the outgoing one, () or (R).

    It is written into ``out``, if given: contiguous, and possibly the scores themselves.
    """
    (buffer,) = saved
    problem = rows_of(scores, labels)
    rows, columns = scores.shape
    k, tau = int(loss.k), float(loss.tau)
    tiles = plan(rows, columns, alignment(problem.scores), k, options.reduction)
    return write_gradient(problem, buffer, outgoing, k * tau, tiles, out)


# The same for torch.compile and torch.export, which do not look inside custom operators.

Forward = Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
Backward = Callable[..., Tensor]


def custom_operator(
    name: str, forward: Forward, backward: Backward, new_buffer: Callable[[Tensor, int], Tensor]
) -> Callable[[Tensor, Tensor, SmoothLoss, Options], Tensor]:
    """Both passes of a smooth loss as a custom operator, differentiable once."""

    @torch.library.custom_op(f"topklass::{name}", mutates_args=())
    def loss_and_buffer(
        scores: Tensor,
        labels: Tensor,
        margins: Tensor | None,
        k: int,
        tau: float,
        margin: float,
        weight: Tensor | None,
        ignore_index: int,
        reduction: str,
    ) -> tuple[Tensor, Tensor]:
        loss = GivenLoss(k, tau, margin if margins is None else margins)
        options = Options(weight, ignore_index, reduction)
        if scores.shape[0] == 0:
            return of_no_rows(new_result(scores, reduction), reduction), new_buffer(scores, k)
        result, (buffer,) = forward(scores, labels, loss, options, True, new_counter(scores))
        return result, buffer

    @loss_and_buffer.register_fake
    def _(
        scores: Tensor, labels: Tensor, margins: Tensor | None, k: int, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        return new_result(scores, rest[-1]), new_buffer(scores, k)

    @torch.library.custom_op(f"topklass::{name}_gradient", mutates_args=())
    def gradient(
        outgoing: Tensor,
        scores: Tensor,
        labels: Tensor,
        buffer: Tensor,
        k: int,
        tau: float,
        reduction: str,
    ) -> Tensor:
        if scores.shape[0] == 0:
            return new_gradient(scores)
        loss, options = GivenLoss(k, tau, 0.0), Options(None, 0, reduction)
        return backward(outgoing, scores, labels, (buffer,), loss, options)

    @gradient.register_fake
    def _(outgoing: Tensor, scores: Tensor, *_: Any) -> Tensor:
        return new_gradient(scores)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        scores, labels, _, ctx.k, ctx.tau, *_, ctx.reduction = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(scores, labels, output[1])

    def differentiated(ctx: Any, outgoing: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        parameters = (ctx.k, ctx.tau, ctx.reduction)
        return gradient(outgoing, *ctx.saved_tensors, *parameters), *(None,) * 8

    loss_and_buffer.register_autograd(differentiated, setup_context=setup_context)

    def traced(scores: Tensor, labels: Tensor, loss: SmoothLoss, options: Options) -> Tensor:
        """The loss, differentiable, as ``forward`` returns it."""
        margins, margin = margins_and_number(loss.margin, scores)
        given = (options.weight, options.ignore_index, options.reduction)
        result, _ = loss_and_buffer(scores, labels, margins, loss.k, loss.tau, margin, *given)
        return cast(Tensor, result)

    return traced


traced = custom_operator("smooth_loss", forward, backward, new_buffer)
