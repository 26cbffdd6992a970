"""The `ngramspec` command, which is `python -m ngramspec`, too."""

import os
import sys
from typing import NoReturn

from ngramspec.cli.interrupts import INTERRUPTED, keep_interrupts

# Rounds that a thread of GNU's OpenMP waits awake for the others: 0.1 ms instead of 300,000 rounds. Beside a program that computes, the
# others wait for the core that it holds. Read when OpenMP is loaded.
SPINS = "10000"


def run_command() -> NoReturn:
    """Import and run the command."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    try:
        with keep_interrupts():
            from ngramspec.cli import main
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    main.run_command()


if __name__ == "__main__":
    run_command()
