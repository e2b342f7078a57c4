"""On a CUDA device: the kernels of label smoothing and class probabilities."""

import pytest
import torch
from torch import Tensor

import topklass
import topklass.functional as TF
from cuda_cases import (
    NEEDS_GPU,
    SHAPES,
    TINY,
    each_kind,
    largest_errors,
    problem,
    scores_of,
    value_and_gradient,
)

pytestmark = NEEDS_GPU
LOSSES = {
    "cross-entropy": (TF.topk_cross_entropy, {"k": 1}),
    "smooth, k = 5": (TF.smooth_topk_loss, {"k": 5}),
    "smooth, k = 10": (TF.smooth_topk_loss, {"k": 10, "tau": 0.1}),
    "mixture": (TF.topk_cross_entropy, {"k": {1: 0.2, 5: 0.8}}),
}
each_loss = pytest.mark.parametrize("name", LOSSES)
some_shapes = pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
ERROR = 2e-6


def of_every_label(name: str, scores: Tensor, target: Tensor, backend: str, **options: object):
    """Losses of rows and their gradient."""
    loss, parameters = LOSSES[name]
    smoothing = 0.0 if target.is_floating_point() else 0.1
    options = {"label_smoothing": smoothing, "reduction": "none"} | options
    with topklass.use_backend(backend):
        return value_and_gradient(
            lambda s: loss(s, target, **parameters, **options), scores.detach().requires_grad_()
        )


def target_of(kind: str, scores: Tensor, labels: Tensor) -> Tensor:
    return labels if kind == "smoothing" else torch.rand_like(scores).softmax(1)


@each_loss
@each_kind
@pytest.mark.parametrize("target", ["smoothing", "probabilities"])
@some_shapes
def test_error(shape, target, logits, name):
    """Against float64, some rows."""
    scores, labels = scores_of(logits, shape, 5)
    given = target_of(target, scores, labels)
    some = slice(None, None, max(1, len(scores) // 8))
    exact = of_every_label(name, scores[some].double(), given[some], "reference")
    ours = of_every_label(name, scores, given, "kernel")
    errors = largest_errors(tuple(each[some] for each in ours), exact)
    assert (errors < ERROR).all(), errors


@each_loss
@some_shapes
def test_weights_ignored_rows_and_the_mean(shape, name):
    scores, labels = scores_of("random", shape, 5)
    labels[::3] = -100
    options = {"weight": torch.rand(shape[1], device="cuda") + 0.5, "reduction": "mean"}
    exact = of_every_label(name, scores.double(), labels, "reference", **options)
    ours = of_every_label(name, scores, labels, "kernel", **options)
    assert (ours[0] - exact[0]).abs() < ERROR * exact[0]
    off = (ours[1] - exact[1]).norm(dim=1) / (exact[1].norm(dim=1) + TINY)
    assert off.max() < ERROR


@each_loss
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(name, dtype):
    scores, labels = problem(64, 1000, dtype)
    loss, gradient = of_every_label(name, scores, labels, "kernel")
    single, single_gradient = of_every_label(name, scores.float(), labels, "kernel")
    assert torch.equal(loss, single.to(dtype))
    torch.testing.assert_close(gradient, single_gradient.to(dtype), rtol=1e-2, atol=1e-7)


@each_loss
@pytest.mark.parametrize("target", ["smoothing", "probabilities"])
@some_shapes
def test_determinism(shape, target, name):
    scores, labels = scores_of("random", shape, 5)
    given = target_of(target, scores, labels)
    first = of_every_label(name, scores, given, "kernel")
    for _ in range(3):
        again = of_every_label(name, scores, given, "kernel")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
