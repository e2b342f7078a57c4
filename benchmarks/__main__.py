"""Command line: ``python -m benchmarks speed`` and ``python -m benchmarks tables``."""

import argparse

from benchmarks import speed, tables

COMMANDS = {"speed": speed.main, "tables": tables.main}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("command", choices=COMMANDS, help="what to measure or make")
    COMMANDS[parser.parse_args().command]()


if __name__ == "__main__":
    main()
