"""What the tests of sets share: samples of a known distribution, coverage, errors."""

import re

import pytest
import torch
from torch import Tensor


def samples(n: int, classes: int = 8, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    """Logits of the true distribution, and labels drawn from it."""
    logits = spread * torch.randn(n, classes, dtype=torch.float64)
    return logits, logits.softmax(-1).multinomial(1).squeeze(1)


def covered(members: Tensor, target: Tensor) -> Tensor:
    return members.gather(-1, target.unsqueeze(-1)).squeeze(-1).double()


def raises(error, *parts):
    """The error's message has these parts, in any order."""
    return pytest.raises(error, match="".join(f"(?=.*{re.escape(part)})" for part in parts))
