"""The `ngramspec` command, which is `python -m ngramspec`, too."""

import sys
from typing import NoReturn

from ngramspec.cli.interrupts import INTERRUPTED, keep_interrupts


def run_command() -> NoReturn:
    """Import and run the command."""
    try:
        with keep_interrupts():
            from ngramspec.cli import main
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    main.run_command()


if __name__ == "__main__":
    run_command()
