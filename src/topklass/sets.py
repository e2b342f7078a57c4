"""Sets of labels: always k, k on average, or as many as a coverage takes.

Each is a module: ``calibrate`` finds its threshold on held-out logits, a call maps logits to a mask
of their shape, and the state dict keeps the threshold. Classes are in the last dimension, or in
``dim``. Probabilities are the softmax of the logits. Pass other probabilities as logarithms:
``probabilities.log()``, for example of a softmax averaged over crops, or of marginals, which the
softmax divides by k. A logit of −inf marks an absent class, which is in no set.
"""

from __future__ import annotations

from math import ceil, floor, inf
from typing import TYPE_CHECKING, Any
from warnings import warn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topklass._checks import check_count, check_dim, check_number, check_target, is_number
from topklass._transforms import can_read_values
from topklass.prediction import among_first, classes_last
from topklass.reference.power_sums import wide_dtype

if TYPE_CHECKING:
    from typing_extensions import Self


class TopKSets(nn.Module):
    """The k labels of the largest logits.

    Exactly k labels, ties in the order of their indices; fewer only where fewer are present.

    Args:
        k: number of labels, 1 ≤ k ≤ C.
        dim: the dimension of the classes.

    Example:
        >>> TopKSets(k=2)(torch.tensor([[3.0, 1.0, 2.0], [0.0, 0.0, 0.0]]))
        tensor([[ True, False,  True],
                [ True,  True, False]])
    """

    def __init__(self, k: int, *, dim: int = -1) -> None:
        super().__init__()
        check_count("k", k)
        check_dim(dim)
        self.k = k
        self.dim = dim

    def calibrate(self, logits: Tensor, target: Tensor | None = None) -> Self:
        """Do nothing, so that all sets can be used in the same way."""
        return self

    def forward(self, logits: Tensor) -> Tensor:
        """Mask of the sets, of the logits' shape."""
        logits = _checked(logits, self.dim)
        check_count("k", self.k, logits.shape[-1], "the number of classes")
        mask = among_first(self.k, logits) & (logits > -inf)
        return mask.movedim(-1, self.dim)

    def extra_repr(self) -> str:
        """Show the arguments."""
        return f"k={self.k}, dim={self.dim}"


class _CalibratedSets(nn.Module):
    """A threshold and the number of classes that it was found for."""

    parameters_of_sets: tuple[str, ...] = ()
    """Names of what the threshold depends on, besides the calibration samples."""
    threshold: float | None
    """What ``calibrate`` has found; None before."""
    classes: int | None

    def __init__(self, dim: int) -> None:
        super().__init__()
        check_dim(dim)
        self.dim = dim
        self.threshold = None
        self.classes = None

    @property
    def settings(self) -> dict[str, object]:
        """What the threshold depends on, besides the calibration samples."""
        return {name: getattr(self, name) for name in self.parameters_of_sets}

    def get_extra_state(self) -> dict[str, object]:
        """The threshold, and what it depends on, for the state dict."""
        return {"threshold": self.threshold, "classes": self.classes, "settings": self.settings}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take a threshold from a state dict, if it was found with the same settings."""
        if state["settings"] != self.settings:
            raise ValueError(
                f"the state was calibrated with {_listed(state['settings'])}, but these sets have "
                f"{_listed(self.settings)}: construct them alike, or calibrate again"
            )
        self.threshold, self.classes = state["threshold"], state["classes"]

    def extra_repr(self) -> str:
        """Show the settings and the threshold."""
        return f"{_listed(self.settings)}, dim={self.dim}, threshold={self.threshold}"

    def _calibrated_for(self, logits: Tensor) -> tuple[Tensor, float]:
        """The logits, classes last, and the threshold, if there is one for so many classes."""
        logits = _checked(logits, self.dim)
        name, classes = type(self).__name__, logits.shape[-1]
        if self.threshold is None:
            raise RuntimeError(f"{name} has no threshold yet: call calibrate, or load its state")
        if classes != self.classes:
            raise ValueError(f"{name} was calibrated for {self.classes} classes, got {classes}")
        return logits, self.threshold


class AverageKSets(_CalibratedSets):
    r"""All labels above one threshold, which gives k labels on average.

    .. math:: S(x) = \{ y : p_y(x) \ge \theta \}, \qquad \frac1N \sum_n |S(x_n)| = k

    (Lorieul, Joly and Shasha 2021): clear samples get fewer labels, ambiguous ones more, and a
    sample without any p above θ none. No guarantee of coverage.

    Args:
        k: number of labels on average, positive, at most C; need not be an integer.
        dim: the dimension of the classes.

    Example:
        >>> logits = torch.tensor([[9.0, 0.0, 0.0], [2.0, 2.0, 1.9]])
        >>> AverageKSets(k=2).calibrate(logits)(logits)
        tensor([[ True, False, False],
                [ True,  True,  True]])
    """

    parameters_of_sets = ("k",)

    def __init__(self, k: float, *, dim: int = -1) -> None:
        check_number("k", k, positive=True)
        super().__init__(dim)
        self.k = float(k)

    def calibrate(self, logits: Tensor, target: Tensor | None = None) -> Self:
        """Find θ; this waits for the device.

        Args:
            logits: those of at least one sample.
            target: not needed; taken so that all sets can be used in the same way.

        Returns:
            Itself. The average on these logits is k to the nearest whole number of labels; ties at
            θ are all in, and raise it.
        """
        logits = _checked(logits, self.dim, look=True)
        chances = _log_softmax(logits).flatten()
        classes = logits.shape[-1]
        count = round(self.k * (chances.numel() // classes))
        if self.k > classes or count == 0:
            raise ValueError(
                f"k must be at most the number of classes, and k times the number of rows at least "
                f"one label, got k={self.k:g} for logits of shape {tuple(logits.shape)}"
            )
        self.threshold = chances.topk(count, sorted=False).values.amin().item()
        self.classes = classes
        return self

    def forward(self, logits: Tensor) -> Tensor:
        """Mask of the sets, of the logits' shape."""
        logits, threshold = self._calibrated_for(logits)
        mask = (_log_softmax(logits) >= threshold) & (logits > -inf)
        return mask.movedim(-1, self.dim)


