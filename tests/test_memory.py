"""How much memory a loss takes beyond the logits."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch, topklass
logits = torch.randn({rows}, 65536, requires_grad=True)
target = torch.randint(65536, ({rows},))
criterion = {criterion}
small = torch.randn(2, 65536, requires_grad=True)
criterion(small, target[:2]).backward()
size = logits.numel() * logits.element_size() / 1024
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
criterion(logits, target).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux only")
@pytest.mark.parametrize(
    "criterion",
    [
        "topklass.SmoothTopKLoss(k=5)",
        "topklass.SmoothTopKLoss(k=20)",
        "topklass.SmoothTopKLoss(k=40)",
        "topklass.SmoothTopKLoss(k=5, label_smoothing=0.1)",
        "topklass.NoisedTopKLoss(k=5)",
        "topklass.TopKCrossEntropyLoss(k=5)",
    ],
)
def test_at_most_three_tensors_of_the_logits_size(criterion):
    rows = 64 if "k=40" in criterion else 128  # it is slow
    run = [sys.executable, "-c", SCRIPT.format(criterion=criterion, rows=rows)]
    tensors = float(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    assert tensors < 3.3, f"{tensors:.1f} tensors of the logits' size"  # 0.3: the allocator's slack
