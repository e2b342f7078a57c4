"""The losses on the GPU beside F.cross_entropy: time, memory, error, growth and half precision.

A record is written after each part, so that a run that is cut off loses nothing. What fails is
recorded as failed, and the rest goes on.
"""

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from benchmarks.candidates import (
    BASE,
    OURS,
    Candidate,
    on_gpu,
    with_few_classes,
    with_smoothing,
)
from benchmarks.environment import describe, place, write
from benchmarks.first_calls import first_calls
from benchmarks.memory import peak
from benchmarks.others import Others
from benchmarks.rows import Row, digits
from benchmarks.timing import Step, device_seconds, forward, forward_backward, medians
from benchmarks.training_steps import training_steps
from benchmarks.verify import verify

SHAPES = (
    (256, 100),
    (256, 1_000),
    (4_096, 1_000),
    (256, 10_000),
    (256, 100_000),
    (8_192, 32_000),
    (65_536, 1_000),
    (64, 1_000_000),
)
QUICK_SHAPES = ((256, 100), (256, 1_000))
GROWTH = (64, (1_000, 3_162, 10_000, 31_623, 100_000, 316_228, 1_000_000))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPE_SHAPES = ((4_096, 1_000), (8_192, 32_000))
FEW_SHAPES = DTYPE_SHAPES
BOUND_SHAPE = (8_192, 32_000)
BOUND_BYTES = 12
"""The logits are read twice and the gradient is written once, in float32."""

ALONE = (
    BASE,
    OURS,
    *(f"topklass, k = {k}" for k in (10, 20, 32, 50)),
    *(f"topklass, noised{kind}" for kind in ("", " exact", ", wide", " exact, wide")),
)
"""Timed on the device alone, too, and on logits that are all 0."""


def main(device: torch.device, quick: bool) -> None:
    start, others = time.perf_counter(), Others()
    parts: dict[str, list[Row]] = {
        name: []
        for name in (
            "rows",
            "few",
            "smoothing",
            "training",
            "growth",
            "dtypes",
            "first_calls",
            "failed",
        )
    }
    bandwidth = copy_bandwidth(device, 2**24 if quick else 2**28)

    def report(what: str) -> None:
        print(f"{time.perf_counter() - start:6.1f} s  {what}", flush=True)

    def add(part: str, title: str, measured: Callable[[], list[Row]]) -> None:
        """Measure something, and keep it with all that was measured before."""
        try:
            found = measured()
        except Exception as error:
            found = [{"what": title, "failed": f"{type(error).__name__}: {error}"[:500]}]
        parts[part] += [row for row in found if "failed" not in row]
        parts["failed"] += [row for row in found if "failed" in row]
        report(f"{part}, {title}: " + summary(found))
        record = {
            "what": "3·randn or zero logits, float32, forward + backward through the public "
            "modules",
            **describe(device),
            "cores_used_by_others": others.cores(),
            "copy_bytes_per_second": bandwidth,
            "over_bound": over_bound(parts["rows"], bandwidth),
            "seconds": round(time.perf_counter() - start),
            **parts,
        }
        write(f"speed-{place(device)}", record, quick)

    report(f"copies at {bandwidth / 1e12:.2f} TB/s")
    for shape in QUICK_SHAPES if quick else SHAPES:
        title = "{:,} × {:,}".format(*shape)
        add("rows", title, lambda shape=shape: measure(*shape, device, quick))
        add("smoothing", title, lambda shape=shape: targets(with_smoothing(), *shape, device))
        if quick or shape in FEW_SHAPES:
            add("few", title, lambda shape=shape: targets(with_few_classes(), *shape, device))
    add("training", "ResNet-18", lambda: training_steps(quick))
    samples, classes = GROWTH
    for n in classes[:3] if quick else classes:
        add("growth", f"{samples} × {n:,}", lambda n=n: [grow(samples, n, device)])
    for shape in QUICK_SHAPES[1:] if quick else DTYPE_SHAPES:
        title = "{:,} × {:,}".format(*shape)
        add("dtypes", title, lambda shape=shape: measure_dtypes(*shape, device))
    add("first_calls", "compilation", lambda: first_calls(quick))


