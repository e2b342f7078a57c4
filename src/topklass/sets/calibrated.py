"""What sets share: a calibrated threshold, and checks of logits and labels."""

from __future__ import annotations

from math import inf
from typing import Any, ClassVar
from warnings import warn

from torch import Tensor, nn

from topklass._checks import check_dim, check_target
from topklass._transforms import can_read_values
from topklass.prediction import classes_last
from topklass.reference.power_sums import wide_dtype


class CalibratedSets(nn.Module):
    """A threshold, or one for each class, and the number of classes that it was found for."""

    parameters_of_sets: tuple[str, ...] = ()
    """Names of what the threshold depends on, besides the calibration samples."""
    later_parameters: ClassVar[dict[str, object]] = {}
    """Those that states of older versions do not have, and what they were then."""
    threshold: float | Tensor | None
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
        settings = {**self.later_parameters, **state["settings"]}
        if settings != self.settings:
            raise ValueError(
                f"the state was calibrated with {_listed(settings)}, but these sets have "
                f"{_listed(self.settings)}: construct them alike, or calibrate again"
            )
        self.threshold, self.classes = state["threshold"], state["classes"]

    def extra_repr(self) -> str:
        """Show the settings and the threshold."""
        threshold = self.threshold
        shown = str(threshold)
        if isinstance(threshold, Tensor):
            lowest, highest = threshold.aminmax()
            shown = f"{lowest:g} to {highest:g}, one for each of {len(threshold)} classes"
        return f"{_listed(self.settings)}, dim={self.dim}, threshold={shown}"

    def _calibrated_for(self, logits: Tensor) -> tuple[Tensor, float | Tensor]:
        """The logits, classes last, and the threshold, if there is one for so many classes."""
        logits = checked(logits, self.dim)
        name, classes = type(self).__name__, logits.shape[-1]
        if self.threshold is None:
            raise RuntimeError(f"{name} has no threshold yet: call calibrate, or load its state")
        if classes != self.classes:
            raise ValueError(f"{name} was calibrated for {self.classes} classes, got {classes}")
        return logits, self.threshold


def checked(logits: Tensor, dim: int, look: bool = False) -> Tensor:
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


def log_softmax(logits: Tensor) -> Tensor:
    """In float64, where ties and underflow are rare; −inf also in rows without any class."""
    return _wide(logits.detach()).log_softmax(-1).masked_fill(logits == -inf, -inf)


def _wide(logits: Tensor) -> Tensor:
    """In float64, where the device has it."""
    return logits.to(wide_dtype(logits))


def _listed(settings: dict[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
