"""Conformal sets: as many labels as it takes to contain the right one with a given probability."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar
from warnings import warn

import torch
from torch import Tensor

from topklass._checks import check_count, check_number, is_number
from topklass.longtail import without_zeros
from topklass.reference.power_sums import wide_dtype
from topklass.sets.calibrated import CalibratedSets, check_labels, checked
from topklass.sets.scores import SCORES, label_scores, largest_score
from topklass.sets.thresholds import (
    clustered_thresholds,
    group_thresholds,
    places,
    samples_needed,
)

if TYPE_CHECKING:
    from typing_extensions import Self

CALIBRATIONS = ("class", "clustered", "marginal")
PENALTIES = (0.001, 0.01, 0.1, 0.2, 0.5)
"""λ that ``tuned`` tries (Angelopoulos et al. 2021); for RAPS also 0, which is APS."""


class ConformalSets(CalibratedSets):
    r"""As many labels as it takes to contain the right one with probability 1 − α.

    .. math:: S(x) = \{ y : E(x, y) \le \hat q_y \}

    where E is the score of a label, and q̂ the ⌈(n + 1)(1 − α)⌉-th smallest score of n calibration
    labels. With r the rank of y among the probabilities p(x), and π the frequencies of the classes:

    - ``"aps"``: :math:`\sum_{j<r} p_{(j)} + U p_{(r)} + \lambda (r-k_{reg})^+`; APS with λ = 0
      (Romano et al. 2020), RAPS with λ > 0 (Angelopoulos et al. 2021)
    - ``"lac"``: :math:`-p_y` (Sadinle et al. 2019)
    - ``"saps"``: :math:`U p_{(1)}` if r = 1, else :math:`p_{(1)} + \lambda (r - 2 + U)` (Huang et
      al. 2024)
    - ``"pas"``: :math:`-p_y / \pi_y` (Ding et al. 2025)

    LAC has the smallest sets on average, if probabilities are right. APS adapts them to how hard
    a sample is. RAPS and SAPS cut off its long tails of small, noisy probabilities. PAS has the
    smallest sets for a coverage that is averaged over classes, the macro coverage of long tails.

    **Coverage.** If calibration and test samples are exchangeable, P(y ∈ S(x)) ≥ 1 − α for any
    model, on average over samples and calibrations. It is at most 1 − α + 1/(n + 1) if no scores
    are tied. What is promised for a class depends on the calibration:

    - ``"marginal"``: nothing. One threshold is found on all samples.
    - ``"class"``: P(y ∈ S(x) | y) ≥ 1 − α. Each class has its own threshold (Vovk 2012). A class
      with fewer than ⌈1/α⌉ − 1 samples, or with none, has q̂ = ∞: it is in every set, as no other
      threshold keeps the promise. On long tails such sets are large.
    - ``"class"`` with ``class_weight`` w < 1: q̂ = w q̂_class + (1 − w) q̂_marginal (Interp-Q, Ding
      et al. 2025), where the largest possible score stands for ∞. Nothing is promised; rare classes
      are covered more than by the marginal threshold, and sets stay small.
    - ``"clustered"``: 1 − α for each cluster of classes with similar scores (Ding et al. 2023). A
      random part of the samples makes the clusters, the others their thresholds. A class with
      fewer than ⌈1/α⌉ − 1 samples in the first part has the threshold of all samples, as there is
      nothing to tell its cluster from; if so few samples are left that there are not two clusters,
      all classes have it.

    **No randomness** by default, U = 0: the sets of APS, RAPS and SAPS are never empty, and the
    same in every call. First labels are tied at E = 0: if these alone are right more often than
    1 − α, then so are the sets. Sets of LAC and PAS can be empty.

    **The cap** is part of the score: labels beyond rank ``max_size``, for PAS that of p/π, have
    E = ∞. If too many labels of the calibration do, no such lists have the coverage, and
    ``calibrate`` raises an error; if only those of some classes do, it warns. The guarantee counts
    calibrations with an error as covered: trust it where top-K accuracy, K = ``max_size``, is
    clearly above 1 − α.

    Other programs define E in other ways, so thresholds are not interchangeable:
    docs/prediction.md compares with TorchCP.

    Args:
        alpha: how often the right label may be missing, between 0 and 1.
        score: ``"aps"``, ``"lac"``, ``"saps"`` or ``"pas"``.
        penalty: λ, for each rank beyond ``k_reg`` in APS, or beyond the second in SAPS, which needs
            one. :meth:`tuned` finds it.
        k_reg: how many labels are free of the penalty of APS.
        counts: number of training samples of each class, (C), which ``"pas"`` needs. A class
            without any counts as the rarest one that has some.
        calibration: ``"marginal"``, ``"class"`` or ``"clustered"``.
        class_weight: w, from 0 to 1.
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

        By frequency the rare class comes first: its 0.2 is twice what it has on average.

        >>> sets = ConformalSets(alpha=0.625, score="pas", counts=[6, 3, 1])
        >>> sets.calibrate(logits, target)(logits[:1])
        tensor([[False,  True,  True]])
    """

    parameters_of_sets = (
        "alpha",
        "score",
        "penalty",
        "k_reg",
        "calibration",
        "class_weight",
        "randomized",
        "max_size",
    )
    later_parameters: ClassVar[dict[str, object]] = {
        "score": "aps",
        "calibration": "marginal",
        "class_weight": 1.0,
    }

    def __init__(
        self,
        alpha: float = 0.1,
        *,
        score: str = "aps",
        penalty: float = 0.0,
        k_reg: int = 5,
        counts: Tensor | Sequence[float] | None = None,
        calibration: str = "marginal",
        class_weight: float = 1.0,
        randomized: bool = False,
        max_size: int | None = None,
        dim: int = -1,
    ) -> None:
        _check_alpha(alpha)
        _check_choice("score", score, SCORES)
        _check_choice("calibration", calibration, CALIBRATIONS)
        check_number("penalty", penalty, positive=score == "saps")
        check_count("k_reg", k_reg)
        if max_size is not None:
            check_count("max_size", max_size)
        check_number("class_weight", class_weight, positive=False)
        if score in ("lac", "pas") and (penalty or randomized):
            given = f"penalty={penalty}" if penalty else f"randomized={randomized}"
            raise ValueError(f"score={score!r} has no penalty and no randomness, got {given}")
        if class_weight > 1 or (class_weight < 1 and calibration != "class"):
            raise ValueError(
                "class_weight must be from 0 to 1, and 1 unless calibration='class', got "
                f"class_weight={class_weight} with calibration={calibration!r}"
            )
        if (counts is None) == (score == "pas"):
            wanted = "needs" if score == "pas" else "takes no"
            raise ValueError(f"score={score!r} {wanted} counts, the training samples of each class")
        super().__init__(dim)
        self.alpha = float(alpha)
        self.score = score
        self.penalty = float(penalty)
        self.k_reg = int(k_reg)
        self.calibration = calibration
        self.class_weight = float(class_weight)
        self.randomized = bool(randomized)
        self.max_size = None if max_size is None else int(max_size)
        self.prevalence: Tensor | None = None
        """How frequent the classes are, (C), for ``"pas"``."""
        if counts is not None:
            seen = without_zeros(torch.as_tensor(counts).detach().cpu().double())
            if not seen.isfinite().all():
                raise ValueError("counts must have at least one sample, and be finite")
            self.prevalence = seen / seen.sum()

    @classmethod
    def tuned(
        cls,
        logits: Tensor,
        target: Tensor,
        alpha: float = 0.1,
        *,
        score: str = "aps",
        share: float = 0.3,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> Self:
        r"""Choose λ and k_reg on a part of the samples, and calibrate on the others.

        k_reg is the rank that 1 − α of the labels do not exceed, and λ that of 0, 0.001, 0.01, 0.1,
        0.2 and 0.5 with the smallest sets, as in Angelopoulos et al. 2021, where 0 is not tried.
        The guarantee holds, as the calibration samples have no part in the choice.

        Args:
            logits: as in :meth:`calibrate`.
            target: as in :meth:`calibrate`.
            alpha: as in :class:`ConformalSets`.
            score: ``"aps"`` for RAPS, or ``"saps"``, which has no k_reg, and λ > 0.
            share: of samples to choose by, which are drawn at random.
            generator: source of their choice, and of U.
            **options: more of :class:`ConformalSets`, but ``penalty`` and ``k_reg``.

        Returns:
            Calibrated sets.

        Example:
            >>> logits = 3 * torch.randn(2000, 50)
            >>> target = logits.softmax(1).multinomial(1).squeeze(1)
            >>> sets = ConformalSets.tuned(logits, target, alpha=0.1)
            >>> sets.k_reg in range(2, 30), sets.threshold is not None
            (True, True)
        """
        _check_alpha(alpha)
        _check_choice("score", score, ("aps", "saps"))
        check_number("share", share, positive=True)
        if given := {"penalty", "k_reg"} & options.keys():
            raise TypeError(f"tuned chooses {' and '.join(sorted(given))}: leave it out")
        dim = options.pop("dim", -1)
        rows = checked(logits, dim, look=True)
        check_labels(target, rows)
        rows, labels = rows.reshape(-1, rows.shape[-1]), target.long().flatten()
        where = None if generator is None else generator.device
        order = torch.randperm(len(labels), generator=generator, device=where).to(labels.device)
        used = int(share * len(labels))
        fewest = samples_needed(alpha)
        if min(used, len(labels) - used) < fewest:
            raise ValueError(
                f"alpha={alpha:g} needs at least {fewest} samples to tune and {fewest} to "
                f"calibrate, got {used} and {len(labels) - used} (share={share:g})"
            )
        tuning, others = order[:used], order[used:]
        known, right = rows[tuning], labels[tuning]
        if score == "aps":
            options["k_reg"] = _rank_that_covers(known, right, alpha)
        best, least = None, inf
        for penalty in (0.0, *PENALTIES) if score == "aps" else PENALTIES:
            sets = cls(alpha, score=score, penalty=penalty, **options)
            members = sets.calibrate(known, right, generator=generator)(known, generator=generator)
            size = float(members.sum(-1).double().mean())
            if size < least:
                best, least = sets, size
        assert best is not None
        best.calibrate(rows[others], labels[others], generator=generator)
        best.dim = dim
        return best

    def calibrate(
        self, logits: Tensor, target: Tensor, *, generator: torch.Generator | None = None
    ) -> Self:
        """Find q̂; this waits for the device.

        Args:
            logits: those of at least ⌈1/α⌉ − 1 samples that the model was not trained on.
            target: class indices, of the logits' shape without the classes.
            generator: source of U, and of the samples that make clusters.

        Returns:
            Itself.
        """
        logits = checked(logits, self.dim, look=True)
        check_labels(target, logits)
        labels = target.long().flatten()
        scores = self._scores(logits, generator).gather(-1, target.long().unsqueeze(-1)).flatten()
        marginal, classes = self._marginal_threshold(scores), logits.shape[-1]
        if self.calibration == "marginal":
            self.threshold = marginal
        else:
            if self.calibration == "class":
                found = group_thresholds(scores, labels, classes, self.alpha)
            else:
                found = clustered_thresholds(scores, labels, classes, self.alpha, generator)
            self._warn_of_missed(found, torch.bincount(labels, minlength=classes))
            self.threshold = self._interpolated(found, marginal).cpu()
        self.classes = classes
        return self

    def forward(self, logits: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Mask of the sets, of the logits' shape; U comes from the generator."""
        logits, threshold = self._calibrated_for(logits)
        scores = self._scores(logits, generator)
        if isinstance(threshold, Tensor):
            threshold = threshold.to(scores)
        mask = (scores <= threshold) & (scores < inf)
        return mask.movedim(-1, self.dim)

    def get_extra_state(self) -> dict[str, object]:
        """The thresholds, and what they depend on, for the state dict."""
        return {**super().get_extra_state(), "prevalence": self.prevalence}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take thresholds from a state dict, if they were found with the same settings."""
        super().set_extra_state(state)
        self.prevalence = state.get("prevalence")

    def _scores(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """E for every class as the label, (…, C); ∞ for those that may not be in a set."""
        classes, uniform = logits.shape[-1], None
        if self.prevalence is not None and len(self.prevalence) != classes:
            raise ValueError(
                f"counts must have one number for each class, got {len(self.prevalence)} for "
                f"{classes} classes"
            )
        if self.randomized:
            uniform = torch.rand(
                (*logits.shape[:-1], 1),
                generator=generator,
                dtype=wide_dtype(logits),
                device=logits.device,
            )
        return label_scores(
            logits,
            self.score,
            penalty=self.penalty,
            k_reg=self.k_reg,
            prevalence=self.prevalence,
            uniform=uniform,
            max_size=self.max_size,
        )

    def _marginal_threshold(self, scores: Tensor) -> float:
        """That of all samples, or an error if there is none."""
        n = scores.numel()
        covered = int(places(torch.tensor(n), self.alpha))
        if covered > n:
            raise ValueError(
                f"alpha={self.alpha:g} needs at least {samples_needed(self.alpha)} samples to "
                f"calibrate, got {n}"
            )
        threshold = float(scores.sort().values[covered - 1])
        if threshold == inf:
            possible = int((scores < inf).sum())
            what = "classes that are present" if self.max_size is None else "on such lists"
            raise ValueError(
                f"alpha={self.alpha:g} with max_size={self.max_size} cannot be had: it takes "
                f"{covered} of {n} calibration labels, but only {possible} are {what}; raise "
                "max_size or alpha"
            )
        return threshold

    def _warn_of_missed(self, thresholds: Tensor, counts: Tensor) -> None:
        """Warn of classes that have samples enough, but not on such lists."""
        missed = (thresholds == inf) & (counts >= samples_needed(self.alpha))
        if number := int(missed.sum()):
            warn(
                f"{number} of {len(counts)} classes cannot be covered as alpha={self.alpha:g} "
                f"asks: too many of their labels are absent, or beyond max_size={self.max_size}",
                stacklevel=3,
            )

    def _interpolated(self, thresholds: Tensor, marginal: float) -> Tensor:
        """Thresholds between those of classes and that of all samples, by ``class_weight``."""
        if self.class_weight == 1:
            return thresholds
        largest = largest_score(self.score, len(thresholds), self.penalty, self.k_reg)
        finite = thresholds.masked_fill(thresholds == inf, largest)
        return self.class_weight * finite + (1 - self.class_weight) * marginal


def _rank_that_covers(logits: Tensor, labels: Tensor, alpha: float) -> int:
    """The least k of which 1 − α of the labels are among the first k, ties by their indices."""
    ranks = logits.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    of_labels = ranks.gather(-1, labels.unsqueeze(-1)).flatten().sort().values + 1
    return int(of_labels[int(places(torch.tensor(len(labels)), alpha)) - 1])


def _check_alpha(alpha: float) -> None:
    if not is_number(alpha):
        raise TypeError(f"alpha must be a number, got alpha={alpha!r}")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be between 0 and 1, got alpha={alpha}")


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        advice = '; RAPS is score="aps" with a penalty' if value == "raps" else ""
        raise ValueError(
            f"{name} must be one of {', '.join(choices)}, got {name}={value!r}{advice}"
        )
