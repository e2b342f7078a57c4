"""A last layer and its loss, in one and one after the other: time, memory, verified error."""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.environment import describe, place, write
from benchmarks.linear_candidates import (
    BY_ROWS,
    CHUNKS,
    OURS,
    PLAIN,
    Candidate,
    candidates,
    smooth,
)
from benchmarks.linear_model import ceilings
from benchmarks.memory import peak_on_cpu, peak_on_gpu
from benchmarks.others import Others
from benchmarks.rows import Row, digits, say
from benchmarks.timing import Step, medians
from benchmarks.verify import WrongResult
from topklass._checks import Options
from topklass.functional import linear_predict_topk
from topklass.functional._chunks import Problem as Call
from topklass.functional._chunks import add_product, chunk_rows, default_bytes
from topklass.functional.smooth import SmoothHinge


class Case(NamedTuple):
    """A batch of features, and a layer."""

    rows: int
    features: int
    classes: int


CASES = (
    Case(8_192, 4_096, 128_256),
    Case(8_192, 512, 1_000_000),
    Case(1_024, 256, 1_000_000),
    Case(1_024, 256, 10_000_000),
)
SMOKE = (Case(96, 16, 1_000), Case(32, 8, 3_000))
ROOMS = (2**28, 2**29, 2**30, 7 * 2**28, 2**31)
"""Memory of a chunk, from little to much."""
SMALL = Case(256, 256, 4_096)
"""The largest problem that is verified as a whole."""
SUMS = Case(4_096, 256, 4_096)
CHUNKS_OF_SUMS = (1, 4, 16, 64, 256)
K = 5
ERROR = 0.02
"""Largest relative error of a gradient in bfloat16."""


def main(device: torch.device, smoke: bool) -> None:
    """Each part is written when it is measured; what fails is recorded, and the rest goes on."""
    others, began = Others(), time.perf_counter()
    speeds = ceilings(device, smoke)
    parts: dict[str, list[Row]] = {
        name: [] for name in ("rows", "rooms", "predictions", "sums", "failed")
    }

    def add(part: str, case: Case, measured: Callable[[], list[Row]]) -> None:
        try:
            found = measured()
        except Exception as error:
            found = [{**case._asdict(), "loss": part, "failed": failure(error)}]
        parts[part] += [row for row in found if "failed" not in row]
        parts["failed"] += [row for row in found if "failed" in row]
        for row in found:
            say(row)
        record = {
            "what": "bfloat16, forward + backward of a layer and its loss; memory beyond inputs "
            "and gradients",
            **describe(device),
            "cores_used_by_others": others.cores(),
            "seconds": round(time.perf_counter() - began),
            "ceilings": speeds,
            **parts,
        }
        write(f"linear-{place(device)}", record, smoke)

    for case in SMOKE if smoke else CASES:
        problem = new_problem(case, device)
        add("rows", case, partial(compare, case, problem, smoke))
        add("rooms", case, partial(compare_rooms, case, problem, smoke))
        add("predictions", case, partial(predict, case, problem, smoke))
        del problem
    case = SMOKE[0] if smoke else SUMS
    add("sums", case, partial(accumulate, case, device))


