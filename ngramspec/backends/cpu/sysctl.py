"""Read integers that macOS tells about its processor; on other systems there are none."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence


def read_sysctl(names: Sequence[str]) -> dict[str, int]:
    """Return the values of the names that this system knows."""
    if sys.platform != "darwin":
        return {}
    try:
        done = subprocess.run(["/usr/sbin/sysctl", *names], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse_sysctl(done.stdout)


def parse_sysctl(text: str) -> dict[str, int]:
    """Parse lines such as "hw.optional.arm.FEAT_I8MM: 1"; lines without an integer are left out."""
    return {name: int(value) for name, value in re.findall(r"^(\S+): (\d+)$", text, re.MULTILINE)}
