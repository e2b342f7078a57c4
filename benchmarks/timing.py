"""Wall-clock times, taken the same way for every candidate and in turn."""

import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.candidates import Loss
from topklass._targets import Target

Step = Callable[[], object]

ITERATIONS = 10
BATCH = 0.01
"""Seconds after which a batch of iterations ends early, whose time is one measurement."""
ROUNDS = (5, 25)
"""Fewest and most measurements of a candidate."""
SHARE = 0.15
"""Seconds for one candidate, if the fewest measurements take no longer."""

WAIT = 4_000_000
"""Clock cycles of the device, some 2 ms, in which the host launches a whole step."""


def forward_backward(loss: Loss, logits: Tensor, target: Target) -> Step:
    """A training step's share of the loss."""

    def run() -> None:
        logits.grad = None
        loss(logits, target).backward()  # type: ignore[no-untyped-call]

    return run


def forward(loss: Loss, logits: Tensor, target: Target) -> Step:
    """The loss alone, without gradient."""

    def run() -> None:
        with torch.no_grad():
            loss(logits, target)

    return run


def medians(steps: dict[str, Step], device: torch.device, shorter: int = 1) -> dict[str, float]:
    """Median seconds an iteration of each step, measured in turn, round after round.

    The order changes from round to round: who comes after a step that is hard on the caches would
    pay for it. One measurement is the wall time of a few iterations until the device is done: what
    counts is the slower of launching and computing, as in training. Slow steps get fewer.
    """
    iterations, rounds = {}, {}
    for name, step in steps.items():
        step(), step()
        once = seconds(step, device)
        iterations[name] = max(1, min(ITERATIONS, round(BATCH / once)))
        affordable = round(SHARE / (iterations[name] * once))
        rounds[name] = max(ROUNDS[0], min(ROUNDS[1], affordable) // shorter)
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for turn in range(max(rounds.values())):
        for name in order.sample(list(steps), len(steps)):
            if turn < rounds[name]:
                times[name].append(seconds(steps[name], device, iterations[name]))
    return {name: statistics.median(measured) for name, measured in times.items()}


def seconds(step: Step, device: torch.device, iterations: int = 1) -> float:
    """Wall time of one iteration, from an idle device to an idle device."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(iterations):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / iterations


def device_seconds(step: Step, rounds: int = 9) -> float:
    """Median time of the device alone, all of the step's launches waiting before it begins."""
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(WAIT)
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