class ConformalSets(_CalibratedSets):
    r"""As many labels as it takes to contain the right one with probability 1 − α.

    .. math:: S(x) = \{ y : E(x, y) \le \hat q \}, \qquad
        E(x, y) = \sum_{j < r} p_{(j)} + U p_{(r)} + \lambda (r - k_{reg})^+

    where r is the rank of y among the probabilities p(x), and q̂ the ⌈(n + 1)(1 − α)⌉-th smallest
    score E of n calibration samples. λ = 0 gives adaptive prediction sets (APS: Romano, Sesia and
    Candès 2020), λ > 0 regularised ones (RAPS: Angelopoulos et al. 2021), which are smaller where
    many labels have small, noisy probabilities. Other programs define E in other ways, so
    thresholds are not interchangeable: docs/prediction.md compares with TorchCP.

    **Coverage.** If calibration and test samples are exchangeable, P(y ∈ S(x)) ≥ 1 − α for any
    model, on average over samples and calibrations; not for each class or kind of image. It is at
    most 1 − α + 1/(n + 1) if no scores are tied.

    By default U = 0: S(x) is the shortest list whose probability, with the penalty, exceeds q̂. It
    is never empty, and the same in every call. First labels are tied at E = 0: if these alone are
    right more often than 1 − α, then so are the sets.

    The cap is part of the score: labels beyond rank ``max_size`` have E = ∞. If too many labels of
    the calibration do, no such lists have the coverage, and ``calibrate`` raises an error. The
    guarantee counts these calibrations as covered: trust it where top-K accuracy, K = ``max_size``,
    is clearly above 1 − α.

    Args:
        alpha: how often the right label may be missing, between 0 and 1.
        penalty: λ, for each rank beyond ``k_reg``.
        k_reg: how many labels are free of the penalty.
        randomized: draw U uniformly for each row, as the papers do: no ties, but sets differ
            between calls, and are empty where U times the first probability exceeds q̂.
        max_size: largest number of labels, or None.
        dim: the dimension of the classes.

    Example:
        Six of eight samples, the new one included, have at most half of the probability before
        the label:

        >>> logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(7, 3)
        >>> target = torch.tensor([0, 0, 0, 0, 1, 1, 2])
        >>> sets = ConformalSets(alpha=0.25).calibrate(logits, target)
        >>> sets(torch.tensor([[0.4, 0.4, 0.2], [0.8, 0.1, 0.1]]).log())
        tensor([[ True,  True, False],
                [ True, False, False]])
    """

    parameters_of_sets = ("alpha", "penalty", "k_reg", "randomized", "max_size")

    def __init__(
        self,
        alpha: float = 0.1,
        *,
        penalty: float = 0.0,
        k_reg: int = 5,
        randomized: bool = False,
        max_size: int | None = None,
        dim: int = -1,
    ) -> None:
        if not is_number(alpha):
            raise TypeError(f"alpha must be a number, got alpha={alpha!r}")
        if not 0 < alpha < 1:
            raise ValueError(f"alpha must be between 0 and 1, got alpha={alpha}")
        check_number("penalty", penalty, positive=False)
        check_count("k_reg", k_reg)
        if max_size is not None:
            check_count("max_size", max_size)
        super().__init__(dim)
        self.alpha = float(alpha)
        self.penalty = float(penalty)
        self.k_reg = int(k_reg)
        self.randomized = bool(randomized)
        self.max_size = None if max_size is None else int(max_size)

    def calibrate(
        self, logits: Tensor, target: Tensor, *, generator: torch.Generator | None = None
    ) -> Self:
        """Find q̂; this waits for the device.

        Args:
            logits: those of at least ⌈1/α⌉ − 1 samples that the model was not trained on.
            target: class indices, of the logits' shape without the classes.
            generator: source of U.

        Returns:
            Itself.
        """
        logits = _checked(logits, self.dim, look=True)
        check_labels(target, logits)
        scores = self._scores(logits, generator).gather(-1, target.long().unsqueeze(-1)).flatten()
        n = scores.numel()
        covered = n + 1 - floor((n + 1) * self.alpha + 1e-9)
        if covered > n:
            raise ValueError(
                f"alpha={self.alpha:g} needs at least {ceil(1 / self.alpha - 1e-9) - 1} samples to "
                f"calibrate, got {n}"
            )
        threshold = scores.sort().values[covered - 1].item()
        if threshold == inf:
            possible = int((scores < inf).sum())
            what = "classes that are present" if self.max_size is None else "on such lists"
            raise ValueError(
                f"alpha={self.alpha:g} with max_size={self.max_size} cannot be had: it takes "
                f"{covered} of {n} calibration labels, but only {possible} are {what}; raise "
                "max_size or alpha"
            )
        self.threshold, self.classes = threshold, logits.shape[-1]
        return self

    def forward(self, logits: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Mask of the sets, of the logits' shape; U comes from the generator."""
        logits, threshold = self._calibrated_for(logits)
        mask = self._scores(logits, generator) <= threshold
        return mask.movedim(-1, self.dim)

    def _scores(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """E for every class as the label, (…, C); ∞ for those that may not be in a set."""
        order = logits.argsort(dim=-1, descending=True, stable=True)
        chances = _log_softmax(logits).exp().gather(-1, order)
        rank = torch.arange(1, logits.shape[-1] + 1, dtype=chances.dtype, device=logits.device)
        scores = F.pad(chances.cumsum(-1)[..., :-1], (1, 0))
        scores = scores + self.penalty * (rank - self.k_reg).clamp(min=0)
        if self.randomized:
            uniform = torch.rand(
                (*logits.shape[:-1], 1),
                generator=generator,
                dtype=chances.dtype,
                device=logits.device,
            )
            scores = scores + uniform * chances
        if self.max_size is not None:
            scores = scores.masked_fill(rank > self.max_size, inf)
        by_class = torch.empty_like(scores).scatter(-1, order, scores)
        return by_class.masked_fill(logits == -inf, inf)


def _checked(logits: Tensor, dim: int, look: bool = False) -> Tensor:
    """Require logits without NaN or +inf, if looking is cheap or asked for; move classes last."""
    logits = classes_last(logits, dim)
    if (look or can_read_values(logits)) and not bool((logits < inf).all()):
        wrong = logits[~(logits < inf)][0].item()
        raise ValueError(f"logits must be finite, or -inf for absent classes, got {wrong}")
    if look and _are_probabilities(logits):
        warn(
            "these look like probabilities, but logits are expected: pass probabilities.log()",
            stacklevel=3,
        )
    return logits


def _are_probabilities(logits: Tensor) -> bool:
    """Whether rows are not negative and add up to 1."""
    sums = _wide(logits).sum(-1)
    return logits.numel() > 0 and bool((logits >= 0).all() & ((sums - 1).abs() < 1e-2).all())


def check_labels(target: Tensor, logits: Tensor) -> None:
    """Require one class index for each row of logits (…, C)."""
    if check_target(logits, target, -1):
        raise TypeError(f"target must hold class indices (integers), got {target.dtype}")
    wrong = target[(target < 0) | (target >= logits.shape[-1])]
    if wrong.numel():
        raise IndexError(
            f"target must hold class indices from 0 to {logits.shape[-1] - 1}, got {int(wrong[0])}"
        )


def _log_softmax(logits: Tensor) -> Tensor:
    """In float64, where ties and underflow are rare; −inf also in rows without any class."""
    return _wide(logits.detach()).log_softmax(-1).masked_fill(logits == -inf, -inf)


def _wide(logits: Tensor) -> Tensor:
    """In float64, where the device has it."""
    return logits.to(wide_dtype(logits))


def _listed(settings: dict[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
