"""Errors that name what was given and what was expected."""

from math import inf
from typing import TypeGuard

from torch import Tensor

from topklass._transforms import can_look


def check_scores(scores: Tensor, name: str = "scores") -> None:
    """Require floating-point scores with a last dimension of classes."""
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        given = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
        raise TypeError(f"{name} must be a floating-point tensor, got {given}")
    if scores.dim() == 0 or scores.shape[-1] == 0:
        raise ValueError(
            f"{name} must have shape (..., classes) with at least one class, "
            f"got {tuple(scores.shape)}"
        )


def check_count(name: str, value: int, largest: int | None = None, meaning: str = "") -> None:
    """Require an integer from 1 to ``largest``."""
    if not is_integer(value):
        raise TypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__})")
    if value < 1 or (largest is not None and value > largest):
        bound = "at least 1" if largest is None else f"from 1 to {largest}, {meaning}"
        raise ValueError(f"{name} must be {bound}, got {name}={value}")


def check_scores_and_k(scores: Tensor, k: int, name: str = "scores") -> None:
    """Require scores (…, n) and 1 ≤ k ≤ n."""
    check_scores(scores, name)
    check_count("k", k, scores.shape[-1], "the number of classes")


def check_number(name: str, value: float, *, positive: bool) -> None:
    """Require a finite number that is positive, or at least not negative."""
    if not is_number(value):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    if not 0 <= value < inf or (positive and value == 0):
        expected = "positive and finite" if positive else "non-negative and finite"
        raise ValueError(f"{name} must be {expected}, got {name}={value}")


def is_number(value: object) -> TypeGuard[float]:
    """Whether the value is a number, of Python or NumPy; True and tensors are not."""
    if isinstance(value, (bool, Tensor)):
        return False
    return isinstance(value, (int, float)) or hasattr(value, "__float__")


def is_integer(value: object) -> bool:
    """Whether the value is an integer, of Python or NumPy; True and tensors are not."""
    if isinstance(value, (bool, Tensor)):
        return False
    return isinstance(value, int) or hasattr(value, "__index__")


def check_margin(margin: float | Tensor) -> None:
    """Require a non-negative number, or a vector of them with one per class."""
    if is_number(margin):
        return check_number("margin", margin, positive=False)
    if not isinstance(margin, Tensor):
        raise TypeError(
            "margin must be a number or a tensor with one value per class, "
            f"got {margin!r} ({type(margin).__name__})"
        )
    if margin.dim() > 1 or not margin.is_floating_point():
        raise ValueError(
            "margin must be a number or a floating-point tensor with one value per class, "
            f"got a tensor of shape {tuple(margin.shape)} and {margin.dtype}"
        )
    if can_look(margin):
        wrong = margin.detach()[~((margin >= 0) & (margin < inf))]
        if wrong.numel():
            raise ValueError(
                f"margin must be non-negative and finite for every class, got {wrong[0].item()}"
            )
    return None


def check_temperature(value: float, name: str = "tau") -> None:
    """Require a temperature that float32 can divide by."""
    check_number(name, value, positive=True)
    if not 1e-30 <= value <= 1e30:
        raise ValueError(f"{name} must be from 1e-30 to 1e30, got {name}={value}")


def check_per_class(name: str, value: Tensor, classes: int | None = None) -> None:
    """Require a floating-point vector, with one value per class if their number is known."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        given = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a floating-point tensor, got {given}")
    if value.dim() != 1 or (classes is not None and len(value) != classes):
        every = "each class" if classes is None else f"each of the {classes} classes"
        raise ValueError(f"{name} must have one value for {every}, got shape {tuple(value.shape)}")
