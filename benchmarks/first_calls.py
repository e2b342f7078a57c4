"""How long the first call of a loss takes, which compiles its kernels.

``python -m benchmarks.first_calls NAME`` is one such process; each has an empty cache of its own.
"""

import os
import subprocess
import sys
import time
from tempfile import TemporaryDirectory

import torch

from benchmarks.rows import Row, digits
from topklass import NoisedTopKLoss, ShortListLoss, SmoothTopKLoss

LOSSES = {
    **{f"smooth, k = {k}": SmoothTopKLoss(k) for k in (5, 20, 32, 50)},
    "short list, k = 5": ShortListLoss(5),
    **{f"noised exact, k = {k}": NoisedTopKLoss(k, samples=None) for k in (5, 32, 50)},
}
SHAPE = (256, 1_000)


def first_calls(quick: bool) -> list[Row]:
    """Seconds of a first and of a second forward and backward pass, all processes at a time."""
    names = list(LOSSES)[:1] if quick else list(LOSSES)
    with TemporaryDirectory() as folder:
        running = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, name],
                env={**os.environ, "TRITON_CACHE_DIR": f"{folder}/{i}"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for i, name in enumerate(names)
        ]
        outputs = [process.communicate()[0].split() for process in running]
    rows: list[Row] = []
    for name, words in zip(names, outputs, strict=True):
        row: Row = {"samples": SHAPE[0], "classes": SHAPE[1], "loss": name}
        if len(words) == 2:
            rows.append(row | {"seconds": float(words[0]), "seconds_again": float(words[1])})
        else:
            rows.append(row | {"failed": "the process ended without times"})
    return rows


def main(name: str) -> None:
    """Print both times of this loss."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.randn(SHAPE, device=device, requires_grad=True)
    target = torch.zeros(SHAPE[0], dtype=torch.long, device=device)
    (3 * logits).logsumexp(1).sum().backward()  # type: ignore[no-untyped-call]
    for _ in range(2):
        began = time.perf_counter()
        LOSSES[name](logits, target).backward()
        logits.grad = torch.zeros_like(logits)
        logits.grad.sum().item()
        print(digits(time.perf_counter() - began, 3), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
