"""Count the processor cores that passes should use: one thread per physical core that this process may use, and no more than its quota.

The operating system is asked: on Linux the affinity mask, the quotas of this process's control groups, and which logical processors are
threads of one core or efficiency cores; on macOS the number of performance cores. Threads of one core share its arithmetic units, which a
pass keeps busy, and every part of a pass waits for its slowest thread; so llama.cpp counts, too (common/common.cpp, cpu_get_num_math).
"""

from __future__ import annotations

import os
import re
from collections.abc import Set
from pathlib import Path

from ngramspec.backends.cpu.sysctl import read_sysctl
from ngramspec.datastore.control_groups import read_cpu_quota, read_file

# A core that has less than this share of the greatest capacity is an efficiency core. Performance cores of one processor differ by up to a
# quarter (Arm's prime cores beside big ones, Intel's favoured cores); efficiency cores have half or less.
FAST_SHARE = 0.7


def count_cores(root: Path = Path("/")) -> int:
    """Return the number of threads for passes; `root` is where /proc and /sys lie."""
    names = ["hw.perflevel0.physicalcpu", "hw.physicalcpu"]  # macOS; the second for Intel's processors
    if told := read_sysctl(names):
        return next(told[name] for name in names if name in told)
    try:
        usable: Set[int] = os.sched_getaffinity(0)
    except AttributeError:  # neither Linux nor macOS
        return os.cpu_count() or 1
    fast = find_fast_cpus(usable, root)
    siblings = {read_file(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in fast}
    quota = read_cpu_quota(root)
    return max(1, len(siblings) if quota is None else min(len(siblings), int(quota)))


def find_fast_cpus(usable: Set[int], root: Path = Path("/")) -> Set[int]:
    """Return those of the usable logical processors that are not efficiency cores; all if the system tells no difference, or if none is."""
    devices = root / "sys/devices"
    if listed := read_file(devices / "cpu_core/cpus"):  # Intel's hybrid processors
        return usable & _parse_cpu_list(listed) or usable
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):  # Arm's; any
        capacities = {cpu: int(read_file(devices / f"system/cpu/cpu{cpu}" / name) or 0) for cpu in usable}
        if all(capacities.values()):
            return {cpu for cpu, capacity in capacities.items() if capacity >= FAST_SHARE * max(capacities.values())}
    return usable


def _parse_cpu_list(text: str) -> set[int]:
    """Parse Linux's lists of processors, such as "0-3,8"."""
    cpus = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus
