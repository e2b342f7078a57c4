"""The table of losses. One row for each drives all tests of the contract.

A row names an oracle: the loss of one row of scores for one label, in the simplest PyTorch that
states the paper's formula. :func:`by_hand` makes of it what ``cross_entropy`` would return, sample
by sample and class by class.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import topklass
import topklass.functional as TF

CLASSES = 6


@dataclass(frozen=True)
class Loss:
    """One loss, and what the tests have to know about it."""

    name: str
    module: type[nn.Module]
    function: Callable[..., Tensor]
    oracle: Callable[..., Tensor]
    """``oracle(scores, label, **arguments)`` for scores (C) and an integer label."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """All parameters but k and margin."""
    takes_k: bool = True
    mixes_k: bool = False
    """Whether k is a mapping from several lengths to their weights."""
    takes_margin: bool = True
    smooth: bool = False
    """Whether it has derivatives of every order."""
    as_cross_entropy: dict[str, Any] | None = None
    """Parameters with which it is cross-entropy."""

    def arguments(
        self, classes: int = CLASSES, k: int = 2, per_class: bool = False
    ) -> dict[str, Any]:
        """All parameters, for so many classes, with one margin or one for each class."""
        result = dict(self.parameters)
        if self.takes_k:
            result["k"] = {k: 0.6, min(k + 1, classes - 1): 0.4} if self.mixes_k else k
        if self.takes_margin:
            margins = torch.linspace(0.1, 0.9, classes, dtype=torch.float64)
            result["margin"] = margins if per_class else 0.7
        return result

    def fixed(self, shape: Sequence[int]) -> dict[str, Tensor]:
        """What makes a call with logits of this shape repeatable: the noise, if there is any."""
        if self.parameters.get("samples") is None:
            return {}
        noise_shape = (*shape, self.parameters["samples"])
        generator = torch.Generator().manual_seed(1)
        return {"noise": torch.randn(noise_shape, generator=generator, dtype=torch.float64)}

    def __call__(self, logits: Tensor, target: Tensor, **arguments: Any) -> Tensor:
        """The function, with the noise fixed unless it is given."""
        fixed = {} if "noise" in arguments else self.fixed(logits.shape)
        return self.function(logits, target, **fixed, **arguments)


def smooth_oracle(scores: Tensor, label: int, k: int, tau: float, margin: float | Tensor) -> Tensor:
    """Berrada et al. 2018, equation 9: all subsets of k classes against those with the label."""
    subsets = torch.tensor(list(combinations(range(len(scores)), k)))
    with_label = (subsets == label).any(1)
    means = scores[subsets].mean(1)
    violated = means + of_class(margin, label) * (~with_label).to(means)
    return tau * ((violated / tau).logsumexp(0) - (means[with_label] / tau).logsumexp(0))


def hinge_oracle(scores: Tensor, label: int, k: int, margin: float | Tensor) -> Tensor:
    others = torch.cat([scores[:label], scores[label + 1 :]])
    rival = others.sort(descending=True).values[k - 1]
    return (of_class(margin, label) + rival - scores[label]).relu()


def convex_hinge_oracle(scores: Tensor, label: int, k: int, margin: float | Tensor) -> Tensor:
    others = (torch.arange(len(scores)) != label).to(scores)
    top = (scores + of_class(margin, label) * others).sort(descending=True).values[:k]
    return (top.mean() - scores[label]).relu()


def calibrated_hinge_oracle(scores: Tensor, label: int, k: int, margin: float | Tensor) -> Tensor:
    rival = scores.sort(descending=True).values[k]
    return (of_class(margin, label) + rival - scores[label]).relu()


def noised_oracle(
    scores: Tensor,
    label: int,
    k: int,
    epsilon: float,
    samples: int,
    margin: float | Tensor,
    scale: float,
    noise: Tensor,
) -> Tensor:
    rivals = [
        (scores + epsilon * noise[:, b]).sort(descending=True).values[k] for b in range(samples)
    ]
    rival = torch.stack(rivals).mean()
    return (scale * (of_class(margin, label) + rival - scores[label])).relu()


def expected_oracle(
    scores: Tensor,
    label: int,
    k: int,
    epsilon: float,
    samples: None,
    margin: float | Tensor,
    scale: float,
) -> Tensor:
    """With the operator that tests/test_expected.py proves."""
    rival = topklass.expected_topk(scores, k + 1, epsilon)
    return (scale * (of_class(margin, label) + rival - scores[label])).relu()


def ldam_oracle(scores: Tensor, label: int, margin: float | Tensor, scale: float) -> Tensor:
    is_label = (torch.arange(len(scores)) == label).to(scores)
    return -(scale * (scores - of_class(margin, label) * is_label)).log_softmax(0)[label]


def focal_oracle(scores: Tensor, label: int, gamma: float) -> Tensor:
    log_p = scores.log_softmax(0)[label]
    return (1 - log_p.exp()) ** gamma * -log_p


def topk_cross_entropy_oracle(
    scores: Tensor,
    label: int,
    k: int | Mapping[int, float],
    margin: float | Tensor = 0.0,
    temperature: float = 1.0,
) -> Tensor:
    """The share of lists that hold the label, each as probable as its scores are high."""
    is_label = (torch.arange(len(scores)) == label).to(scores.dtype)
    scores = scores / temperature - is_label * of_class(margin, label)
    lengths = k if isinstance(k, Mapping) else {k: 1.0}
    share = 0.0
    for length, weight in lengths.items():
        lists = torch.tensor(list(combinations(range(len(scores)), length)))
        chances = scores[lists].sum(1).softmax(0)
        share += weight / sum(lengths.values()) * chances[(lists == label).any(1)].sum()
    return -temperature * share.log()


def of_class(margin: float | Tensor, label: int) -> float | Tensor:
    return margin[label] if isinstance(margin, Tensor) else margin


LOSSES = [
    Loss(
        name="smooth",
        module=topklass.SmoothTopKLoss,
        function=TF.smooth_topk_loss,
        oracle=smooth_oracle,
        parameters={"tau": 0.8},
        smooth=True,
        as_cross_entropy={"k": 1, "tau": 1.0, "margin": 0.0},
    ),
    Loss(
        name="topk_cross_entropy",
        module=topklass.TopKCrossEntropyLoss,
        function=TF.topk_cross_entropy,
        oracle=topk_cross_entropy_oracle,
        parameters={"temperature": 0.7},
        smooth=True,
        as_cross_entropy={"k": 1, "margin": 0.0, "temperature": 1.0},
    ),
    Loss(
        name="mixed_topk_cross_entropy",
        module=topklass.TopKCrossEntropyLoss,
        function=TF.topk_cross_entropy,
        oracle=topk_cross_entropy_oracle,
        mixes_k=True,
        parameters={"temperature": 1.8},
        smooth=True,
        as_cross_entropy={"k": {1: 3.0}, "margin": 0.0, "temperature": 1.0},
    ),
    Loss(
        name="hinge",
        module=topklass.TopKHingeLoss,
        function=TF.topk_hinge_loss,
        oracle=hinge_oracle,
    ),
    Loss(
        name="convex_hinge",
        module=topklass.ConvexTopKHingeLoss,
        function=TF.convex_topk_hinge_loss,
        oracle=convex_hinge_oracle,
    ),
    Loss(
        name="calibrated_hinge",
        module=topklass.CalibratedTopKHingeLoss,
        function=TF.calibrated_topk_hinge_loss,
        oracle=calibrated_hinge_oracle,
    ),
    Loss(
        name="noised",
        module=topklass.NoisedTopKLoss,
        function=TF.noised_topk_loss,
        oracle=noised_oracle,
        parameters={"epsilon": 0.5, "samples": 3, "scale": 1.5},
    ),
    Loss(
        name="expected",
        module=topklass.NoisedTopKLoss,
        function=TF.noised_topk_loss,
        oracle=expected_oracle,
        parameters={"epsilon": 0.5, "samples": None, "scale": 1.5},
    ),
    Loss(
        name="ldam",
        module=topklass.LDAMLoss,
        function=TF.ldam_loss,
        oracle=ldam_oracle,
        parameters={"scale": 1.5},
        takes_k=False,
        smooth=True,
        as_cross_entropy={"margin": 0.0, "scale": 1.0},
    ),
    Loss(
        name="focal",
        module=topklass.FocalLoss,
        function=TF.focal_loss,
        oracle=focal_oracle,
        parameters={"gamma": 2.0},
        takes_k=False,
        takes_margin=False,
        smooth=True,
        as_cross_entropy={"gamma": 0.0},
    ),
]


def by_hand(
    loss: Loss,
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **arguments: Any,
) -> Tensor:
    """The contract in loops: ``Σ_c w_c P_c ℓ(s, c)`` of each sample, reduced as cross-entropy."""
    fixed = {n: rows(t, last=2) for n, t in loss.fixed(logits.shape).items()}
    scores = rows(logits)
    samples, classes = scores.shape
    indices = not target.is_floating_point()
    targets = target.reshape(-1) if indices else rows(target)
    weight = torch.ones(classes, dtype=logits.dtype) if weight is None else weight
    losses, divisor = [], logits.new_zeros(())
    for i in range(samples):
        if indices and targets[i] == ignore_index:
            losses.append(0.0 * scores[i].sum())
            continue
        divisor += weight[targets[i]] if indices else 1
        p = F.one_hot(targets[i], classes).to(logits.dtype) if indices else targets[i]
        p = p * (1 - label_smoothing) + label_smoothing / classes
        own = {n: t[i] for n, t in fixed.items()}
        terms = [
            weight[c] * p[c] * loss.oracle(scores[i], c, **arguments, **own)
            for c in range(classes)
            if p[c] != 0
        ]
        losses.append(torch.stack(terms).sum())
    result = torch.stack(losses)
    if reduction == "none":
        return result.reshape(logits.select(class_dim(logits), 0).shape)
    return result.sum() if reduction == "sum" else result.sum() / divisor


def class_dim(logits: Tensor) -> int:
    return min(1, logits.dim() - 1)


def rows(tensor: Tensor, last: int = 1) -> Tensor:
    """(C, …), (N, C, …) or (N, C, d1, …) as (rows, C, …), the last dimensions staying."""
    dim = 0 if tensor.dim() == last else 1
    moved = tensor.movedim(dim, -last)
    return moved.reshape(-1, *moved.shape[-last:])


def problem(
    shape: Sequence[int], kind: str = "indices", dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Random logits of this shape, and targets for them: class "indices" or "probabilities"."""
    logits = torch.randn(*shape, dtype=dtype) * 2
    dim = class_dim(logits)
    if kind == "probabilities":
        return logits, torch.randn(*shape, dtype=dtype).softmax(dim)
    return logits, torch.randint(shape[dim], [*shape[:dim], *shape[dim + 1 :]])
