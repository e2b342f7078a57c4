"""The kernels for long lists, made to serve short ones, pass the tests of those."""

from collections.abc import Iterator

import pytest
from test_smooth_kernel import (  # noqa: F401
    test_any_call,
    test_shift_invariance,
)
from test_smooth_kernel_absence import (  # noqa: F401
    test_all_targets_ignored,
    test_ignored_class,
    test_ignored_targets_whatever_the_outgoing_gradient,
    test_nan_stays_in_its_row,
)
from test_smooth_kernel_contract import (  # noqa: F401
    test_autocast,
    test_backward_twice,
    test_batched_gradients,
    test_options,
    test_outgoing_gradients,
    test_second_derivatives,
    test_weights_of_zero,
    test_without_gradient,
)

from topklass.dispatch import KERNELS, Kernel

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def every_list_is_long() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KERNELS, "smooth_topk_loss", (Kernel("long_lists", 1, 1024),))
        yield
