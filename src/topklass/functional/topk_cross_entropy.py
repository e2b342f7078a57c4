"""Cross-entropy of lists of k classes: how probable it is that a random list holds the label."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from topklass._checks import (
    Options,
    check_count,
    check_k,
    check_margin,
    check_temperature,
    every_class_counts,
    is_number,
)
from topklass._lists import Lists
from topklass._targets import SparseTarget, Target
from topklass._transforms import graph_of_its_own
from topklass.dispatch import find_kernel
from topklass.functional._contract import (
    RowLoss,
    classification_loss,
    for_kernel,
    working,
)
from topklass.functional.smooth import SmoothHinge
from topklass.reference.every_label_rows import mixed
from topklass.reference.row_states import States, shorter, smooth_gap

Lengths = int | Mapping[int, float] | Sequence[float]
"""One length of the list, weights of several lengths, or the weights of the lengths 1, 2, …"""


def topk_cross_entropy(
    logits: Tensor,
    target: Target,
    k: Lengths = 5,
    margin: float | Tensor = 0.0,
    temperature: float = 1.0,
    *,
    dim: int = 1,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Top-k cross-entropy: the label should probably be in a random list of k classes.

    .. math:: \ell(s, y) = -\log \pi_y^{(k)}, \qquad
        \pi_y^{(k)} = \frac{e^{s_y} \sigma_{k-1}(e^{s_{\setminus y}})}{\sigma_k(e^s)}

    with the marginals of :func:`topklass.topk_marginals` (Berrada et al. 2018, Appendix C). With
    k = 1 it is cross-entropy. Several lengths of the list may be mixed, ``k={1: 0.5, 5: 0.5}``: the
    list then has a random length K,

    .. math:: \ell(s, y) = -\log \sum_k P_K(k) \, \pi_y^{(k)}

    (the mixture of Petersen et al. 2022, Figure 1).

    A temperature T gives :math:`T \, \ell(s / T, y)`. At equal logits its slope does not depend on
    T; the larger T is, the larger are the logits that it asks for. A margin is subtracted from
    :math:`s_y / T`. With both, it is k times the smooth top-k SVM loss:
    ``topk_cross_entropy(s, y, k, margin=α/τ, temperature=k·τ)`` is
    ``k · smooth_topk_loss(s, y, k, τ, α)``.

    Use it where lists of k classes should have probabilities: as a likelihood it never stops
    pushing. A mixture with k = 1 also trains the order, which a list of one length does not.

    Args:
        logits: (C), (N, C) or (N, C, d1, …); −inf marks an absent class.
        target: class indices of the logits' shape without its class dimension, class
            probabilities of the logits' shape, or a :class:`topklass.SparseTarget`.
        k: length of the list that should hold the label, 1 ≤ k ≤ C − 1; or a mapping from lengths
            to weights; or a sequence with the weights of the lengths 1, 2, …, as ``difftopk`` has
            it, none of them above 1. Weights are divided by their sum, and lengths of weight 0 do
            not count.
        margin: subtracted from the label's logit over T; a number or one per class.
        temperature: T.
        dim: the class dimension.
        weight: one weight per class.
        ignore_index: a target that contributes neither loss nor gradient.
        reduction: "mean" (weighted by the labels' weights), "sum" or "none".
        label_smoothing: share of the target that is spread uniformly over all classes.

    Returns:
        A scalar, or with ``reduction="none"`` one loss per target.

    Example:
        >>> import torch
        >>> logits, target = torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([1])
        >>> topk_cross_entropy(logits, target, k=2)
        tensor(0.3647)
        >>> topk_cross_entropy(logits, target, k={1: 0.5, 2: 0.5})
        tensor(0.7643)
        >>> topk_cross_entropy(logits, target, k=[0.5, 0.5])
        tensor(0.7643)
    """
    loss, factor = checked_lists(k, margin, temperature, logits, dim)
    options = Options(weight, ignore_index, reduction, label_smoothing)
    return classification_loss(loss, logits, target, dim, options, factor)


def checked_lists(
    k: Lengths, margin: float | Tensor, temperature: float, logits: Tensor, dim: int
) -> tuple[RowLoss, float]:
    """:func:`loss_of_lists` of checked parameters."""
    lengths = length_weights(k)
    for length in lengths:
        check_margin(margin, check_k(length, logits, dim))
    check_temperature(temperature, "temperature")
    return loss_of_lists(lengths, margin, temperature)


def loss_of_lists(
    lengths: dict[int, float], margin: float | Tensor, temperature: float
) -> tuple["SmoothHinge | ListMixture", float]:
    """The loss of lists of one length or of several, and what it is to be multiplied by."""
    if len(lengths) == 1:
        (length,) = lengths
        return list_of(length, margin, temperature), length
    return ListMixture(tuple(lengths), tuple(lengths.values()), temperature, margin), 1.0


def length_weights(k: Lengths) -> dict[int, float]:
    """Lengths of the list with their probabilities, without those of probability 0.

    Example:
        >>> length_weights(5), length_weights({1: 1, 3: 3, 5: 0}), length_weights([0.2, 0, 0.8])
        ({5: 1.0}, {1: 0.25, 3: 0.75}, {1: 0.2, 3: 0.8})
    """
    if isinstance(k, Mapping):
        weights = dict(k)
    elif isinstance(k, Sequence):
        weights = dict(enumerate(k, 1))
        if any(is_number(weight) and weight > 1 for weight in k):
            raise ValueError(
                f"a sequence has the weights of the lengths 1, 2, …, from 0 to 1, got k={k!r}; "
                f"to mix the lengths 1 and 5 pass k={{1: 0.5, 5: 0.5}}"
            )
    else:
        check_count("k", k)
        weights = {k: 1.0}
    for length, weight in weights.items():
        check_count("k", length)
        if not is_number(weight):
            raise TypeError(f"the weight of k={length} must be a number, got {weight!r}")
        if not 0 <= weight < inf:
            raise ValueError(
                f"the weight of k={length} must be non-negative and finite, got {weight!r}"
            )
    total = sum(weights.values())
    if not total:
        raise ValueError(f"k must have at least one length with a positive weight, got k={k!r}")
    return {int(length): weight / total for length, weight in weights.items() if weight}


