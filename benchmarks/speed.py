"""Forward + backward time of the losses on the CPU, as ratios to F.cross_entropy in one run.

Every candidate is verified first: its gradient against the divide-and-conquer tree in float64.
Times are medians. They are taken in two ways, because they differ: *in turn* (each candidate once,
round after round: caches are cold, as after a network's own work) and *in a row* (the same
candidate many times: caches are warm, as in a micro-benchmark).
"""

import json
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.environment import RESULTS, describe
from topkit import SmoothTopKLoss
from topkit.algorithms import log_esp_tree, smooth_topk_loss_with

SHAPES = ((64, 100), (256, 1_000), (256, 10_000))
ROUNDS = {100: 400, 1_000: 200, 10_000: 40}
K = 5

Loss = Callable[[Tensor, Tensor], Tensor]


def main() -> None:
    rows = [row for shape in SHAPES for row in measure(*shape)]
    RESULTS.mkdir(exist_ok=True)
    record = {"what": f"forward + backward, k = {K}, 3·randn logits, float32", **describe()}
    path = RESULTS / "speed-cpu.json"
    path.write_text(json.dumps({**record, "rows": rows}, indent=1) + "\n")
    print(f"wrote {path.relative_to(RESULTS.parent.parent)}")


def measure(samples: int, classes: int) -> list[dict[str, Any]]:
    """Verify and time every candidate for one shape."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    logits = (3 * torch.randn(samples, classes)).requires_grad_()
    target = torch.randint(classes, (samples,))
    losses = candidates()
    error = {name: gradient_error(loss, logits, target) for name, loss in losses.items()}
    steps = {name: step(loss, logits, target) for name, loss in losses.items()}
    rounds = ROUNDS[classes]
    turns: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, run in steps.items():
            if len(turns[name]) < allowed_rounds(name, rounds):
                turns[name].append(seconds(run))
    in_a_row = {
        name: statistics.median(seconds(run) for _ in range(allowed_rounds(name, rounds)))
        for name, run in steps.items()
    }
    in_turn = {name: statistics.median(times) for name, times in turns.items()}
    base = "cross-entropy"
    rows = []
    for name in losses:
        row = {
            "samples": samples,
            "classes": classes,
            "loss": name,
            "milliseconds": round(1e3 * in_turn[name], 4),
            "ratio_in_turn": round(in_turn[name] / in_turn[base], 2),
            "ratio_in_a_row": round(in_a_row[name] / in_a_row[base], 2),
            "gradient_error": error[name],
        }
        rows.append(row)
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    return rows


def candidates() -> dict[str, Loss]:
    """What is compared, under the names of the table."""
    ours = SmoothTopKLoss(k=K)
    result: dict[str, Loss] = {
        "cross-entropy": F.cross_entropy,
        "topkit": ours,
        "topkit, compiled": torch.compile(ours, fullgraph=True),
    }
    try:
        from difftopk import SmoothTopKLoss as Published
    except ImportError:
        print("difftopk is not installed (pip install 'topkit[bench]'): published loss left out")
        return result
    cache: dict[int, Loss] = {}

    def published(logits: Tensor, target: Tensor) -> Tensor:
        classes = logits.shape[1]
        if classes not in cache:
            cache[classes] = Published(num_classes=classes, k=K, tau=1.0)
        return cache[classes](logits, target)

    return {**result, "published smooth loss": published}


def allowed_rounds(name: str, rounds: int) -> int:
    """The published loss is slow: a few rounds must do."""
    return max(5, rounds // 20) if name == "published smooth loss" else rounds


def gradient_error(loss: Loss, logits: Tensor, target: Tensor) -> float | None:
    """Largest relative error of a row's gradient, by the tree in float64; None for another loss."""
    if loss is F.cross_entropy:
        return None
    wide = logits.detach().double().requires_grad_()
    exact = smooth_topk_loss_with(log_esp_tree, wide[:16], target[:16], K).sum()
    (expected,) = torch.autograd.grad(exact, wide)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (gradient,) = torch.autograd.grad(loss(logits, target) * len(target), logits)
    off = (gradient[:16] - expected[:16]).norm(dim=1) / expected[:16].norm(dim=1)
    return float(f"{off.max().item():.1e}")


def step(loss: Loss, logits: Tensor, target: Tensor) -> Callable[[], None]:
    """One forward and backward pass."""

    def run() -> None:
        logits.grad = None
        loss(logits, target).backward()  # type: ignore[no-untyped-call]

    run()
    return run


def seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
