r"""The state of a row: O(k) numbers that merge, so that pieces of a row may lie on several devices.

The state of a row's classes, or of some of them, is what :mod:`topklass.reference.power_sums` calls
heads and power sums: the k largest scores ``h_1 ≥ … ≥ h_k``, and ``p_j = Σ exp(j (s − h_k) / T)``
over all others. Of several pieces the heads are the k largest of all their heads. The other heads
join the tail, and the sums of a piece seen from the row's threshold are
``p_j · exp(j (h_k of the piece − h_k of the row) / T)``, where no exponent is positive.

A piece with fewer than k classes has heads of −inf and no tail.
"""

from math import inf, nan
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from topklass.reference import power_sums
from topklass.reference.fused import CHUNK, LOG2_E, _is_long, block_rows, largest, polynomial
from topklass.reference.power_sums import lowest_score, power_dtype, wide_dtype, working_dtype


class States(NamedTuple):
    """States of rows, in float64."""

    heads: Tensor
    """The largest scores, descending, (R, k); −inf for absent classes."""
    sums: Tensor
    """Power sums of the tail of degree 1 to k, (R, k)."""


# Both passes over the scores, as the kernels have them.


def read_states(
    scores: Tensor, labels: Tensor, k: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Heads, their classes, and power sums of (R, n) scores without their labels, (R, k) each.

    A label (R, 1) of −1 leaves out nothing. Classes of absent heads mean nothing.
    """
    blocks = []
    for rows in _blocks(scores):
        work = _without_labels(scores[rows], labels[rows], k)
        heads, places = largest(work, k)
        tail = _tail(work, places, heads[:, -1:].clamp(min=lowest_score(work)), temperature)
        sums = power_sums.power_sums(tail.to(power_dtype(scores.dtype, k)), k)
        blocks.append((heads, places, sums))
    heads, places, sums = (torch.cat(each) for each in zip(*blocks, strict=True))
    wide = wide_dtype(scores)
    return heads.to(wide), places, sums.to(wide)


def write_gradient(
    scores: Tensor,
    labels: Tensor,
    heads: Tensor,
    places: Tensor,
    slopes: tuple[Tensor, Tensor, Tensor],
    temperature: float,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient (R, n): slopes of heads, (R, k), and label, (R, 1); ``Σ_j c_j u^j`` elsewhere.

    ``slopes`` are those of the heads, the c_j, (R, k), and that of the label.
    """
    k, dtype = heads.shape[1], power_dtype(scores.dtype, heads.shape[1])
    of_heads, coefficients, of_label = (slope.to(dtype) for slope in slopes)
    threshold = _threshold(heads).to(working_dtype(scores.dtype))
    result = out
    if result is None:
        result = torch.empty_like(scores, memory_format=torch.contiguous_format)
    for rows in _blocks(scores):
        work = _without_labels(scores[rows], labels[rows], k)
        u = _tail(work, places[rows], threshold[rows], temperature).to(dtype)
        value = polynomial(coefficients[rows].t().unsqueeze(2), u, None)
        value.scatter_(1, places[rows], of_heads[rows])
        value.scatter_(1, _columns(labels[rows], scores), of_label[rows])
        result[rows] = value[:, : scores.shape[1]]
    return result


def _blocks(scores: Tensor) -> list[slice]:
    step = block_rows(scores)
    return [slice(start, start + step) for start in range(0, max(1, len(scores)), step)]


def _columns(labels: Tensor, scores: Tensor) -> Tensor:
    """Where labels stand: those that are not here in one more column."""
    return labels.masked_fill(labels < 0, scores.shape[1])


def _without_labels(scores: Tensor, labels: Tensor, k: int) -> Tensor:
    """A copy of (R, n) scores with −inf at the labels, and behind them from column n on."""
    rows, classes = scores.shape
    columns = max(classes + 1, k)
    if _is_long(columns, k):
        columns = -(-columns // CHUNK**2) * CHUNK**2
    copy = scores.new_full((rows, columns), -inf, dtype=working_dtype(scores.dtype))
    copy[:, :classes] = scores
    return copy.scatter_(1, _columns(labels, scores), -inf)


def _tail(work: Tensor, places: Tensor, threshold: Tensor, temperature: float) -> Tensor:
    """``exp((s − threshold) / temperature)``, 0 at the heads, in place."""
    tail = work.scatter_(1, places, -inf).sub_(threshold)
    return tail.mul_(LOG2_E / temperature).exp2_()


def _threshold(heads: Tensor) -> Tensor:
    """The smallest head, (R, 1), detached and finite."""
    lowest = torch.finfo(torch.float32).min
    return heads[:, -1:].detach().clamp(min=lowest)


# What follows needs O(k) operations for a row, all of them plain and differentiable.


def merged(heads: Tensor, sums: Tensor, temperature: float) -> tuple[States, Tensor]:
    """The states of whole rows from those of their pieces, (R, P, k) each.

    Also which of the P·k heads are theirs, (R, k).
    """
    k = heads.shape[-1]
    every = heads.flatten(1)
    top, places = every.topk(k, 1)
    others = every.scatter(1, places, -inf)
    return States(top, _sums(_threshold(top), others, heads[..., -1], sums, temperature)), places


def shorter(states: States, k: int, temperature: float) -> States:
    """The states with k heads from those with more."""
    heads, sums = states
    if heads.shape[1] == k:
        return states
    top, others = heads[:, :k], heads[:, k:]
    moved = _sums(_threshold(top), others, heads[:, -1:], sums.unsqueeze(1)[..., :k], temperature)
    return States(top, moved)


def _sums(
    threshold: Tensor, others: Tensor, before: Tensor, sums: Tensor, temperature: float
) -> Tensor:
    """Power sums, (R, k), seen from a threshold (R, 1).

    Of scores (R, ·) that are in the tail now, and of tails with sums (R, P, k) that were seen from
    the thresholds ``before`` (R, P).
    """
    k = sums.shape[-1]
    joined = ((others - threshold) / temperature).exp()
    fall = ((before.detach() - threshold) / temperature).exp()  # 0 where there is no tail
    degree = torch.arange(1, k + 1, device=sums.device)
    moved = (sums * fall.unsqueeze(-1) ** degree).sum(1)
    return moved + power_sums.power_sums(joined, k)


def inverted(states: States, temperature: float) -> tuple[Tensor, Tensor]:
    """The threshold, (R, 1), and ``v = exp((threshold − heads) / temperature)``, (R, k)."""
    threshold = _threshold(states.heads)
    heads = torch.where(states.heads < threshold, threshold, states.heads)  # keeps NaN
    return threshold, ((threshold - heads) / temperature).exp()


def smooth_gap(states: States, label: Tensor, temperature: float) -> Tensor:
    r"""``τ log σ_k(e\y) − τ log σ_{k−1}(e\y) − s_y/k`` with τ = T/k, (R, 1).

    ``states`` are those of the rows without their labels, whose scores are ``label`` (R, 1).
    """
    k = states.heads.shape[1]
    threshold, v = inverted(states, temperature)
    s = power_sums.with_heads(power_sums.newton(states.sums), v)
    change = (s[:, k:] / s[:, k - 1 : k]).log()
    return (threshold - label + temperature * change) / k


def smooth_gap_every_label(
    scores: Tensor, states: States, places: Tensor, k: int, temperature: float
) -> Tensor:
    r"""The same for every class c of a piece, (R, n), from the states of whole rows.

    Args:
        scores: of the piece, (R, n), in float64.
        states: with k + 1 heads.
        places: their classes in the piece, n for those of another piece, (R, k + 1).
        k: length of the list.
        temperature: T.
    """
    wider = F.pad(scores, (0, 1), value=-inf)
    heads = torch.where(states.heads == -inf, _threshold(states.heads), states.heads)
    gaps = power_sums.gap_of_classes(
        wider, heads, states.sums[:, :k], places[:, :k], k, temperature / k
    )
    return gaps[:, :-1]


def marginals_of_heads(states: States, temperature: float) -> Tensor:
    """The probability of each head to be in a random k-subset, (R, k); 0 for absent ones."""
    k = states.heads.shape[1]
    _, v = inverted(states, temperature)
    tail = power_sums.newton(states.sums)
    s = power_sums.with_heads(tail, v)
    result = power_sums.without_each_head(tail, v, k)[..., k - 1] / s[:, k:]
    return _in_present_classes(result, states.heads, states)


def softmax_of(scores: Tensor, states: States, temperature: float) -> Tensor:
    """The softmax over T of the k largest scores, (R, k); 0 for absent ones."""
    top = shorter(states, 1, temperature)
    e = ((scores - _threshold(top.heads)) / temperature).exp()
    return _in_present_classes(e / (1 + top.sums), scores, states)


def _in_present_classes(chances: Tensor, scores: Tensor, states: States) -> Tensor:
    """0 for absent classes, NaN throughout rows with NaN."""
    spoilt = (states.heads[:, :1] + states.sums[:, :1]).isnan()
    return chances.masked_fill(scores == -inf, 0.0).masked_fill(spoilt, nan)
