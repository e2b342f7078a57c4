"""The command ``topklass``, also as ``python -m topklass``."""

import signal
import sys

from topklass._extras import MissingPackageError


def main() -> None:
    """Run the command; without its extra, say in one sentence what to install."""
    try:
        from topklass.cli import main as run

        run()
    except MissingPackageError as error:
        sys.exit(f"Error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:  # what is left is the end of the interpreter, in which Ctrl-C would be a traceback
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
