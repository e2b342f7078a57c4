"""Time of an epoch by K: Garcin et al. (2022), Figure 3; "10 % longer", Berrada et al. (2018)."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median

import torch.nn.functional as F
from rich.table import Column, Table

from experiments import peers
from experiments.experiment import (
    Experiment,
    Record,
    Request,
    another_protocol,
    changes,
    check_rows,
    load_same,
    new_record,
    record_path,
    save_record,
)
from experiments.step_time import HOW_TIMED, Loss, Setting, epoch_seconds, ratio
from experiments.study_losses import PublishedTopKLoss
from topklass import functional

SETTINGS = {
    "paper": Setting("densenet40-40-bc", batch=64, images=45_000, classes=100, rounds=3),
    "fast": Setting(
        "resnet18-small",
        batch=256,
        images=12_800,
        classes=100,
        precision="bf16-mixed",
        compile=True,
        rounds=9,
    ),
    "smoke": Setting("convnet", batch=4, images=8, classes=100, size=16, rounds=2),
}
LENGTHS = {"paper": (1, 3, 5, 10, 20, 50), "fast": (1, 3, 5, 10, 20, 50), "smoke": (1, 5)}
BASE, PUBLISHED = "cross-entropy", "smooth, published"
GOAL = 0.01
"""At most this much longer than with cross-entropy."""
PAPERS = {
    (BASE, 5): 65.0,
    (PUBLISHED, 5): 81.0,
    ("noised, B = 3", 5): 68.0,
    (PUBLISHED, 10): 90.0,
    ("noised, B = 3", 10): 60.0,
}
"""Seconds per epoch in the text of Garcin et al. (2022), section 4.3."""


class EpochTime(Experiment):
    """Epochs with each loss and K, beside epochs with cross-entropy."""

    name = "epoch-time"
    title = "Time of a training epoch by K, all losses compared with cross-entropy"
    papers = ("Garcin 2022, Figure 3", "Berrada 2018, section 5.2 (10 % longer)")
    resumes = False

    def run(self, request: Request) -> Record:
        """Time all losses in one process, unless the record exists."""
        preset, folder = request.preset, request.folder
        setting, path = SETTINGS[preset], record_path(folder, self.name, preset)
        protocol = {
            **asdict(setting),
            "what": f"seconds of an epoch of training steps, all on one batch {HOW_TIMED}; medians "
            "over rounds, ratios to cross-entropy of the same round",
            "goal": f"at most {100 * GOAL:g} % longer than cross-entropy",
        }
        record = new_record(self.name, preset, protocol)
        if path.exists():
            kept = load_same(path, record)
            now = asdict(setting)
            if changed := changes({name: kept["protocol"].get(name) for name in now}, now):
                raise another_protocol(path, changed)
            request.say(f"{path} is kept: remove it to measure again.")
            return kept
        losses, left_out = candidates(LENGTHS[preset])
        request.say(f"{len(losses)} losses in turn, {setting.rounds} epochs with each.")
        named = {f"{name}, K = {k}": loss for (name, k), loss in losses.items()}
        seconds = epoch_seconds(setting, named, request.track)
        base = [seconds[f"{BASE}, K = {k}"] for k in LENGTHS[preset]]
        for name, k in losses:
            found = seconds[f"{name}, K = {k}"]
            row = {"loss": name, "k": k, "seconds": round(median(found), 5)}
            row |= {"ratio": round(ratio(found, base), 4), "rounds": [round(s, 5) for s in found]}
            record["rows"].append(row)
        record["not_run"] = left_out
        save_record(record, folder)
        return record

    def show(self, record: Record) -> list[Table]:
        """Times beside cross-entropy's, in the median and at best, and seconds of the paper."""
        check_rows(record, ("loss", "k", "seconds", "ratio", "rounds"))
        lengths = sorted({row["k"] for row in record["rows"]})
        found = {(row["loss"], row["k"]): row for row in record["rows"]}
        titles = [f"K = {k}" for k in lengths]
        title = "Time of an epoch relative to cross-entropy"
        ours = Table(Column("loss", no_wrap=True), *titles, title=title)
        paper = Table(Column("loss", no_wrap=True), *titles, title="Garcin 2022, seconds per epoch")
        best = Table(
            Column("loss", no_wrap=True),
            *titles,
            title="The same for the fastest epoch of each loss",
        )
        best.caption = "Disturbances make an epoch longer, never shorter."
        least = median(min(found[BASE, k]["rounds"]) for k in lengths)
        for name in dict.fromkeys(name for name, _ in found):
            ours.add_row(name, *(change(found[name, k]["ratio"]) for k in lengths))
            shortest = [min(found[name, k]["rounds"]) for k in lengths]
            if name != PUBLISHED:  # whose time depends on the scores
                best.add_row(name, *(change(seconds / least) for seconds in shortest))
        for name in dict.fromkeys(name for name, _ in PAPERS):
            cells = [PAPERS.get((name, k)) for k in lengths]
            paper.add_row(name, *("–" if each is None else f"{each:g}" for each in cells))
        seconds = found[BASE, lengths[0]]["seconds"]
        goal = record["protocol"]["goal"]
        left = "".join(f" Not run: {loss}." for loss in record["not_run"])
        ours.caption = (
            f"Cross-entropy: {seconds:.4g} s. It has no K: its own row shows how accurate the "
            f"times are. Our goal: {goal}.{left}"
        )
        return [ours, best, paper]

    def draw(self, record: Record, folder: Path) -> list[Path]:
        """Time against K."""
        from experiments.time_figures import draw_epochs

        return draw_epochs(record, folder)


def candidates(lengths: tuple[int, ...]) -> tuple[dict[tuple[str, int], Loss], list[str]]:
    """Losses by name and K, and what is left out.

    Cross-entropy is timed for every K, although it has none, to show how accurate the times are.
    """
    noised, published = functional.noised_topk_loss, peers.available("difftopk")
    found: dict[tuple[str, int], Loss] = {}
    for k in lengths:
        found[BASE, k] = F.cross_entropy
        found["smooth", k] = partial(functional.smooth_topk_loss, k=k)
        for samples in (3, 10):
            found[f"noised, B = {samples}", k] = partial(noised, k=k, epsilon=0.2, samples=samples)
        found["noised, exact", k] = partial(noised, k=k, epsilon=0.2, samples=None)
        if published:
            found[PUBLISHED, k] = PublishedTopKLoss(k)
    left_out = [] if published else [f"{PUBLISHED}: difftopk is not installed"]
    return found, left_out


def change(ratio: float) -> str:
    """How much longer an epoch takes.

    Example:
        >>> change(1.0123), change(0.998), change(0.99999), change(31.34)
        ('+1.23 %', '−0.20 %', '+0.00 %', '×31')
    """
    if ratio >= 2:
        return f"×{ratio:.2g}"
    percent = round(100 * (ratio - 1), 2) + 0.0  # there is no −0
    return f"{percent:+.2f} %".replace("-", "−")
