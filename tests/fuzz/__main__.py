"""Try the readers on ever new files, and tell the seed of any that is not refused properly."""

import argparse
import sys
import warnings

from .judge import run_rounds
from .targets import TARGETS

parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
parser.add_argument("--seconds", type=float, default=60, help="how long")
parser.add_argument("--seed", type=int, default=0, help="of the first round")
parser.add_argument("--only", choices=TARGETS, nargs="+", default=list(TARGETS), help="readers")
warnings.simplefilter("ignore")  # of Pillow, on broken files
given = parser.parse_args()
chosen = {name: TARGETS[name] for name in given.only}
tried, failed = run_rounds(chosen, given.seconds, given.seed, print)
print(f"{sum(tried.values()):,} inputs: " + ", ".join(f"{n:,} {name}" for name, n in tried.items()))
print(f"{len(failed)} failures")
sys.exit(bool(failed))
