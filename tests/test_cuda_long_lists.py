"""On a CUDA device: the kernels of lists from k = 33 on."""

import pytest

from cuda_cases import NEEDS_GPU, check_determinism, check_error, each_kind, each_shape

pytestmark = NEEDS_GPU


@each_kind
@pytest.mark.parametrize("k", [50])
@each_shape
def test_error_is_at_most_twice_that_of_the_reference(shape, k, logits):
    check_error(shape, k, logits)


@pytest.mark.parametrize("k", [50])
@each_shape
def test_determinism(k, shape):
    check_determinism(shape, k)
