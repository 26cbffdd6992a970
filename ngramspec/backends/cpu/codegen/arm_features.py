"""Find out which instructions for integer dot products an Arm processor has.

LLVM does not report them on Linux or macOS (`get_host_cpu_features`), so the operating system is asked. Names of features are LLVM's.
"""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

from ngramspec.backends.cpu.sysctl import read_sysctl

# LLVM's name of each feature: its name in /proc/cpuinfo (Linux, arch/arm64/kernel/cpuinfo.c), and that of macOS.
_NAMES = {
    "dotprod": ("asimddp", "hw.optional.arm.FEAT_DotProd"),
    "i8mm": ("i8mm", "hw.optional.arm.FEAT_I8MM"),
}


def detect_arm_features() -> dict[str, bool]:
    """Return whether this processor has "dotprod" and "i8mm"; nothing if it is no 64-bit Arm, or the system does not tell."""
    if platform.machine().lower() not in ("aarch64", "arm64"):
        return {}
    if sys.platform == "darwin":
        return translate_sysctl(read_sysctl([name for _, name in _NAMES.values()]))
    try:
        return parse_cpuinfo(Path("/proc/cpuinfo").read_text("utf-8"))
    except OSError:
        return {}


def parse_cpuinfo(text: str) -> dict[str, bool]:
    """Return the features that every core in this text of /proc/cpuinfo has; nothing if it lists none."""
    cores = [set(line.split()) for line in re.findall(r"^Features\s*:(.*)$", text, re.MULTILINE)]
    return {name: all(there in core for core in cores) for name, (there, _) in _NAMES.items()} if cores else {}


def translate_sysctl(values: dict[str, int]) -> dict[str, bool]:
    """Return the features by macOS's values. Systems before macOS 12 know no names: their processors, M1 and later, have dotprod."""
    return {name: values.get(there, name == "dotprod") > 0 for name, (_, there) in _NAMES.items()}
