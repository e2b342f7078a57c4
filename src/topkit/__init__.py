"""Losses and operators for classifiers that may show a short list of guesses.

>>> import torch, topkit
>>> criterion = topkit.SmoothTopKLoss(k=2)  # takes what nn.CrossEntropyLoss takes
>>> criterion(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([0]))
tensor(0.6931)
"""

from topkit import functional
from topkit.dispatch import use_backend
from topkit.losses import (
    CalibratedTopKHingeLoss,
    ConvexTopKHingeLoss,
    FocalLoss,
    LDAMLoss,
    NoisedTopKLoss,
    SmoothTopKLoss,
    TopKHingeLoss,
)
from topkit.operators import class_margins, log_esp, noised_topk, topk_marginals

__version__ = "0.1.0"

__all__ = [
    "CalibratedTopKHingeLoss",
    "ConvexTopKHingeLoss",
    "FocalLoss",
    "LDAMLoss",
    "NoisedTopKLoss",
    "SmoothTopKLoss",
    "TopKHingeLoss",
    "class_margins",
    "functional",
    "log_esp",
    "noised_topk",
    "topk_marginals",
    "use_backend",
]
