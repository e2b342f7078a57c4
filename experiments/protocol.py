"""How a record was made, in words."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

from experiments.experiment import Record, not_run
from experiments.plan import RATE
from topklass.train.finished import format_value
from topklass.train.recipe import Recipe

ALWAYS = ("epochs", "batch_size", "learning_rate", "schedule", "weight_decay")
"""Settings of training that are named even if they are the defaults, or differ by method."""
PROSE = {"what": "Measured: ", "differs": "What differs: ", "goal": "Goal: "}
"""Parts of a protocol that are sentences."""


def made_by(record: Record) -> str:
    """Protocol, hardware, versions and commit, and how much is missing, in a paragraph."""
    defaults, protocol = asdict(Recipe()), record["protocol"]
    unused = [] if protocol.get("schedule") == "steps" else ["milestones"]
    if protocol.get("data_options"):  # images that are made have their own split
        unused.append("validation")
    settings = [
        f"{name.replace('_', ' ')} {format_value(value)}"
        for name, value in protocol.items()
        if (name in ALWAYS or value != defaults.get(name))
        and name not in (*unused, *PROSE)
        and not isinstance(value, dict)
    ]
    apart = [name for name in (*ALWAYS, "cutmix") if name not in protocol]
    settings += [each for name in apart if (each := differing(record, name))]
    parts = [f"Preset {record['preset']}" + (f": {', '.join(settings)}." if settings else ".")]
    parts += [f"{title}{protocol[name]}." for name, title in PROSE.items() if name in protocol]
    parts.append(made_where(record))
    if record["not_run"]:
        parts.append(not_run(record))
    return " ".join(parts)


def differing(record: Record, name: str) -> str:
    """What most runs have of a setting, and which methods have something else."""
    if name == RATE and "chosen" in record:
        return "learning rate chosen for each method and kind of data"
    rows = [row for row in [*record["rows"], *record["not_run"]] if "settings" in row]
    values = {row["method"]: row["settings"][name] for row in rows if name in row["settings"]}
    if not values:
        return ""
    most, _ = Counter(values.values()).most_common(1)[0]
    others = [f"{m}: {format_value(value)}" for m, value in values.items() if value != most]
    return f"{name.replace('_', ' ')} {format_value(most)} ({', '.join(others)})"


def made_where(record: Record) -> str:
    """Hardware, version and commit."""
    torch = record["versions"].get("torch", "unknown")
    return f"{record['hardware']}, torch {torch}, commit {record['commit']}."
