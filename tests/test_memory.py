"""How much memory a loss takes beyond the logits."""

import os
import subprocess
import sys

import pytest

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
from topklass.reference import fused, row_blocks

# Blocks of rows that are small against the logits, as they are against those of real batches.
row_blocks.GRAPH_ELEMENTS["cpu"], fused.BLOCK_ELEMENTS = 2**16, 2**14
logits = torch.randn(64, 8192, requires_grad=True)
target = torch.randint(8192, (64,))


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


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize(
    "criteria",
    [CRITERIA, pytest.param(["SmoothTopKLoss(k=40)"], marks=pytest.mark.slow)],
    ids=["", "long list"],
)
def test_at_most_three_tensors_of_the_logits_size(criteria):
    run = [sys.executable, "-c", SCRIPT.replace("{criteria}", repr(criteria))]
    at_once = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}  # return memory
    output = subprocess.run(
        run, check=True, capture_output=True, text=True, env=os.environ | at_once
    ).stdout
    taken = dict(zip(criteria, map(float, output.split()), strict=True))
    assert max(taken.values()) < 3.3, taken  # 0.3: the allocator's slack
    assert min(taken.values()) > 0.9, taken  # the gradient at least
