"""Find machine code that came with the package, compiled for all processors of a level instead of one processor.

A wheel made by `tools/build_wheel.py` carries it in the folder `machine_code`, a folder per level: the files of `code_cache` and of
`backends/cpu/codegen/kernels`. Nothing here is written to. It is used where the user's own folders have nothing, by the versions of Python,
numba and this package that made it; others compile. The module knows the names of files alone.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import NamedTuple

from llvmlite import binding
from numba.core import config

SWITCH = "NGRAMSPEC_BUNDLED_CODE"  # environment variable: "0" compiles for this very processor instead
FOLDER = Path(__file__).with_name("machine_code")


class Level(NamedTuple):
    """A level of processors as LLVM knows it. Code for it runs on every processor that has its features."""

    name: str
    """Also LLVM's name of a processor of that level, whose timings order the instructions."""
    features: str
    """What numba is told to compile for, as `NUMBA_CPU_FEATURES` has it."""


# The levels of the x86-64 psABI, the fourth with the dot products that its processors have since Ice Lake and Zen 4. In alphabetical order.
LEVELS = (
    Level(
        "x86-64-v4",
        "+avx,+avx2,+avx512bw,+avx512cd,+avx512dq,+avx512f,+avx512vl,+avx512vnni,+bmi,+bmi2,+cx16,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sse3,"
        "+sse4.1,+sse4.2,+ssse3,+xsave",
    ),
    Level("x86-64-v3", "+avx,+avx2,+bmi,+bmi2,+cx16,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sse3,+sse4.1,+sse4.2,+ssse3,+xsave"),
)


def list_levels() -> list[Level]:
    """Return the levels that this processor has, best first."""
    try:
        has = dict(binding.get_host_cpu_features())
    except RuntimeError:  # a processor that does not tell
        return []
    return [level for level in LEVELS if all(has.get(name[1:]) for name in level.features.split(","))]


@functools.cache
def find_level() -> Level | None:
    """Return the level whose code this process may load: the best that this processor has, if the package has code for it.

    None where numba has been told to compile for another processor, or code that checks bounds. Code for a lower level is not loaded: it
    would be slower.
    """
    if config.CPU_NAME or config.CPU_FEATURES or checks_bounds() or not (levels := list_levels()) or not (FOLDER / levels[0].name).is_dir():
        return None
    return levels[0]


def checks_bounds() -> bool:
    """Return whether numba has been told to compile code that checks every index, as it does where it adds what debuggers need."""
    return bool(config.DEBUGINFO_DEFAULT if config.BOUNDSCHECK is None else config.BOUNDSCHECK)


def find_bundle() -> tuple[Path, Level] | None:
    """Return the folder of the code that this process may load, and its level; None if there is none, or it is switched off."""
    level = find_level() if os.environ.get(SWITCH) != "0" else None
    return (FOLDER / level.name, level) if level else None


def switch_off() -> None:
    """Load no bundled code from now on, in this process and the children that it starts."""
    os.environ[SWITCH] = "0"
