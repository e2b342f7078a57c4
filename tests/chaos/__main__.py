"""Let accidents happen to training runs, and count those that were survived.

python -m tests.chaos --seconds 60      as many as there is time for
python -m tests.chaos --count 1000      an hour or so
python -m tests.chaos --seed 17         one of them again
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOPKLASS_COMMIT": "chaos", "COLUMNS": "200"}
"""Of all commands; the number of threads is read when PyTorch is imported."""


def main() -> int:
    """Run the accidents of some seeds; the exit status is 1 if one was not survived."""
    os.environ.update(ENVIRONMENT)
    from tests.chaos.kinds import KINDS, accident_of
    from tests.chaos.problems import Workshop

    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.chaos", None, __doc__, formatter_class=form)
    parser.add_argument("--seconds", type=float, help="begin no accident after so long")
    parser.add_argument("--count", type=int, default=1000, help="so many accidents")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--step", type=int, default=1, help="from one seed to the next")
    parser.add_argument("--seed", type=int, help="repeat one accident")
    parser.add_argument("--kind", choices=[*KINDS], help="only accidents of this kind")
    given = parser.parse_args()
    seeds: Iterator[int] | list[int] = itertools.count(given.first, given.step)
    if given.seed is not None:
        seeds = [given.seed]
    until = time.monotonic() + (given.seconds or float("inf"))
    survived: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    with Workshop() as workshop:
        for seed in itertools.islice(seeds, given.count):
            if time.monotonic() > until:
                break
            kind, what, failure = accident_of(seed, workshop, given.kind)
            (lost if failure else survived)[kind] += 1
            only = f" --kind {given.kind!r}" if given.kind else ""
            print(f"--seed {seed}{only}: {kind}: {what}", flush=True)
            if failure:
                print(f"NOT SURVIVED: {failure}\n", flush=True)
    for kind in KINDS:
        if total := survived[kind] + lost[kind]:
            print(f"{survived[kind]:5} of {total:5}  {kind}")
    print(f"{survived.total()} of {survived.total() + lost.total()} accidents were survived.")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
