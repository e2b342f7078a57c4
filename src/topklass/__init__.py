"""Losses and operators for classifiers that may show a short list of guesses.

>>> import torch, topklass
>>> criterion = topklass.SmoothTopKLoss(k=2)  # takes what nn.CrossEntropyLoss takes
>>> criterion(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([0]))
tensor(0.6931)
"""

from importlib import import_module
from sys import modules
from types import ModuleType

from topklass import compat, functional, integrations
from topklass._targets import SparseTarget
from topklass.baseline_losses import (
    CalibratedTopKHingeLoss,
    ConvexTopKHingeLoss,
    FocalLoss,
    TopKHingeLoss,
)
from topklass.dispatch import use_backend
from topklass.functional import topk_accuracy
from topklass.linear_losses import LinearSmoothTopKLoss, LinearTopKCrossEntropyLoss
from topklass.longtail import (
    CosineClassifier,
    DeferredReweighting,
    LogitAdjustment,
    class_margins,
    class_weights,
)
from topklass.losses import (
    LDAMLoss,
    MultiLabelSmoothTopKLoss,
    NoisedTopKLoss,
    ShortListLoss,
    SmoothTopKLoss,
    TopKCrossEntropyLoss,
)
from topklass.operators import expected_topk, log_esp, noised_topk, topk_marginals
from topklass.prediction import predict_topk
from topklass.sets import AverageKSets, ConformalSets, TopKSets

__version__ = "0.2.0"

__all__ = [
    "AverageKSets",
    "CalibratedTopKHingeLoss",
    "ConformalSets",
    "ConvexTopKHingeLoss",
    "CosineClassifier",
    "DeferredReweighting",
    "FocalLoss",
    "LDAMLoss",
    "LinearSmoothTopKLoss",
    "LinearTopKCrossEntropyLoss",
    "LogitAdjustment",
    "MultiLabelSmoothTopKLoss",
    "NoisedTopKLoss",
    "ShortListLoss",
    "SmoothTopKLoss",
    "SparseTarget",
    "TopKCrossEntropyLoss",
    "TopKHingeLoss",
    "TopKSets",
    "class_margins",
    "class_weights",
    "compat",
    "expected_topk",
    "functional",
    "integrations",
    "log_esp",
    "noised_topk",
    "predict_topk",
    "topk_accuracy",
    "topk_marginals",
    "use_backend",
]


OPTIONAL = ("data", "distributed", "metrics", "models", "train")
"""Modules that need an extra, ``topklass[metrics]`` or ``topklass[train]``, or processes."""


def __getattr__(name: str) -> ModuleType:
    """Import an optional module when it is first used."""
    if name in OPTIONAL:
        return import_module(f"topklass.{name}")
    # with name and obj Python suggests the nearest name
    raise AttributeError(
        f"module 'topklass' has no attribute {name!r}", name=name, obj=modules[__name__]
    )


def __dir__() -> list[str]:
    """Public names, those of optional modules included."""
    return sorted([*__all__, *OPTIONAL, "__version__"])