def failure(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


class Problem(NamedTuple):
    """Leaves that are differentiated, and labels."""

    input: Tensor
    weight: Tensor
    target: Tensor

    def forget(self) -> None:
        """Leave no gradients."""
        self.input.grad = self.weight.grad = None

    def leaves(self) -> tuple[Tensor, Tensor]:
        """What is differentiated."""
        return self.input, self.weight


def new_problem(case: Case, device: torch.device) -> Problem:
    """Logits of standard deviation 3."""
    torch.manual_seed(0)
    half = {"device": device, "dtype": torch.bfloat16}
    input = torch.randn(case.rows, case.features, **half)
    weight = torch.randn(case.classes, case.features, **half).mul_(3 / case.features**0.5)
    target = torch.randint(case.classes, (case.rows,), device=device)
    return Problem(input.requires_grad_(), weight.requires_grad_(), target)


def training_step(candidate: Candidate, problem: Problem) -> Step:
    def step() -> None:
        problem.forget()
        candidate.loss(*problem).backward()  # type: ignore[no-untyped-call]

    return step


# Nothing is timed that is not right


def verify_small(case: Case, device: torch.device, name: str) -> None:
    """All gradients of a small problem of so many features, in several chunks."""
    few = Case(*map(min, case, SMALL))
    problem, candidate = new_problem(few, device), by_name(name, few.classes * few.rows)
    value = candidate.loss(*problem)
    gradients = torch.autograd.grad(value, problem.leaves())
    wide = [leaf.detach().double().requires_grad_() for leaf in problem.leaves()]
    exact = candidate.exact(F.linear(*wide), problem.target).mean()
    require(candidate, relative(value.detach(), exact.detach()), "value")
    for given, wanted in zip(gradients, torch.autograd.grad(exact, wide), strict=True):
        require(candidate, relative(given, wanted), "gradient")


def verify_rows(candidate: Candidate, problem: Problem) -> float:
    """Error of the input's gradient, of some rows of the problem that is timed."""
    some = torch.linspace(0, len(problem.input) - 1, 4, device=problem.input.device).long()
    problem.forget()
    candidate.loss(*problem).backward()  # type: ignore[no-untyped-call]
    assert problem.input.grad is not None
    given = problem.input.grad[some]
    problem.forget()
    with torch.no_grad():
        parts = problem.weight.split(2**20)  # type: ignore[no-untyped-call]
        features = problem.input[some].double()
        logits = torch.cat([features @ part.double().t() for part in parts], 1).requires_grad_()
    losses = candidate.exact(logits, problem.target[some]).sum() / len(problem.input)
    (slopes,) = torch.autograd.grad(losses, logits)
    of_parts = slopes.split(2**20, 1)
    with torch.no_grad():
        wanted = sum(s @ part.double() for s, part in zip(of_parts, parts, strict=True))
    return require(candidate, relative(given, wanted), "gradient of some rows")


def relative(given: Tensor, wanted: Tensor) -> float:
    return float((given.double() - wanted).norm() / wanted.norm())


def require(candidate: Candidate, error: float, what: str) -> float:
    if not error <= ERROR:
        raise WrongResult(f"{candidate.name}: {what} off by {error:.1e}")
    return digits(error, 2)


# Measurements


def compare(case: Case, problem: Problem, smoke: bool) -> list[Row]:
    """All candidates that are right and fit into memory, in turn."""
    errors, steps = {}, {}
    failed: list[Row] = []
    for candidate in candidates():
        try:
            verify_small(case, problem.input.device, candidate.name)
            errors[candidate.name] = verify_rows(candidate, problem)
        except Exception as error:
            failed.append({**case._asdict(), "loss": candidate.name, "failed": failure(error)})
            problem.forget()
            torch.cuda.empty_cache()
            continue
        steps[candidate.name] = training_step(candidate, problem)
    rows = measure(case, problem, steps, smoke)
    times = {row["loss"]: row["milliseconds"] for row in rows}
    for row in rows:
        row["error"] = errors[row["loss"]]
        for name, base in (("over_plain", PLAIN), ("over_chunks", CHUNKS)):
            row[name] = digits(row["milliseconds"] / times[base], 4) if base in times else None
        if row["loss"] == BY_ROWS:
            row["chunks"] = chunks_of_rows(problem)
    return rows + failed


def chunks_of_rows(problem: Problem) -> int:
    """How many there are by default."""
    input, weight, target = (tensor.detach() for tensor in problem)
    loss, labels = SmoothHinge(K, 1.0, 1.0), target.unsqueeze(1)
    call = Call(loss, labels, Options(), None, 1.0, input.dtype, default_bytes(weight))
    return -(-len(input) // chunk_rows(input, weight, call))


def compare_rooms(case: Case, problem: Problem, smoke: bool) -> list[Row]:
    """Ours by the memory of a chunk."""
    steps = {
        str(room): training_step(by_name(OURS, room), problem)
        for room in ((2**16, 2**18) if smoke else ROOMS)
    }
    rows = measure(case, problem, steps, smoke)
    return [row | {"loss": OURS, "chunk_bytes": int(row["loss"])} for row in rows]


def predict(case: Case, problem: Problem, smoke: bool) -> list[Row]:
    """The k best classes in chunks, and of all logits."""
    input, weight = (leaf.detach() for leaf in problem.leaves())
    steps: dict[str, Step] = {"chunks": lambda: linear_predict_topk(input, weight, K)}
    try:
        whole = F.linear(input, weight).topk(K).values
        if not torch.equal(linear_predict_topk(input, weight, K).scores, whole):
            print("prediction: products of other shapes are rounded otherwise")
        steps["layer, then topk"] = lambda: F.linear(input, weight).topk(K)
    except torch.OutOfMemoryError:
        print("layer, then topk: does not fit")
    problem.forget()
    return measure(case, problem, steps, smoke, gradients=False)


def measure(
    case: Case, problem: Problem, steps: dict[str, Step], smoke: bool, gradients: bool = True
) -> list[Row]:
    """Median wall time, and peak memory beyond what was there and the gradients."""
    device = problem.input.device
    times = medians(steps, device, shorter=8 if smoke else 1)
    rows: list[Row] = []
    for name, step in steps.items():
        problem.forget()
        peak: Callable[[Step], int] = peak_on_gpu if device.type == "cuda" else peak_on_cpu
        room = sum(leaf.nbytes for leaf in problem.leaves()) if gradients else 0
        rows.append(
            {
                **case._asdict(),
                "loss": name,
                "milliseconds": digits(1e3 * times[name], 4),
                "mebibytes": digits((peak(step) - room) / 2**20, 4),
            }
        )
    problem.forget()
    return rows


def by_name(name: str, chunk_bytes: int | None = None) -> Candidate:
    return next(each for each in candidates(chunk_bytes) if each.name == name)


def accumulate(case: Case, device: torch.device) -> list[Row]:
    """Errors of a weight's gradient, added up in float32 or rounded for each chunk."""
    problem = new_problem(case, device)
    wide = [leaf.detach().double().requires_grad_() for leaf in problem.leaves()]
    exact = smooth(F.linear(*wide), problem.target).mean()
    (wanted,) = torch.autograd.grad(exact, wide[1])
    with torch.no_grad():
        logits = F.linear(*problem.leaves())
    logits.requires_grad_()
    (slopes,) = torch.autograd.grad(smooth(logits, problem.target).mean(), logits)
    input = problem.input.detach()
    best = slopes.double().t() @ input.double()
    rows = []
    for chunks in CHUNKS_OF_SUMS:
        step = -(-case.rows // chunks)
        row: Row = {**case._asdict(), "chunks": chunks, "inevitable": relative(best, wanted)}
        for name, dtype in (("float32", torch.float32), ("rounded", torch.bfloat16)):
            total = torch.empty_like(problem.weight, dtype=dtype, requires_grad=False)
            for start in range(0, case.rows, step):
                some = slice(start, start + step)
                add_product(total, slopes[some].t(), input[some], first=start == 0)
            row[name] = digits(relative(total.bfloat16(), wanted), 3)
        row["inevitable"] = digits(row["inevitable"], 3)
        rows.append(row)
    return rows
