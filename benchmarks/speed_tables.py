"""The tables of ``python -m benchmarks speed``."""

from typing import Any

from benchmarks.candidates import BASE, EPSILON, FEW, OURS, SMOOTHED, SMOOTHING, WIDE
from benchmarks.markdown import hardware, number, shape, table
from benchmarks.speed_gpu import ALONE

Record = dict[str, Any]

COLUMNS = {
    f"{BASE}, compiled": "compiled",
    OURS: "smooth, k = 5",
    "topklass, k = 10": "k = 10",
    "topklass, k = 20": "k = 20",
    "topklass, k = 32": "k = 32",
    "topklass, k = 50": "k = 50",
    "topklass, noised": f"noised, ε = {EPSILON}",
    "topklass, noised, wide": f"noised, ε = {WIDE:g}",
    "topklass, noised exact": f"noised exact, ε = {EPSILON}",
    "topklass, noised exact, wide": f"noised exact, ε = {WIDE:g}",
    f"{OURS}, reference": "smooth, k = 5, reference",
    "topklass, noised, reference": "noised, reference",
    "published smooth loss": "published smooth",
    "published noised loss": "published noised",
}
"""Losses, as the wide table calls them."""
SHORT = ("256 × 100", "4,096 × 1,000", "256 × 100,000", "65,536 × 1,000", "8,192 × 32,000")
"""Shapes of the small table."""


def cpu(record: Record) -> str:
    """One line a shape and loss."""
    rows = [
        (
            shape(row),
            row["loss"],
            row["ratio_in_turn"],
            row["ratio_in_a_row"],
            number(row.get("memory")),
            error(row),
        )
        for row in record["rows"]
        if row["loss"] != BASE
    ]
    return (
        f"Time over that of `F.cross_entropy` in the same run ({record['what']}; "
        f"{hardware(record)}), each loss in turn / in a row; memory beyond the logits in tensors "
        "of their size:\n\n"
        + table(
            ("N × C", "loss", "time ratio, in turn", "in a row", "memory", "gradient error"), rows
        )
    )


def short(record: Record) -> str:
    """What the default costs: milliseconds of some shapes, beside cross-entropy."""
    losses = {BASE: BASE, OURS: "`SmoothTopKLoss(k=5)`", "published smooth loss": "published code"}
    found = by_shape(record["rows"])
    rows = []
    for name in SHORT:
        there = found.get(name, {})
        times = [there.get((loss, "3·randn"), {}).get("milliseconds") for loss in losses]
        rows.append((name, *map(number, times)))
    return table(("N × C", *losses.values()), rows) + (
        f"\n\nForward + backward in ms, eager, float32; –: not timed ({hardware(record)})."
    )


def gpu(record: Record) -> str:
    """One line a shape, one column a loss: ratios for random and, in brackets, zero logits."""
    found = by_shape(record["rows"])
    rows = []
    for name, losses in found.items():
        cells = [number(losses[BASE, "3·randn"]["milliseconds"])]
        for loss in timed(record):
            ratios = [losses.get((loss, kind), {}).get("ratio") for kind in ("3·randn", "zeros")]
            text = number(ratios[0])
            cells.append(text if ratios[1] is None else f"{text} ({number(ratios[1])})")
        rows.append((name, *cells))
    bound = record["over_bound"]
    copies = record["copy_bytes_per_second"] / 1e12
    return (
        "Forward + backward: milliseconds of eager `F.cross_entropy`, and ratios to it in the same "
        f"run, for 3·randn (and all-zero) float32 logits ({hardware(record)}):\n\n"
        + table(("N × C", "cross-entropy, ms", *timed(record).values()), rows)
        + f"\n\nAt 8,192 × 32,000, k = 5 takes {number(bound)} times as long as reading the logits "
        f"twice and writing the gradient once at the {copies:.2f} TB/s of a copy. {errors(record)}"
    )


def device(record: Record) -> str:
    """Time of the device alone, as if the host took none."""
    names = [name for name in timed(record) if name in ALONE]
    rows = []
    for name, losses in by_shape(record["rows"]).items():
        base = losses[BASE, "3·randn"]
        cells = [number(base["milliseconds"]), number(base["milliseconds_of_device"])]
        for loss in names:
            taken = losses.get((loss, "3·randn"), {}).get("milliseconds_of_device")
            ratio = taken and float(f"{taken / base['milliseconds_of_device']:.3g}")
            cells.append(number(ratio))
        rows.append((name, *cells))
    head = ("N × C", "cross-entropy, ms", "on the device, ms", *(COLUMNS[name] for name in names))
    return (
        "The device alone, with all launches waiting in its queue before it begins: milliseconds "
        f"of `F.cross_entropy`, and ratios to these ({hardware(record)}):\n\n" + table(head, rows)
    )


def errors(record: Record) -> str:
    """How wrong the losses are at most, in a sentence."""
    worst: dict[str, float] = {}
    noised = 0.0
    for row in record["rows"]:
        if "gradient_error" in row:
            name = row["loss"].split(",")[0]
            worst[name] = max(worst.get(name, 0.0), row["gradient_error"])
        elif row["loss"].startswith("topklass"):
            noised = max(noised, row["standard_errors"])
    listed = ", ".join(f"{value:.0e} for {name}" for name, value in worst.items())
    return (
        f"Largest gradient error of a row against float64: {listed}. Averages of the noised loss "
        f"lie within {noised} standard errors of the exact expectation."
    )


