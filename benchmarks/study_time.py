"""Tables 3 and 4 of Berrada et al. (2018): time of forward and backward pass by number of classes.

Batch of 256 and k = 5, as there; the whole loss is timed, with every algorithm inside it.
"""

import statistics
import time
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.candidates import BASE
from benchmarks.methods import Rows, methods
from benchmarks.rows import digits, say
from benchmarks.timing import synchronize
from benchmarks.verify import relative_error, some_rows
from experiments.algorithms import log_esp_tree, smooth_topk_loss_with

K, SAMPLES, CLASSES = 5, 256, (100, 1_000, 10_000, 100_000)
RUNS, SECONDS = 50, 0.5
"""Most runs of a method, and the time after which no other is begun."""


def measure(device: torch.device, quick: bool) -> list[dict[str, Any]]:
    """One row a method and number of classes."""
    return [row for n in (CLASSES[:2] if quick else CLASSES) for row in measure_classes(n, device)]


def measure_classes(classes: int, device: torch.device) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    scores = (3 * torch.randn(SAMPLES, classes, device=device)).requires_grad_()
    labels = torch.randint(classes, (SAMPLES,), device=device)
    picked = some_rows(scores)
    wide = scores.detach()[picked].double().requires_grad_()
    exact = smooth_topk_loss_with(log_esp_tree, wide, labels[picked], K)
    (expected,) = torch.autograd.grad(exact.sum(), wide)
    rows = []
    losses = {m.name: m.loss(K, 1.0) for m in methods(device) if classes <= m.most_classes}
    for name, loss in {BASE: cross_entropy, **losses}.items():
        if loss is None:
            continue
        forward, backward, value, gradient = timed(loss, scores, labels)
        row: dict[str, Any] = {"classes": classes, "method": name}
        row |= {"forward_ms": digits(1e3 * forward), "backward_ms": digits(1e3 * backward)}
        if name != BASE:
            off = (value[picked] / exact - 1).abs().max().item()
            row["loss_error"] = digits(off, 2)
            row["gradient_error"] = digits(relative_error(gradient[picked], expected), 2)
        rows.append(row)
        say(row)
    return rows


def cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels, reduction="none")


def timed(loss: Rows, scores: Tensor, labels: Tensor) -> tuple[float, float, Tensor, Tensor]:
    """Median seconds forward and backward, after a warm-up; both results."""
    device = scores.device
    forward: list[float] = []
    backward: list[float] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the published code
        torch.autograd.grad(loss(scores, labels).sum(), scores)
        begin = time.perf_counter()
        while not forward or (len(forward) < RUNS and time.perf_counter() - begin < SECONDS):
            synchronize(device)
            start = time.perf_counter()
            value = loss(scores, labels)
            synchronize(device)
            middle = time.perf_counter()
            (gradient,) = torch.autograd.grad(value.sum(), scores)
            synchronize(device)
            forward.append(middle - start)
            backward.append(time.perf_counter() - middle)
    skip = len(forward) // 5  # the first ones warm up
    ahead, back = statistics.median(forward[skip:]), statistics.median(backward[skip:])
    return ahead, back, value.detach(), gradient
