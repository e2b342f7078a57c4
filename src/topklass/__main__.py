"""The command ``topklass``, also as ``python -m topklass``."""

import sys

from topklass._extras import MissingPackageError


def main() -> None:
    """Run the command; without its extra, say in one sentence what to install."""
    try:
        from topklass.cli import main as run
    except MissingPackageError as error:
        sys.exit(f"Error: {error}")
    run()


if __name__ == "__main__":
    main()
