"""The papers' numbers, one by one."""

from __future__ import annotations

from typing import NamedTuple

from experiments.grid import matches
from experiments.plan import Plan, Settings


class Published(NamedTuple):
    """A number of a paper."""

    source: str
    """For example "Berrada 2018, Table 1"."""
    method: str
    settings: Settings
    metric: str
    value: float
    std: float | None
    """Standard deviation over seeds, where the paper prints one."""

    @property
    def paper(self) -> str:
        """Without the table."""
        return self.source.split(",")[0]


def published_numbers(plan: Plan) -> list[Published]:
    """All numbers that a plan quotes."""
    found = []
    for block in plan.published:
        where, by = block.get("where", {}), block.get("by")
        for method, values in block["values"].items():
            for key, given in values.items() if by else [(None, values)]:
                settings = {**where, by: key} if by else where
                value, std = given if isinstance(given, list) else (given, None)
                found.append(
                    Published(block["source"], method, settings, block["metric"], value, std)
                )
    return found


def quoted(
    numbers: list[Published], method: str | None, where: Settings, metric: str
) -> list[Published]:
    """The numbers of a cell: its method, settings and metric; settings it does not have match."""
    return [
        each
        for each in numbers
        if method in (None, each.method)
        and each.metric == metric
        and matches(each.settings, {n: v for n, v in where.items() if n in each.settings})
    ]