def measure(samples: int, classes: int, device: torch.device, quick: bool = False) -> list[Row]:
    """All candidates on random logits; cross-entropy and ours by default also on zero logits."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    target = torch.randint(classes, (samples,), device=device)
    logits = (3 * torch.randn(samples, classes, device=device)).requires_grad_()
    chosen = [c for c in on_gpu() if samples * classes <= c.most_logits]
    rows = compare(chosen, logits, target, "3·randn", in_full=True, shorter=8 if quick else 1)
    logits = torch.zeros(samples, classes, device=device, requires_grad=True)
    chosen = [c for c in chosen if c.name in ALONE]
    return rows + compare(chosen, logits, target, "zeros", shorter=8 if quick else 1)


def targets(
    candidates: list[Candidate], samples: int, classes: int, device: torch.device
) -> list[Row]:
    """Losses of other targets than class indices, beside those of class indices."""
    torch.manual_seed(0)
    target = torch.randint(classes, (samples,), device=device)
    logits = (3 * torch.randn(samples, classes, device=device)).requires_grad_()
    return compare(candidates, logits, target, "3·randn")


def compare(
    chosen: list[Candidate],
    logits: Tensor,
    target: Tensor,
    kind: str,
    in_full: bool = False,
    shorter: int = 1,
) -> list[Row]:
    """Verify, then time in turn; in full: also the loss alone, and memory."""
    samples, classes = logits.shape
    steps: dict[str, Step] = {}
    alone: dict[str, Step] = {}
    rows: dict[str, Row] = {}
    for each in chosen:
        given = each.target(target, classes)
        dtype = str(logits.dtype).removeprefix("torch.")
        row: Row = {"samples": samples, "classes": classes, "logits": kind, "dtype": dtype}
        rows[each.name] = row | {"loss": each.name}
        try:
            rows[each.name] |= verify(each, logits, given)
        except Exception as error:
            rows[each.name]["failed"] = f"{type(error).__name__}: {error}"[:500]
            continue
        steps[each.name] = forward_backward(each.loss, logits, given)
        alone[each.name] = forward(each.loss, logits, given)
    both = medians(steps, logits.device, shorter)
    of_loss = medians(alone, logits.device, shorter) if in_full else {}
    for name, step in steps.items():
        row = rows[name]
        row["milliseconds"] = digits(1e3 * both[name], 4)
        row["ratio"] = digits(both[name] / both[BASE], 4)
        if logits.is_cuda and name in ALONE:
            row["milliseconds_of_device"] = digits(1e3 * device_seconds(step), 4)
        if in_full:
            row["milliseconds_of_loss_alone"] = digits(1e3 * of_loss[name], 4)
            row["memory"] = peak(step, logits)
            row["memory_of_loss_alone"] = peak(alone[name], logits)
    return list(rows.values())


def grow(samples: int, classes: int, device: torch.device) -> Row:
    """Time by the number of classes, cross-entropy beside it."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(samples, classes, device=device)).requires_grad_()
    target = torch.randint(classes, (samples,), device=device)
    base, ours = compare(pair(), logits, target, "3·randn")
    if "failed" in ours or not logits.is_cuda:
        return ours
    each = 1e6 * ours["milliseconds_of_device"] / (samples * classes)
    return ours | {
        "milliseconds_of_base": base["milliseconds"],
        "milliseconds_of_base_on_device": base["milliseconds_of_device"],
        "nanoseconds_per_logit": digits(each, 4),
    }


def measure_dtypes(samples: int, classes: int, device: torch.device) -> list[Row]:
    """Single and half precision, cross-entropy in the same precision beside it."""
    torch.manual_seed(0)
    target = torch.randint(classes, (samples,), device=device)
    wide = 3 * torch.randn(samples, classes, device=device)
    rows = []
    for dtype in DTYPES:
        logits = wide.to(dtype, copy=True).requires_grad_()
        rows += compare(pair(), logits, target, "3·randn", in_full=True)
    return rows


def pair() -> list[Candidate]:
    return [c for c in on_gpu() if c.name in (BASE, OURS)]


def copy_bandwidth(device: torch.device, numbers: int) -> float:
    """Bytes a second, read and written, of a copy of a GiB on the device."""
    source = torch.ones(numbers, device=device)
    target = torch.empty_like(source)
    once = medians({"copy": lambda: target.copy_(source)}, device)["copy"]
    return 2 * source.nbytes / once


def over_bound(rows: list[Row], bandwidth: float) -> float | None:
    """Our time over that of reading the logits twice and writing the gradient once."""
    samples, classes = BOUND_SHAPE
    found = row_of(rows, BOUND_SHAPE, OURS)
    bound = BOUND_BYTES * samples * classes / bandwidth
    return digits(found["milliseconds"] / 1e3 / bound, 4) if found else None


def row_of(rows: list[Row], shape: tuple[int, int], name: str, kind: str = "3·randn") -> Row | None:
    wanted = (*shape, name, kind)
    keys = ("samples", "classes", "loss", "logits")
    return next((row for row in rows if tuple(row[key] for key in keys) == wanted), None)


def summary(rows: Iterable[Row]) -> str:
    """Ratios and failures, in a line."""
    keys = ("loss", "logits", "ratio", "seconds", "failed")
    return ", ".join(" ".join(str(row[key]) for key in keys if key in row) for row in rows)
