"""NaN on a GPU: its row has the loss NaN and the gradient NaN throughout, no other has either."""

import math

import pytest
import torch
from torch import Tensor

import topklass
from cuda_cases import NEEDS_GPU
from topklass.functional import noised_topk_loss, smooth_topk_loss, topk_hinge_loss

pytestmark = NEEDS_GPU
TARGET = torch.arange(20) % 7


def few(target: Tensor) -> topklass.SparseTarget:
    """Two classes for each row."""
    both = torch.stack([target, target + 7], 1)
    return topklass.SparseTarget(both, torch.full_like(both, 0.5, dtype=torch.float32))


FUNCTIONS = {
    "smooth": lambda s, t: smooth_topk_loss(s, t, 5, reduction="none"),
    "longer list": lambda s, t: smooth_topk_loss(s, t, 20, reduction="none"),
    "few classes": lambda s, t: smooth_topk_loss(s, few(t), 5, reduction="none"),
    "smoothing": lambda s, t: smooth_topk_loss(s, t, 5, reduction="none", label_smoothing=0.1),
    "long list": lambda s, t: smooth_topk_loss(s, t, 40, reduction="none"),
    "noised": lambda s, t: noised_topk_loss(s, t, 5, reduction="none"),
    "exact": lambda s, t: noised_topk_loss(s, t, 5, samples=None, reduction="none"),
    "hinge": lambda s, t: topk_hinge_loss(s, t, 5, reduction="none"),
    "noised_topk": lambda s, _: topklass.noised_topk(s, 5),
    "expected_topk": lambda s, _: topklass.expected_topk(s, 5),
}


@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("classes", [100, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_nan(name, classes, dtype, compiled):
    scores = torch.randn(20, classes, device="cuda").to(dtype)
    spoilt = torch.zeros(20, dtype=torch.bool, device="cuda")
    for row, column in ((0, 0), (3, 99), (9, classes - 1), (19, 50)):
        scores[row, column], spoilt[row] = math.nan, True
    function = torch.compile(FUNCTIONS[name]) if compiled else FUNCTIONS[name]
    value = function(scores.requires_grad_(), TARGET.cuda())
    (gradient,) = torch.autograd.grad(value.sum(), scores)
    assert torch.equal(value.isnan(), spoilt)
    assert torch.equal(gradient.isnan(), spoilt[:, None].expand_as(gradient))
