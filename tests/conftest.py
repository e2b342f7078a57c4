"""What all tests share: a fixed seed, and memory that is poisoned before its first use."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poison(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fill ``torch.empty`` with NaN, which PyTorch does with deterministic algorithms only."""
    if request.node.get_closest_marker("gpu") or request.node.get_closest_marker("slow"):
        yield
        return
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)
