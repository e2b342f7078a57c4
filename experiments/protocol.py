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
    """What most runs have of a setting, and which methods have something else.

    Example:
        >>> rows = [{"method": "a", "settings": {"k": k}} for k in (5, 1)]
        >>> differing({"rows": rows, "not_run": [{"method": "b", "settings": {"k": 5}}]}, "k")
        'k 1 and 5'
        >>> differing({"rows": rows[:1], "not_run": [{"method": "b", "settings": {"k": 3}}]}, "k")
        'k 5 (b: 3)'
    """
    if name == RATE and "chosen" in record:
        return "learning rate chosen for each method and kind of data"
    rows = [row for row in [*record["rows"], *record["not_run"]] if "settings" in row]
    values: dict[str, set[object]] = {}
    for row in rows:
        if name in row["settings"]:
            values.setdefault(row["method"], set()).add(row["settings"][name])
    if not values:
        return ""
    title = name.replace("_", " ")
    if any(len(each) > 1 for each in values.values()):
        *first, last = map(format_value, sorted(set().union(*values.values())))  # type: ignore[type-var]
        return f"{title} {', '.join(first)} and {last}"
    of_method = {method: each for method, (each,) in values.items()}
    most, _ = Counter(of_method.values()).most_common(1)[0]
    others = [f"{m}: {format_value(each)}" for m, each in of_method.items() if each != most]
    return f"{title} {format_value(most)} ({'; '.join(others)})"


def made_where(record: Record) -> str:
    """Hardware, version and commit."""
    torch = record["versions"].get("torch", "unknown")
    return f"{record['hardware']}, torch {torch}, commit {record['commit']}."
