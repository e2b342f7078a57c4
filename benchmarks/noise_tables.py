"""The tables of ``python -m benchmarks noise``."""

import math
import statistics
from typing import Any

from benchmarks.markdown import hardware, number, table
from benchmarks.noise import BASE, EPSILONS, LEARNING_RATES, SAMPLES, STEPS, K

Record = dict[str, Any]

LOSSES = [(epsilon, samples) for epsilon in EPSILONS for samples in SAMPLES]


def noise(record: Record) -> str:
    """Gradients and time first, then accuracy."""
    after = ", ".join(map(str, STEPS[:-1]))
    return (
        f"Gradient over noise, after {after} and {STEPS[-1]} steps with the exact loss: variance "
        "over the squared norm of the exact gradient; distance of the mean from the exact gradient "
        "in standard errors, about 1 without bias; the bias, relative to the exact gradient. "
        f"Time over that of samples = {BASE}, forward + backward ({hardware(record)}):\n\n"
        f"{gradients(record)}\n\n"
        f"Share of rows with a loss: {active(record)}. Variance falls as one over the batch size: "
        '"other data" is that of the exact gradient over samples of as many rows.\n\n'
        "Test accuracy in percent, mean ± standard deviation over "
        f"{len(record['accuracy'][0]['top_k'])} seeds; difference to the exact loss ± its standard "
        f"error, paired by seed:\n\n{accuracies(record)}"
    )


def gradients(record: Record) -> str:
    """A line a loss, and one for the chance that the data bring."""
    found = {(row["epsilon"], row["samples"], row["steps"]): row for row in record["gradient"]}
    times = {(row["epsilon"], row["samples"], row["scores"]): row for row in record["time"]}
    shapes = {row["scores"]: f"{row['rows']} × {row['classes']:,}" for row in record["time"]}
    rows: list[tuple[object, ...]] = []
    for epsilon, samples in LOSSES:
        at = [found[epsilon, samples, steps] for steps in STEPS]
        ratios = [number(times[epsilon, samples, scores]["ratio"]) for scores in shapes]
        if samples is None:
            rows.append((epsilon, "exact", 0, "–", 0, *ratios))
            rows.append((epsilon, "exact, other data", by_steps(at, "variance"), *4 * "–"))
        else:
            cells = (by_steps(at, key) for key in ("variance", "distance", "bias"))
            rows.append((epsilon, samples, *cells, *ratios))
    times_head = (f"time, {shape}" for shape in shapes.values())
    return table(("ε", "samples", "variance", "distance", "bias", *times_head), rows)


def active(record: Record) -> str:
    """Of rows whose loss is positive, by epsilon."""
    found: dict[float, list[Record]] = {epsilon: [] for epsilon in EPSILONS}
    for row in record["gradient"]:
        if row["samples"] is None:
            found[row["epsilon"]].append(row)
    return "; ".join(f"{by_steps(rows, 'active')} at ε = {e:g}" for e, rows in found.items())


def by_steps(rows: list[Record], key: str) -> str:
    return " / ".join(f"{row[key]:.2g}" for row in rows)


def accuracies(record: Record) -> str:
    """A line a loss, the learning rates side by side."""
    found = {
        (row["epsilon"], row["samples"], row["learning_rate"]): row for row in record["accuracy"]
    }
    rows = []
    for epsilon, samples in [*LOSSES, (None, None)]:
        cells = []
        for rate in LEARNING_RATES:
            row, exact = found[epsilon, samples, rate], found[epsilon, None, rate]
            cells += [mean_and_deviation(row["top_1"]), mean_and_deviation(row["top_k"])]
            cells.append("–" if samples is None else difference(row["top_k"], exact["top_k"]))
        name = "cross-entropy" if epsilon is None else samples or "exact"
        rows.append((epsilon or "–", name, *cells))
    titles = ("top-1", f"top-{K}", f"top-{K}, above exact")
    head = (f"{title}, rate {rate:g}" for rate in LEARNING_RATES for title in titles)
    return table(("ε", "samples", *head), rows)


def mean_and_deviation(shares: list[float]) -> str:
    return f"{100 * statistics.mean(shares):.1f} ± {100 * statistics.stdev(shares):.1f}"


def difference(shares: list[float], exact: list[float]) -> str:
    """Mean difference, seed by seed, and its standard error."""
    gained = [new - old for new, old in zip(shares, exact, strict=True)]
    error = statistics.stdev(gained) / math.sqrt(len(gained))
    return f"{100 * statistics.mean(gained):+.1f} ± {100 * error:.1f}"
