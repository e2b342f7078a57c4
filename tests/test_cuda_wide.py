"""On a CUDA device: the kernels of lists up to k = 32, and of several labels for a row."""

import pytest
import torch

import topklass
from cuda_cases import (
    NEEDS_GPU,
    SHAPES,
    check_determinism,
    check_error,
    each_kind,
    each_shape,
    largest_errors,
    problem,
    smooth,
)

pytestmark = NEEDS_GPU


@each_kind
@pytest.mark.parametrize("k", [20, 32])
@each_shape
def test_error_is_at_most_twice_that_of_the_reference(shape, k, logits):
    check_error(shape, k, logits)


@pytest.mark.parametrize("k", [20, 32])
@each_shape
def test_determinism(k, shape):
    check_determinism(shape, k)


@pytest.mark.parametrize("m", [2, 16])
@pytest.mark.parametrize("k", [1, 5, 20, 32])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_few_classes_are_the_dense_target(shape, k, m):
    scores, _ = problem(*shape)
    target = topklass.SparseTarget(scores.topk(m).indices, torch.rand(len(scores), m).cuda())
    wide = topklass.SparseTarget(target.indices, target.weights.double()).to_dense(shape[1])
    exact = smooth(scores.double(), wide, k, 1.0, "reference")
    assert (largest_errors(smooth(scores, target, k, 1.0, "kernel"), exact) < 1e-6).all()
