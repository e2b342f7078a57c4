"""Losses and operators for classifiers that may show a short list of guesses.

>>> import torch, topkit
>>> criterion = topkit.SmoothTopKLoss(k=2)  # takes what nn.CrossEntropyLoss takes
>>> criterion(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([0]))
tensor(0.6931)
"""

from importlib import import_module
from types import ModuleType

from topkit import functional
from topkit.dispatch import use_backend
from topkit.functional import topk_accuracy
from topkit.heads import CosineClassifier
from topkit.losses import (
    CalibratedTopKHingeLoss,
    ConvexTopKHingeLoss,
    FocalLoss,
    LDAMLoss,
    MultiLabelSmoothTopKLoss,
    NoisedTopKLoss,
    SmoothTopKLoss,
    TopKCrossEntropyLoss,
    TopKHingeLoss,
)
from topkit.operators import (
    class_margins,
    class_weights,
    expected_topk,
    log_esp,
    noised_topk,
    topk_marginals,
)
from topkit.prediction import predict_topk
from topkit.reweighting import DeferredReweighting
from topkit.sets import AverageKSets, ConformalSets, TopKSets

__version__ = "0.1.0"

__all__ = [
    "AverageKSets",
    "CalibratedTopKHingeLoss",
    "ConformalSets",
    "ConvexTopKHingeLoss",
    "CosineClassifier",
    "DeferredReweighting",
    "FocalLoss",
    "LDAMLoss",
    "MultiLabelSmoothTopKLoss",
    "NoisedTopKLoss",
    "SmoothTopKLoss",
    "TopKCrossEntropyLoss",
    "TopKHingeLoss",
    "TopKSets",
    "class_margins",
    "class_weights",
    "expected_topk",
    "functional",
    "log_esp",
    "noised_topk",
    "predict_topk",
    "topk_accuracy",
    "topk_marginals",
    "use_backend",
]


def __getattr__(name: str) -> ModuleType:
    """What needs ``topkit[train]`` is imported when it is asked for."""
    if name in ("data", "metrics", "models", "train"):
        return import_module(f"topkit.{name}")
    raise AttributeError(f"module 'topkit' has no attribute {name!r}")
