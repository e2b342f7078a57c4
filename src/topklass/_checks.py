"""Checks of arguments: errors name what was given, what was expected and how to fix it.

Where ``torch.nn.functional.cross_entropy`` raises for the same mistake, the type is the same.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from math import inf
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from topklass._transforms import can_read_values, is_dtensor

REDUCTIONS = ("none", "mean", "sum")


class Options(NamedTuple):
    """The options that every loss shares with ``cross_entropy``."""

    weight: Tensor | None = None
    """One weight per class."""
    ignore_index: int = -100
    """A target that contributes neither loss nor gradient."""
    reduction: str = "mean"
    """"mean" (weighted by the labels' weights), "sum" or "none"."""
    label_smoothing: float = 0.0
    """Share of the target that is spread uniformly over all classes."""


def check_options(options: Options, classes: int | None = None) -> None:
    """Require a known reduction, label smoothing from 0 to 1, and one weight per class."""
    check_ignore_index(options.ignore_index)
    if options.reduction not in REDUCTIONS:
        raise ValueError(
            f"reduction must be one of {', '.join(REDUCTIONS)}, got {options.reduction!r}"
        )
    smoothing = options.label_smoothing
    if not is_number(smoothing):
        raise TypeError(f"label_smoothing must be a number, got {smoothing!r}")
    if not 0.0 <= smoothing <= 1.0:
        raise RuntimeError(f"label_smoothing must be from 0 to 1, got {smoothing!r}")
    if options.weight is not None:
        check_per_class("weight", options.weight, classes)


def check_ignore_index(ignore_index: int) -> None:
    """Require an integer; one that is not a class, as -100, ignores nothing else."""
    if not is_integer(ignore_index):
        raise TypeError(f"ignore_index must be an integer, got {ignore_index!r}")


def check_logits(logits: Tensor, dim: int = 1) -> int:
    """Require floating-point logits with a class dimension; return the number of classes."""
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits must be a tensor, got {type(logits).__name__}")
    if not logits.is_floating_point():
        raise NotImplementedError(f"logits must be a floating-point tensor, got {logits.dtype}")
    if logits.dim() == 0:
        raise RuntimeError("logits must have a class dimension, got a tensor of shape ()")
    return logits.shape[class_dimension(logits, dim)]


def check_dim(dim: int) -> None:
    """Require an integer."""
    if not is_integer(dim):
        raise TypeError(f"dim must be an integer, got {dim!r} ({type(dim).__name__})")


def class_dimension(logits: Tensor, dim: int = 1) -> int:
    """The class dimension counted from 0; that of (C) logits for the default ``dim=1``."""
    check_dim(dim)
    dimensions = logits.dim()
    if dimensions == 1 and dim == 1:
        return 0
    if not -dimensions <= dim < dimensions:
        raise IndexError(
            f"dim must be from {-dimensions} to {dimensions - 1} for logits of shape "
            f"{tuple(logits.shape)}, got dim={dim}"
        )
    return dim % dimensions


def index_shape(logits: Tensor, dim: int = 1) -> torch.Size:
    """The shape of class indices: that of the logits without the class dimension."""
    at = class_dimension(logits, dim)
    return logits.shape[:at] + logits.shape[at + 1 :]


def to_rows(tensor: Tensor, dim: int = 1) -> Tensor:
    """Logits or class probabilities as (R, C), one row for each sample."""
    at = class_dimension(tensor, dim)
    if tensor.dim() == 2 and at == 1:
        return tensor
    last = tensor.movedim(at, -1)
    return last.flatten(0, -2) if last.dim() > 1 else last.unsqueeze(0)


def every_class_counts(target: object, options: Options) -> bool:
    """Whether the losses of every class as the label are needed."""
    dense = isinstance(target, Tensor) and target.is_floating_point()
    return dense or options.label_smoothing > 0


def check_target(logits: Tensor, target: object, dim: int = 1) -> bool:
    """Require a target that matches the logits; return whether it holds class probabilities."""
    if not is_dtensor(logits):
        check_not_distributed(target=target)
    if not isinstance(target, Tensor):
        given = type(target).__name__
        sparse = " here" if given == "SparseTarget" else ""
        raise TypeError(
            f"target must be a tensor of class indices or class probabilities{sparse}, got {given}"
        )
    expected = index_shape(logits, dim)
    if target.is_floating_point():
        if target.shape != logits.shape:
            hint = "; for class indices pass target.long()" if target.shape == expected else ""
            raise RuntimeError(
                f"a floating-point target holds class probabilities and must have the logits' "
                f"shape {tuple(logits.shape)}, got {tuple(target.shape)}{hint}"
            )
        return True
    if target.dtype == torch.bool or target.is_complex():
        raise RuntimeError(
            f"target must hold class indices (integers) or class probabilities, got {target.dtype}"
        )
    if target.shape != expected:
        wrong_batch = target.shape != logits.shape and target.shape[:1] != expected[:1]
        raise (ValueError if wrong_batch else RuntimeError)(
            f"for logits of shape {tuple(logits.shape)} with classes in dimension "
            f"{class_dimension(logits, dim)}, a target of class indices must have shape "
            f"{tuple(expected)}, got {tuple(target.shape)}{_target_hint(logits, target, dim)}"
        )
    return False


def _target_hint(logits: Tensor, target: Tensor, dim: int) -> str:
    """How a target of class indices with a wrong shape may be fixed."""
    if target.shape == logits.shape:
        return "; one-hot targets must be floating point: target.float()"
    if target.shape == (*index_shape(logits, dim), 1):
        return "; remove the last dimension: target.squeeze(-1)"
    if target.shape == logits.shape[:-1]:
        return "; if classes are in the last dimension: dim=-1"
    return ""


def labels_in_range(labels: Tensor, classes: int, ignore_index: int) -> bool:
    """Whether all labels are known to be classes, none of them ignored.

    Known only where values may be read. There, a label that is neither a class nor ignored raises.
    """
    if labels.numel() == 0 or not can_read_values(labels):
        return False
    lowest, highest = (int(bound) for bound in labels.aminmax())
    if lowest >= 0 and highest < classes:
        return not 0 <= ignore_index < classes
    wrong = labels[((labels < 0) | (labels >= classes)) & (labels != ignore_index)]
    if wrong.numel():
        raise IndexError(
            f"target must hold class indices from 0 to {classes - 1}, or "
            f"ignore_index={ignore_index}, got {int(wrong[0])}"
        )
    return False


def check_k(k: int, logits: Tensor, dim: int = 1) -> int:
    """Require logits and 1 ≤ k ≤ C − 1: room for a class outside the list; return C."""
    classes = check_logits(logits, dim)
    if classes < 2:
        raise ValueError(
            f"logits must have at least two classes, got {classes} in dimension "
            f"{class_dimension(logits, dim)} of shape {tuple(logits.shape)} (one class needs no "
            f"classifier; are the classes in another dimension?)"
        )
    check_count("k", k, classes - 1, f"one less than the {classes} classes")
    return classes


def check_scores(scores: Tensor, name: str = "scores", dim: int = -1) -> None:
    """Require floating-point scores with at least one class."""
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        given = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
        raise TypeError(f"{name} must be a floating-point tensor, got {given}")
    if scores.dim() == 0 or scores.shape[class_dimension(scores, dim)] == 0:
        raise ValueError(f"{name} must have at least one class, got shape {tuple(scores.shape)}")


def check_scores_and_k(scores: Tensor, k: int, name: str = "scores", dim: int = -1) -> None:
    """Require scores of n classes and 1 ≤ k ≤ n."""
    check_scores(scores, name, dim)
    classes = scores.shape[class_dimension(scores, dim)]
    check_count("k", k, classes, "the number of classes")


def check_count(name: str, value: int, largest: int | None = None, meaning: str = "") -> None:
    """Require an integer from 1 to ``largest``."""
    if not is_integer(value):
        raise TypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__})")
    if value < 1 or (largest is not None and value > largest):
        bound = "at least 1" if largest is None else f"from 1 to {largest}, {meaning}"
        raise ValueError(f"{name} must be {bound}, got {name}={value}")


