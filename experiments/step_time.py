"""How long epochs take with each of several losses, interleaved in one process.

Only the training step is timed: network, loss, backward pass, optimiser. Images are random and on
the device, and nothing is validated.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from experiments.experiment import device
from topklass import models

Loss = Callable[[Tensor, Tensor], Tensor]

SLOW, PART = 5, 10
"""A loss whose step takes 5 times as long as the fastest is timed on one in 10 steps."""
HOW_TIMED = (
    "of random images on the device, without data loading or validation; losses are interleaved "
    f"in random order; those {SLOW} times as slow as the fastest are timed on one step in {PART}"
)
"""What is timed, in words."""
WARM = 3
"""Warm-up steps with each loss, which also compile."""


@dataclass(frozen=True)
class Setting:
    """What is trained, and how often it is timed."""

    model: str
    batch: int
    images: int
    """Of an epoch."""
    classes: int
    size: int = 32
    precision: str = "32-true"
    compile: bool = False
    rounds: int = 5
    """Epochs with each loss."""

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return self.images // self.batch


def epoch_seconds(
    setting: Setting, losses: Mapping[str, Loss], track: Callable[[range], Iterable[int]] = iter
) -> dict[str, list[float]]:
    """Seconds of an epoch with each loss, one for each round.

    Losses are interleaved, in another order each round, so that whatever slows the machine down for
    a while affects all of them. The device is idle when an epoch begins and when its time is taken.

    Args:
        setting: what is trained.
        losses: functions of logits and labels, by name.
        track: shows progress over the rounds.
    """
    step = training_step(setting)
    single = {}
    for name, loss in losses.items():
        if isinstance(loss, nn.Module):  # some have buffers
            loss.to(device())
        timed(step, loss, WARM)
        single[name] = timed(step, loss, 1)
    slow = {name for name, each in single.items() if each > SLOW * min(single.values())}
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    for _ in track(range(setting.rounds)):
        for name in order.sample(list(losses), len(losses)):
            steps = max(1, setting.steps // PART) if name in slow else setting.steps
            found = timed(step, losses[name], steps) / steps
            seconds[name].append(found * setting.steps)
    return seconds


def training_step(setting: Setting) -> Callable[[Loss], None]:
    """A step of SGD on random images, with any loss."""
    where = device()
    source = torch.Generator().manual_seed(0)
    shape = (setting.batch, 3, setting.size, setting.size)
    images = torch.randn(shape, generator=source).to(where, memory_format=torch.channels_last)
    labels = torch.randint(setting.classes, (setting.batch,), generator=source).to(where)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = models.build(setting.model, setting.classes, channels=3)
    network.to(where).to(memory_format=torch.channels_last).train()
    forward: Callable[[Tensor], Tensor] = network
    if setting.compile:  # as topklass train does
        torch.backends.cudnn.benchmark = True
        forward = torch.compile(network, mode="reduce-overhead")
    optimizer = _optimizer(network, where)
    half = setting.precision == "bf16-mixed"

    def step(loss: Loss) -> None:
        with torch.autocast(where.type, torch.bfloat16, enabled=half):
            value = loss(forward(images), labels)
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _optimizer(network: nn.Module, where: torch.device) -> torch.optim.Optimizer:
    """The learning rate is small, so that scores stay finite with random labels."""
    return torch.optim.SGD(
        network.parameters(),
        lr=1e-4,
        momentum=0.9,
        weight_decay=1e-4,
        nesterov=True,
        fused=where.type == "cuda",
    )


def timed(step: Callable[[Loss], None], loss: Loss, steps: int) -> float:
    """Seconds of some steps, from an idle device to an idle device."""
    synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step(loss)
    synchronize()
    return time.perf_counter() - began


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ratio(seconds: list[float], base: list[list[float]]) -> float:
    """Median over rounds of the time over the median of the base's times in that round.

    Example:
        >>> ratio([2.0, 4.0, 9.0], [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
        2.0
    """
    rounds = zip(seconds, zip(*base, strict=True), strict=True)
    return float(median(each / median(bases) for each, bases in rounds))
