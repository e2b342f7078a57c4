"""Kernels on the CPU, in Triton's interpreter: ``TRITON_INTERPRET=1 pytest tests/interpreted``.

Triton decides when it is imported whether it interprets, so these tests have a process of their
own and are not collected in any other.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from topklass.dispatch import INTERPRETED

collect_ignore_glob = [] if INTERPRETED else ["*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the interpreter divide by zero: it computes with NumPy what a GPU does silently."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))


@pytest.fixture(scope="session", autouse=True)
def rounding_to_bfloat16() -> None:
    """Round to bfloat16 as GPUs do; the interpreter truncates, and makes 0 of float64."""
    from triton.language import bfloat16
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.cast_impl

    def cast(self: Any, source: Any, kind: Any) -> Any:
        if kind.scalar != bfloat16 or not source.dtype.scalar.is_floating():
            return original(self, source, kind)
        single = torch.from_numpy(np.atleast_1d(source.data).astype(np.float32))
        bits = single.bfloat16().view(torch.int16).numpy().view(np.uint16)
        return TensorHandle(bits.reshape(source.data.shape), kind.scalar)

    InterpreterBuilder.cast_impl = cast
