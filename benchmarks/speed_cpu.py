"""Forward + backward time of the losses on the CPU, as ratios to F.cross_entropy in one run.

Times are medians. They are taken in two ways, because they differ: *in turn* (each candidate once,
round after round: caches are cold, as after a network's own work) and *in a row* (the same
candidate many times: caches are warm, as in a micro-benchmark).
"""

import statistics
from typing import Any

import torch

from benchmarks.candidates import BASE, K, on_cpu
from benchmarks.environment import describe, write
from benchmarks.memory import peak
from benchmarks.others import Others
from benchmarks.rows import say
from benchmarks.timing import forward_backward, seconds
from benchmarks.verify import verify

CPU = torch.device("cpu")
SHAPES = ((64, 100), (256, 1_000), (256, 10_000))
ROUNDS = {100: 400, 1_000: 200, 10_000: 40}


def main(quick: bool) -> None:
    others = Others()
    shapes = SHAPES[:1] if quick else SHAPES
    rows = [row for shape in shapes for row in measure(*shape)]
    what = f"forward + backward, k = {K}, 3·randn logits, float32"
    record = {"what": what, **describe(CPU), "cores_used_by_others": others.cores(), "rows": rows}
    write("speed-cpu", record, quick)


def measure(samples: int, classes: int) -> list[dict[str, Any]]:
    """Verify and time every candidate for one shape."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    logits = (3 * torch.randn(samples, classes)).requires_grad_()
    target = torch.randint(classes, (samples,))
    errors, steps, rounds = {}, {}, {}
    for candidate in on_cpu():
        name = candidate.name
        errors[name] = verify(candidate, logits, target)
        steps[name] = forward_backward(candidate.loss, logits, target)
        steps[name]()
        rounds[name] = ROUNDS[classes] // 20 if candidate.published else ROUNDS[classes]
    turns: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(ROUNDS[classes]):
        for name, step in steps.items():
            if turn < max(5, rounds[name]):
                turns[name].append(seconds(step, CPU))
    in_a_row = {
        name: statistics.median(seconds(step, CPU) for _ in range(max(5, rounds[name])))
        for name, step in steps.items()
    }
    in_turn = {name: statistics.median(times) for name, times in turns.items()}
    rows = []
    for name, step in steps.items():
        row = {
            "samples": samples,
            "classes": classes,
            "loss": name,
            "milliseconds": round(1e3 * in_turn[name], 4),
            "ratio_in_turn": round(in_turn[name] / in_turn[BASE], 2),
            "ratio_in_a_row": round(in_a_row[name] / in_a_row[BASE], 2),
            "memory": peak(step, logits),
            **errors[name],
        }
        rows.append(row)
        say(row)
    return rows