def list_of(k: int, margin: float | Tensor, temperature: float) -> SmoothHinge:
    """The smooth loss that is 1/k of top-k cross-entropy: its scores are divided by kτ = T."""
    tau = temperature / k
    return SmoothHinge(k, tau, margin * tau)


@dataclass(frozen=True, eq=False)
class ListMixture(RowLoss):
    """``−T log Σ_k P_k π_y^(k)`` of rows."""

    lengths: tuple[int, ...]
    chances: tuple[float, ...]
    temperature: float
    margin: float | Tensor

    def cost(self) -> int:
        return 8 * sum(self.lengths)

    def rows(self, scores: Tensor, labels: Tensor | None) -> Tensor:
        scores = working(scores)
        losses = [self._of_length(k, scores, labels) for k in self.lengths]
        return self.temperature * mixed(losses, self.chances)

    def lists(self) -> Lists:
        return Lists(self.lengths, self.chances, self.temperature, self.temperature, self.margin)

    def of_gaps(self, gaps: Sequence[Tensor], margin: float | Tensor) -> Tensor:
        """The loss from the gap of each list and the margins of the labels."""
        lists = zip(self.lengths, gaps, strict=True)
        losses = [
            k / self.temperature * smooth.of_gaps([gap], smooth.margin)
            for k, gap in lists
            for smooth in [list_of(k, margin, self.temperature)]
        ]
        return self.temperature * mixed(losses, self.chances)

    def find_kernel(self, scores: Tensor, targets: Target, options: Options) -> Any:
        """One for all lengths if every label counts; else None, each length finds its own."""
        if not every_class_counts(targets, options):
            return None
        name, longest = "list_mixture_of_every_label", max(self.lengths)
        return find_kernel(name, scores, longest, targets, options, margin=self.margin)

    def losses_and_gradient(
        self, scores: Tensor, targets: Target, options: Options, outgoing: Tensor
    ) -> tuple[Tensor, Tensor]:
        """By the kernels of the lengths where there are, without scores in float32."""
        if isinstance(targets, SparseTarget) or every_class_counts(targets, options):
            return super().losses_and_gradient(scores, targets, options, outgoing)
        lists = [list_of(k, self.margin, self.temperature) for k in self.lengths]
        kernels = [each.find_kernel(scores, targets, options) for each in lists]
        if None in kernels:
            return super().losses_and_gradient(scores, targets, options, outgoing)
        labels, options = for_kernel(targets, options)
        assert isinstance(labels, Tensor)
        each = options._replace(weight=None)
        parts = [
            kernel.forward(scores, labels, smooth, each, True)
            for kernel, smooth in zip(kernels, lists, strict=True)
        ]
        ignored = labels == options.ignore_index
        with graph_of_its_own():
            leaves = [losses.unsqueeze(1).requires_grad_() for losses, _ in parts]
            scaled = [k / self.temperature * x for k, x in zip(self.lengths, leaves, strict=True)]
            losses = self.temperature * mixed(scaled, self.chances).squeeze(1)
            if options.weight is not None:
                losses = losses * options.weight[labels.masked_fill(ignored, 0)]
            losses = losses.masked_fill(ignored, 0.0)
        slopes = torch.autograd.grad(losses, leaves, outgoing.to(losses.dtype).expand_as(losses))
        gradient: Tensor | None = None
        for i, (kernel, smooth) in enumerate(zip(kernels, lists, strict=True), 1):
            room = scores if i == len(lists) else None  # the last one needs the scores no more
            slope, saved = slopes[i - 1].squeeze(1), parts[i - 1][1]
            part = kernel.backward(slope, scores, labels, saved, smooth, each, out=room)
            gradient = part if gradient is None else gradient.add_(part)
        assert gradient is not None
        return losses.detach(), gradient

    def gradient_bytes(self, scores: Tensor, targets: Target, options: Options) -> int:
        if every_class_counts(targets, options):
            return super().gradient_bytes(scores, targets, options)
        if isinstance(targets, SparseTarget):
            return super().gradient_bytes(scores, targets, options) * (len(self.lengths) + 1)
        single = list_of(self.lengths[0], self.margin, self.temperature)
        once = single.gradient_bytes(scores, targets, options)
        by_kernels = once == scores.element_size()
        return once * (min(3, len(self.lengths)) if by_kernels else len(self.lengths) + 1)

    def _of_length(self, k: int, scores: Tensor, labels: Tensor | None) -> Tensor:
        """``−log π^(k)`` of rows, (R, m), or (R, C) for every label."""
        smooth = list_of(k, self.margin, self.temperature)
        losses = smooth.rows(scores, None) if labels is None else smooth.of_labels(scores, labels)
        return k / self.temperature * losses


def losses_of_states(
    loss: SmoothHinge | ListMixture, states: States, score: Tensor, margin: float | Tensor
) -> Tensor:
    """Losses of labels with these scores and margins, (R, 1), from the states of all others."""
    each = [shorter(states, k, loss.temperature) for k in loss.lengths]
    return loss.of_gaps([smooth_gap(s, score, loss.temperature) for s in each], margin)
