"""How many files a reader of the smooth loss on a GPU has to open."""

import topklass
from call_trace import files_of_a_call


def test_the_smooth_loss_passes_through_ten_files_on_a_gpu():
    with topklass.use_backend("kernel"):
        passed = files_of_a_call(rows=2, classes=16)
    assert "kernels/smooth/gradient.py" in passed
    assert len(passed) <= 10, "\n".join(passed)