def check_number(name: str, value: float, *, positive: bool) -> None:
    """Require a finite number that is positive, or at least not negative."""
    if not is_number(value):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    if not 0 <= value < inf or (positive and value == 0):
        expected = "positive and finite" if positive else "non-negative and finite"
        raise ValueError(f"{name} must be {expected}, got {name}={value}")


def check_temperature(value: float, name: str = "tau") -> None:
    """Require a temperature that float32 can divide by."""
    check_number(name, value, positive=True)
    if not 1e-30 <= value <= 1e30:
        raise ValueError(f"{name} must be from 1e-30 to 1e30, got {name}={value}")


def check_margin(margin: float | Tensor, classes: int | None = None) -> None:
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
            + ("" if margin.is_floating_point() else "; for counts take class_margins(counts)")
        )
    if classes is not None and margin.dim() and len(margin) != classes:
        raise ValueError(
            f"margin must be a number or have one value for each of the {classes} classes, "
            f"got shape {tuple(margin.shape)}"
        )
    if can_read_values(margin):
        wrong = margin.detach()[~((margin >= 0) & (margin < inf))]
        if wrong.numel():
            raise ValueError(
                f"margin must be non-negative and finite for every class, got {wrong[0].item()}"
            )
    return None


def check_per_class(name: str, value: Tensor, classes: int | None = None) -> None:
    """Require a floating-point vector, with one value per class if their number is known."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a floating-point tensor, got {type(value).__name__}")
    if not value.is_floating_point():
        raise RuntimeError(f"{name} must be a floating-point tensor, got {value.dtype}")
    if value.dim() != 1 or (classes is not None and len(value) != classes):
        every = "each class" if classes is None else f"each of the {classes} classes"
        raise RuntimeError(
            f"{name} must have one value for {every}, got shape {tuple(value.shape)}"
        )


def check_same_device(first: Tensor, /, of: str = "logits", **others: object) -> None:
    """Require that all tensors are on the device of the first, by default the logits."""
    verb = "are" if of == "logits" else "is"
    for name, other in others.items():
        if isinstance(other, Tensor) and other.device != first.device:
            raise RuntimeError(
                f"{name} is on {other.device} and the {of} {verb} on {first.device}: move one to "
                f"the other's device"
            )


def check_not_distributed(**tensors: object) -> None:
    """Require ordinary tensors: of ``DTensor``, the losses take logits alone."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and is_dtensor(tensor):
            raise TypeError(
                f"{name} must be an ordinary tensor here, got a DTensor: pass {name}.to_local(), "
                f"and where classes are split over ranks, to a function of topklass.distributed "
                f"with group=mesh.get_group(…)"
            )


def is_number(value: object) -> TypeGuard[float]:
    """Whether the value is a number of Python or NumPy; bools and tensors are not."""
    if isinstance(value, (bool, Tensor)):
        return False
    return isinstance(value, (int, float)) or hasattr(value, "__float__")


def is_integer(value: object) -> bool:
    """Whether the value is an integer of Python or NumPy; bools and tensors are not."""
    if isinstance(value, (bool, Tensor)):
        return False
    return isinstance(value, int) or hasattr(value, "__index__")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A question about the nearest name, if one is near.

    Example:
        >>> did_you_mean("ResNet-18", ["resnet18", "vgg11"])
        " Did you mean 'resnet18'?"
    """
    known = list(names)
    near = get_close_matches(name, known, n=1) or get_close_matches(name.lower(), known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
