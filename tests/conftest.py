"""Fixtures of all tests: a fixed seed, and uninitialised memory filled with NaN."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from topklass.dispatch import INTERPRETED

# Triton's interpreter needs a process of its own; it runs the tests of one folder.
collect_ignore_glob = ["test_*.py"] if INTERPRETED else []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With Triton's interpreter, run nothing but the tests in ``interpreted``."""
    if INTERPRETED:
        folder = Path(__file__).parent / "interpreted"
        others = [item for item in items if folder not in item.path.parents]
        items[:] = [item for item in items if folder in item.path.parents]
        config.hook.pytest_deselected(items=others)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poison(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fill ``torch.empty`` with NaN, as PyTorch does in its deterministic mode."""
    if request.node.get_closest_marker("gpu") or request.node.get_closest_marker("slow"):
        yield
        return
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)
