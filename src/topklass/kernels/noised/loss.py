r"""The noised top-k: the k-th largest of ``s + εZ_b`` for each sample b, without storing Z.

Normal noise made from 24-bit uniforms is bounded, ``|z| ≤ FARTHEST``. A program reads its row once
to find the k largest scores; the least of them with their noise, less ``ε·FARTHEST``, is a bound
that every chosen class reaches. It reads the row once more to collect the candidates above the
bound; only they get noise, from a counter-based generator (Philox) keyed by seed, row, class and
sample. Rows with many classes near the k-th largest take ``exceedances.py`` instead. The chosen
classes are kept for the backward pass.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from topklass.kernels.noised.exceedances import MANY, kth_of_many, row_heads_and_groups
from topklass.kernels.noised.hinge import Hinge, hinge_loss
from topklass.kernels.noised.noise import FARTHEST, normals
from topklass.kernels.smooth.row_constants import add_up
from topklass.kernels.smooth.row_state import (
    ABSENT,
    NOWHERE,
    as_key,
    as_score,
    multiple,
    no_heads,
    take_heads,
)


@dataclass(frozen=True)
class Tile:
    """What the kernel is compiled for."""

    k: int
    slots: int
    """Room for the heads, a power of two."""
    samples: int
    """Room for the samples, a power of two and a multiple of 4."""
    block: int
    """Classes that are read together."""
    step: int
    """The same where many classes are near the k-th largest, and each needs more registers."""
    candidates: int
    """Those that get their noise together, at least k."""
    enough: int
    """Classes that should exceed a threshold, such that k do in almost every sample."""
    aligned: int
    """What divides the stride and the length of rows."""
    reduction: str


class Numbers(NamedTuple):
    """The parameters of the loss."""

    epsilon: Any
    margin: Any
    scale: Any


class Work(NamedTuple):
    """What the kernel needs and leaves besides the result."""

    seed: Any
    candidates: Any
    """Room for two blocks of classes for each program."""
    chosen: Any
    """(R, samples), the class that was the k-th largest."""
    slopes: Any
    """(R), of the loss by the noised k-th largest score; NaN in a row with NaN."""


class Noise(NamedTuple):
    """How the noise of a row is made."""

    seed: Any
    row: Any
    epsilon: Any
    rate: Any
    """1/ε."""
    samples: Any


@triton.jit
def noised_scores(line, room, start, found, noise, TILE: tl.constexpr):
    """Scores of a tile of candidates with noise, (samples, tile), and their classes, (1, tile)."""
    SAMPLES: tl.constexpr = TILE.samples
    CANDIDATES: tl.constexpr = TILE.candidates
    entry = start + tl.arange(0, CANDIDATES)
    classes = tl.load(room + entry, entry < found, 0)
    s = tl.load(line + classes, entry < found, float("-inf")).to(tl.float32)
    z = normals(noise.seed, noise.row, classes, SAMPLES, CANDIDATES)
    return s[None, :] + noise.epsilon * z, classes[None, :]


@triton.jit
def row_bound(line, room, heads, places, noise, TILE: tl.constexpr):
    """A score that every chosen class reaches, given the k largest scores and their classes.

    In no sample is the k-th largest below the least of the k largest scores with their noise.
    """
    K: tl.constexpr = TILE.k
    bound = as_score(tl.min(tl.min(heads, 1), 0)) - 2 * FARTHEST * noise.epsilon
    if bound > float("-inf"):
        slots = tl.arange(0, TILE.slots)[None, :]
        tl.store(room + slots, places, slots < K)
        tl.debug_barrier()
        noised, _ = noised_scores(line, room, 0, K, noise, TILE)
        used = tl.arange(0, TILE.samples)[:, None] < noise.samples
        used = used & (tl.arange(0, TILE.candidates)[None, :] < K)
        least = tl.min(tl.min(tl.where(used, noised, float("inf")), 1), 0)
        bound = tl.maximum(bound, least - FARTHEST * noise.epsilon)
        tl.debug_barrier()
    return bound


@triton.jit
def kth_of_few(line, room, found, noise, TILE: tl.constexpr):
    """Key of the k-th largest of all candidates, and its class: k times the next smaller one."""
    noised, classes = noised_scores(line, room, 0, found, noise, TILE)
    best = tl.max(noised, 1)
    kth = best
    taken = tl.sum((noised == best[:, None]).to(tl.int32), 1)
    for _ in range(TILE.k - 1):
        best = tl.max(tl.where(noised < best[:, None], noised, float("-inf")), 1)
        kth = tl.where(taken < TILE.k, best, kth)
        taken += tl.sum((noised == best[:, None]).to(tl.int32), 1)
    place = tl.min(tl.where(noised == kth[:, None], classes, NOWHERE), 1)
    return as_key(kth), tl.where(kth == float("-inf"), -1, place)


@triton.jit
def take_noised(line, room, found, noise, heads, places, TILE: tl.constexpr):
    """Exchange the heads of samples for candidates with noise that exceed them."""
    SAMPLES: tl.constexpr = TILE.samples
    CANDIDATES: tl.constexpr = TILE.candidates
    for start in range(0, found, CANDIDATES):
        noised, classes = noised_scores(line, room, start, found, noise, TILE)
        classes = tl.broadcast_to(classes, (SAMPLES, CANDIDATES))
        noised, heads, places, _ = take_heads(noised, classes, heads, places)
    return heads, places


@triton.jit
def kth_noised(line, room, columns, bound, noise, TILE: tl.constexpr):
    """Key of the k-th largest score with noise in each sample, and its class.

    Usually there are few candidates above the bound; if not, samples keep heads as rows do, from
    one tile of candidates to the next.
    """
    K: tl.constexpr = TILE.k
    SAMPLES: tl.constexpr = TILE.samples
    SLOTS: tl.constexpr = TILE.slots
    heads, places = no_heads(SAMPLES, K, SLOTS)
    least = tl.full((SAMPLES,), ABSENT, tl.int32)
    place = tl.full((SAMPLES,), -1, tl.int32)
    found = 0
    before = 0
    for begin in range(0, columns, TILE.block):
        column = begin + tl.arange(0, TILE.block)
        x = tl.load(line + column, column < columns, float("-inf")).to(tl.float32)
        near = ((x >= bound) & (x > float("-inf"))).to(tl.int32)
        tl.store(room + found + tl.cumsum(near, 0) - 1, column, near > 0)
        found += tl.sum(near, 0)
        last = begin + TILE.block >= columns
        if last & (before == 0) & (found <= TILE.candidates):
            tl.debug_barrier()
            least, place = kth_of_few(line, room, found, noise, TILE)
            tl.debug_barrier()
        elif last | (found > TILE.block):
            tl.debug_barrier()
            heads, places = take_noised(line, room, found, noise, heads, places, TILE)
            least = tl.min(heads, 1)
            place = tl.max(tl.where(heads == least[:, None], places, -1), 1)
            tl.debug_barrier()
            before += found
            found = 0
    return least, place


@triton.jit(do_not_specialize=("rows", "columns", "stride", "samples", "ignore_index"))
def noised_kernel(
    problem,
    work,
    outputs,
    numbers,
    rows,
    columns,
    stride,
    samples,
    ignore_index,
    TILE: tl.constexpr,
):
    """The average k-th largest noised score of every ``programs``-th row; with labels the loss."""
    ALIGNED: tl.constexpr = TILE.aligned
    epsilon = tl.cast(numbers.epsilon, tl.float32)
    rate = 1.0 / tl.maximum(epsilon, 1e-30)
    hinge = Hinge(
        tl.cast(numbers.margin, tl.float32), tl.cast(numbers.scale, tl.float32), ignore_index
    )
    seed = tl.load(work.seed)
    room = work.candidates + tl.program_id(0) * (2 * TILE.block)
    sample = tl.arange(0, TILE.samples)
    used = sample < samples
    columns = multiple(columns, ALIGNED)
    all_losses = tl.zeros((), tl.float64)
    all_weights = tl.zeros((), tl.float64)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        whole = tl.cast(multiple(stride, ALIGNED), tl.int64)
        line = problem.scores + tl.cast(row, tl.int64) * whole
        noise = Noise(seed, row, epsilon, rate, samples)
        heads, places, spoilt, groups = row_heads_and_groups(line, columns, epsilon, TILE)
        if groups > MANY:
            least, place = kth_of_many(line, room, columns, noise, TILE)
        else:
            bound = row_bound(line, room, heads, places, noise, TILE)
            least, place = kth_noised(line, room, columns, bound, noise, TILE)
        tl.store(work.chosen + tl.cast(row, tl.int64) * samples + sample, place, used)
        top = tl.sum(tl.where(used, as_score(least), 0.0), 0) / samples
        top = tl.where(spoilt > 0, float("nan"), top)
        slope = tl.where(spoilt > 0, float("nan"), 1.0)
        if problem.labels is not None:
            loss, weight, slope, _, _ = hinge_loss(problem, line, row, columns, top, hinge)
            if TILE.reduction == "none":
                tl.store(outputs.result + row, loss)
            all_losses += loss
            all_weights += weight
        else:
            tl.store(outputs.result + row, top)
        tl.store(work.slopes + row, slope)
    if TILE.reduction != "none":
        partials = outputs.buffer + 1
        add_up(outputs, partials, all_losses, all_weights, TILE)
