"""Make the tables of README.md from the recorded results."""

import json
from pathlib import Path

from benchmarks.environment import RESULTS

README = Path(__file__).parent.parent / "README.md"
START, END = "<!-- speed-cpu -->", "<!-- /speed-cpu -->"


def main() -> None:
    text = README.read_text()
    before, rest = text.split(START)
    after = rest.split(END)[1]
    README.write_text(f"{before}{START}\n{speed_cpu()}\n{END}{after}")
    print("README.md is up to date")


def speed_cpu() -> str:
    """The CPU table: one line a shape and loss, with what was measured where."""
    record = json.loads((RESULTS / "speed-cpu.json").read_text())
    lines = [
        f"Time over that of `F.cross_entropy` in the same run ({record['what']}; "
        f"{record['processor']}, {record['threads']} threads, torch {record['torch']}, "
        f"commit {record['commit']}), each loss in turn / in a row:",
        "",
        "| N × C | loss | time ratio, in turn | in a row | gradient error |",
        "|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        if row["gradient_error"] is not None:
            cells = (
                f"{row['samples']} × {row['classes']:,}",
                row["loss"],
                row["ratio_in_turn"],
                row["ratio_in_a_row"],
                f"{row['gradient_error']:.0e}",
            )
            lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)
