"""A comparison as one HTML file that needs nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from topklass._files import write_whole
from topklass.report.colours import COLOURS, THEME, variables
from topklass.report.examples import examples
from topklass.report.figures import pictures, swatches
from topklass.train.comparison import OF_LOSS, Comparison
from topklass.train.finished import FinishedRun, format_value
from topklass.train.headline import headline
from topklass.train.results_table import results_table


def write_report(comparison: Comparison, path: Path) -> None:
    """Write a page about a comparison: results, figures, test images, recipes.

    It opens without a network and runs no scripts. Test images are shown where the data set is at
    hand.

    Args:
        comparison: of :func:`topklass.train.compare`.
        path: of the file to write.
    """
    page = render(comparison)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: file.write(page.encode(errors="replace")))


@dataclass(frozen=True)
class Report:
    """The page of :func:`write_report` in a notebook: as the last line of a cell it is shown."""

    comparison: Comparison

    def _repr_html_(self) -> str:
        page = escape(render(self.comparison))
        return f'<iframe srcdoc="{page}" title="Report" width="100%" height="600"></iframe>'


def render(comparison: Comparison) -> str:
    """The page as HTML."""
    environment = Environment(
        loader=PackageLoader("topklass.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("template.html").render(contents(comparison))


def contents(comparison: Comparison) -> dict[str, Any]:
    """All that the template shows."""
    groups = comparison.groups
    number = f"{len(groups)} recipes" if len(groups) > 1 else "One recipe"
    return {
        "title": f"{number} on {comparison.data}, {len(comparison.classes):,} classes",
        "headline": headline(comparison),
        "left_out": comparison.left_out,
        "table": results_table(comparison),
        "rows": swatches(comparison, "row"),
        "legend": list(
            zip(swatches(comparison, "legend"), map(comparison.title, groups), strict=True)
        ),
        "several_seeds": len(comparison.runs) > len(groups),
        "pictures": pictures(comparison),
        "examples": examples(comparison),
        "settings": common_settings(comparison),
        "runs": [_run(comparison, run) for run in comparison.runs],
        "run_titles": ("run", "loss", *comparison.differing, "seed", "best epoch", "time"),
        "made_with": made_with(comparison),
        "colours": {
            "light": variables({**THEME, **COLOURS}, dark=False),
            "dark": variables({**THEME, **COLOURS}, dark=True),
        },
    }


def common_settings(comparison: Comparison) -> dict[str, str]:
    """Settings that are the same in all recipes; those of losses are in the table."""
    return {
        name: format_value(value)
        for name, value in comparison.groups[0].settings.items()
        if name not in (*comparison.differing, *OF_LOSS)
    }


def _run(comparison: Comparison, run: FinishedRun) -> tuple[str, ...]:
    seconds = run.result["seconds"]
    return (
        run.folder.name or str(run.folder),
        run.title,
        *(format_value(run.settings.get(name)) for name in comparison.differing),
        str(run.recipe.seed),
        str(run.result["epoch"] + 1),
        f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s",
    )


def made_with(comparison: Comparison) -> list[str]:
    """Versions and hardware, each once."""
    found = []
    for run in comparison.runs:
        versions = ", ".join(f"{n} {v}" for n, v in run.result["versions"].items())
        found.append(f"{versions}; {run.result['hardware']}")
    return list(dict.fromkeys(found))