def memory(record: Record) -> str:
    """Peak memory of forward + backward, and of the loss alone."""
    found = by_shape(record["rows"])
    names = (BASE, *timed(record))
    rows = []
    for name in names:
        cells = []
        for losses in found.values():
            row = losses.get((name, "3·randn"))
            both = row and (row["memory"], row["memory_of_loss_alone"])
            cells.append(" / ".join(number(each) for each in both) if both else "–")
        rows.append((name, *cells))
    return (
        "Peak memory beyond the logits, in tensors of their size: forward + backward / loss alone "
        f"without gradient ({hardware(record)}):\n\n" + table(("loss", *found), rows)
    )


def growth(record: Record) -> str:
    """Time by the number of classes."""
    rows = [
        (
            f"{row['classes']:,}",
            number(row["milliseconds_of_base"]),
            number(row["milliseconds"]),
            number(row["milliseconds_of_base_on_device"]),
            number(row["milliseconds_of_device"]),
            number(row["nanoseconds_per_logit"]),
        )
        for row in record["growth"]
    ]
    head = (
        "classes",
        "cross-entropy, ms",
        "topklass, k = 5, ms",
        "cross-entropy, device alone",
        "topklass, device alone",
        "ns a logit",
    )
    samples = record["growth"][0]["samples"]
    return f"Forward + backward of {samples} rows ({hardware(record)}):\n\n" + table(head, rows)


def dtypes(record: Record) -> str:
    """Single and half precision."""
    rows = [
        (
            shape(row),
            row["dtype"],
            number(row["milliseconds"]),
            number(row["ratio"]),
            number(row["memory"]),
            error(row),
        )
        for row in record["dtypes"]
        if row["loss"] == OURS
    ]
    head = ("N × C", "logits", "topklass, k = 5, ms", "ratio", "memory", "gradient error")
    return (
        "Forward + backward, ratio to eager `F.cross_entropy` of the same precision; the error "
        f"includes the rounding of the gradient ({hardware(record)}):\n\n" + table(head, rows)
    )


def smoothing(record: Record) -> str:
    """One line a shape: each loss with label smoothing over itself without it, and over the base.

    Base is cross-entropy with label smoothing.
    """
    names = dict.fromkeys(row["loss"].removesuffix(SMOOTHED) for row in record["smoothing"])
    rows = []
    for name, losses in by_shape(record["smoothing"]).items():
        times = {loss: row["milliseconds"] for (loss, _), row in losses.items()}
        base = times.get(BASE + SMOOTHED)
        cells = [number(base)]
        for loss in names:
            ours, plain = times.get(loss + SMOOTHED), times.get(loss)
            cells.append(f"{over(ours, plain)} ({over(ours, base)})")
        rows.append((name, *cells))
    head = ("N × C", "cross-entropy, ms", *names)
    return (
        f"Label smoothing of {SMOOTHING}, forward + backward: milliseconds of `F.cross_entropy` "
        "with it; then each loss over the same loss without it (and over cross-entropy with it; "
        f"{hardware(record)}):\n\n" + table(head, rows)
    )


def few(record: Record) -> str:
    """One line a shape: targets of a few classes over class indices."""
    rows = []
    for name, losses in by_shape(record["few"]).items():
        times = {loss: row["milliseconds"] for (loss, _), row in losses.items()}
        ratios = (over(times.get(f"{OURS}, {m} classes"), times.get(OURS)) for m in FEW)
        rows.append((name, number(times.get(OURS)), *ratios))
    head = ("N × C", "class indices, ms", *(f"{m} classes" for m in FEW))
    return (
        "`SmoothTopKLoss(k=5)` of a `SparseTarget`, forward + backward, over that of class indices "
        f"({hardware(record)}):\n\n" + table(head, rows)
    )


def training(record: Record) -> str:
    """One line a loss: a training step over that with cross-entropy."""
    rows = [
        (row["loss"], number(row["milliseconds"]), f"{100 * (row['ratio'] - 1):+.2f} %")
        for row in record["training"]
    ]
    first = record["training"][0]
    return (
        f"A training step of {first['model']}, 32 × 32 images, batch {first['batch']}, eager "
        "(with label smoothing beside cross-entropy with it; "
        f"{hardware(record)}):\n\n" + table(("loss", "ms", "longer than cross-entropy"), rows)
    )


def first_calls(record: Record) -> str:
    """One line a loss: a call that compiles the kernels, and the next one."""
    rows = [
        (row["loss"], number(row["seconds"]), number(1e3 * row["seconds_again"]))
        for row in record["first_calls"]
    ]
    return (
        f"{shape(record['first_calls'][0])} logits, forward + backward, an empty cache "
        f"({hardware(record)}):\n\n" + table(("loss", "first call, s", "second call, ms"), rows)
    )


def over(time: float | None, base: float | None) -> str:
    return "–" if time is None or base is None else number(time / base)


def timed(record: Record) -> dict[str, str]:
    """Losses of a record besides cross-entropy, and what tables call them."""
    there = {row["loss"] for row in record["rows"]}
    return {name: title for name, title in COLUMNS.items() if name in there}


def by_shape(rows: list[Record]) -> dict[str, dict[tuple[str, str], Record]]:
    """Rows by their shape, then by loss and kind of logits."""
    found: dict[str, dict[tuple[str, str], Record]] = {}
    for row in rows:
        found.setdefault(shape(row), {})[row["loss"], row["logits"]] = row
    return found


def error(row: Record) -> str:
    if row.get("gradient_error") is None:
        return "–"
    return f"{row['gradient_error']:.0e}"
