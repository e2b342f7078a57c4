"""How much memory a loss takes beyond the logits."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")

CRITERIA = [
    "SmoothTopKLoss(k=5)",
    "SmoothTopKLoss(k=20)",
    "SmoothTopKLoss(k=5, label_smoothing=0.1)",
    "NoisedTopKLoss(k=5)",
    "TopKCrossEntropyLoss(k=5)",
]
SCRIPT = """
import torch
from topklass import *
from topklass.reference import every_label, fused, row_blocks

# Blocks of rows that are small against the logits, as they are against those of real batches.
row_blocks.GRAPH_ELEMENTS["cpu"], fused.BLOCK_ELEMENTS = 2**16, 2**14
every_label.CONSTANTS_ELEMENTS = 2**16
logits = torch.randn({rows}, {classes}, requires_grad=True)
target = torch.randint({classes}, ({rows},))


def peak():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


for name in {criteria}:
    criterion = eval(name)
    criterion(logits[:2], target[:2]).backward()
    logits.grad = None
    open("/proc/self/clear_refs", "w").write("5")  # resets the peak
    before = peak()
    criterion(logits, target).backward()
    print((peak() - before) / (logits.numel() * logits.element_size()))
    logits.grad = None
"""


def taken(criteria: list[str], rows: int, classes: int) -> dict[str, float]:
    """Peak memory of each criterion, forward and backward, in tensors of the logits' size."""
    script = SCRIPT
    for name, value in {"criteria": criteria, "rows": rows, "classes": classes}.items():
        script = script.replace(f"{{{name}}}", repr(value))
    at_once = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}  # return memory
    output = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | at_once,
    ).stdout
    return dict(zip(criteria, map(float, output.split()), strict=True))


@pytest.mark.parametrize(
    "criteria",
    [CRITERIA, pytest.param(["SmoothTopKLoss(k=40)"], marks=pytest.mark.slow)],
    ids=["", "long list"],
)
def test_at_most_three_tensors_of_the_logits_size(criteria):
    found = taken(criteria, 64, 8192)
    assert max(found.values()) < 3.3, found  # 0.3: the allocator's slack
    assert min(found.values()) > 0.9, found  # the gradient at least


@pytest.mark.slow
def test_short_rows_whose_constants_are_larger_than_they_are():
    """The constants of all rows would take more than 40 times the memory of the logits."""
    found = taken(["SmoothTopKLoss(k=5, label_smoothing=0.1)"], 16384, 21)
    assert max(found.values()) < 10, found
