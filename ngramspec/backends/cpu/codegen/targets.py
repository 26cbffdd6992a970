"""Define the instruction sets that code is generated for, and find those of this processor."""

from __future__ import annotations

import ctypes
import platform
import re
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

from llvmlite import binding
from numba.core import config as numba_config

from ngramspec.backends.cpu.sysctl import read_sysctl
from ngramspec.datastore.bundled_code import Level

# LLVM's name of each feature: its name in /proc/cpuinfo (Linux, arch/arm64/kernel/cpuinfo.c), and that of macOS.
_NAMES = {
    "dotprod": ("asimddp", "hw.optional.arm.FEAT_DotProd"),
    "i8mm": ("i8mm", "hw.optional.arm.FEAT_I8MM"),
}


_TILES = "+amx-int8,+amx-tile"
_REQUEST_STATE, _ARCH_PRCTL, _TILE_DATA = 0x1023, 158, 18  # ARCH_REQ_XCOMP_PERM and its system call (Linux, arch/x86/include/uapi)


@cache
def request_tiles() -> bool:
    """Ask the system to let this process use AMX's tiles; return whether it does.

    Linux keeps 8 KiB of them for each thread that computes with them, from the first use on, and only for processes that have asked.
    """
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA) == 0


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


class Target(NamedTuple):
    """Instruction set that code is generated for. All give the same bits."""

    name: str
    dot: str
    """How codes are multiplied: "vnni512", "vnni256", "maddubs", "usdot", "neon" or "plain"."""
    cpu: str
    """LLVM's name of the processor whose timings order the instructions: this one, or a common one if it has better sets, too."""
    features: str
    halves: bool
    """Whether there are instructions that convert between float16 and float32."""
    chains: int
    """Accumulators of 16 outputs that fit into registers besides the weights."""
    tiles: bool = False
    """Whether there are AMX's tiles of bytes, too."""

    def fits_level(self, level: Level) -> bool:
        """Return whether all processors of a level have this target's registers."""
        return self.chains < 24 or "+avx512bw" in level.features

    def cover_level(self, level: Level) -> Target:
        """Return this target for all processors of a level that have its dot products."""
        more = ",+avxvnni" if self.dot == "vnni256" else f",{_TILES}" if self.tiles else ""
        return self._replace(cpu=level.name, features=level.features + more)


def get_host_target() -> Target:
    """Return the best instruction set that this processor has."""
    return list_targets()[0]


def list_targets() -> list[Target]:
    """Return all instruction sets that this processor can run, best first; the last one is plain arithmetic."""
    try:
        has = dict(binding.get_host_cpu_features())
    except RuntimeError:  # a processor that does not tell
        has = {}
    has |= detect_arm_features()  # LLVM does not report them
    if numba_config.CPU_FEATURES:  # as whoever wants to see another processor's code sets it
        has = {name[1:]: name[0] == "+" for name in numba_config.CPU_FEATURES.split(",") if name}
    cpu = numba_config.CPU_NAME or binding.get_host_cpu_name()
    flags = ",".join(f"{'+' if on else '-'}{name}" for name, on in sorted(has.items()))
    found = []
    if has.get("avx512vnni") and has.get("avx512bw") and has.get("f16c", True):
        if has.get("amx-int8") and has.get("amx-tile") and request_tiles():
            found.append(Target("AMX", "vnni512", cpu, flags, True, 24, tiles=True))
        found.append(Target("AVX-512 VNNI", "vnni512", cpu, flags, True, 24))
    elif has.get("avx512bw"):
        found.append(Target("AVX-512", "maddubs", cpu, flags, True, 24))
    if has.get("avxvnni"):
        found.append(Target("AVX-VNNI", "vnni256", "x86-64-v3", "+avxvnni", True, 6))
    if has.get("avx2") and has.get("fma") and has.get("f16c"):
        found.append(Target("AVX2", "maddubs", "x86-64-v3", "", True, 6))
    if has.get("dotprod") and has.get("i8mm"):
        found.append(Target("NEON i8mm", "usdot", cpu, flags, True, 6))
    if has.get("dotprod"):
        found.append(Target("NEON", "neon", cpu, flags, True, 6))
    if found:
        found[0] = found[0]._replace(cpu=cpu, features=flags)
    plain_cpu = "x86-64" if binding.get_default_triple().startswith(("x86_64", "amd64")) else "generic"
    found.append(Target("generic", "plain", plain_cpu, "", False, 6))
    return found
