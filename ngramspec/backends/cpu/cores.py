"""Count the processor cores that passes should use: one thread per physical core that this process may use, and no more than its quota.

The operating system is asked: on Linux the affinity mask, the quotas of this process's control groups, and which logical processors are
threads of one core or efficiency cores; on macOS the number of performance cores. Threads of one core share its arithmetic units, which a
pass keeps busy, and every part of a pass waits for its slowest thread; so llama.cpp counts, too (common/common.cpp, cpu_get_num_math).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Set
from pathlib import Path, PurePosixPath

from ngramspec.backends.cpu.sysctl import read_sysctl

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
    siblings = {_read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in fast}
    quota = read_cpu_quota(root)
    return max(1, len(siblings) if quota is None else min(len(siblings), int(quota)))


def find_fast_cpus(usable: Set[int], root: Path = Path("/")) -> Set[int]:
    """Return those of the usable logical processors that are not efficiency cores; all if the system tells no difference, or if none is."""
    devices = root / "sys/devices"
    if listed := _read(devices / "cpu_core/cpus"):  # Intel's hybrid processors
        return usable & _parse_cpu_list(listed) or usable
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):  # Arm's; any
        capacities = {cpu: int(_read(devices / f"system/cpu/cpu{cpu}" / name) or 0) for cpu in usable}
        if all(capacities.values()):
            return {cpu for cpu, capacity in capacities.items() if capacity >= FAST_SHARE * max(capacities.values())}
    return usable


def read_cpu_quota(root: Path = Path("/")) -> float | None:
    """Return how many processors' time the control groups of this process grant it, the least of all levels; None: no limit."""
    groups = (root / "proc/self/cgroup").read_text("utf-8") if (root / "proc/self/cgroup").is_file() else ""
    quotas = []
    for controllers, path in re.findall(r"^\d+:([^:]*):(.*)$", groups, re.MULTILINE):
        if not controllers:
            quotas += [_parse_cpu_max(_read(folder / "cpu.max")) for folder in _walk_up(root / "sys/fs/cgroup", path)]
        elif "cpu" in controllers.split(","):
            for mount in ("cpu", controllers):
                for folder in _walk_up(root / "sys/fs/cgroup" / mount, path):
                    quotas.append(_divide_quota(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")))
    return min((quota for quota in quotas if quota is not None), default=None)


def _walk_up(mount: Path, path: str) -> Iterator[Path]:
    """Yield a group's folder and those of the groups around it. A container that sees its own group alone has it at the mount."""
    inside = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    for n in range(len(inside), -1, -1):
        yield mount.joinpath(*inside[:n])


def _parse_cpu_max(text: str) -> float | None:
    quota, _, period = text.partition(" ")
    return _divide_quota(quota, period)


def _divide_quota(quota: str, period: str) -> float | None:
    """Return quota / period, both microseconds; None if there is none ("max", "-1", or no file)."""
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _parse_cpu_list(text: str) -> set[int]:
    """Parse Linux's lists of processors, such as "0-3,8"."""
    cpus = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def _read(path: Path) -> str:
    """Return a file's text; empty if it cannot be read."""
    try:
        return path.read_text("utf-8").strip()
    except OSError:
        return ""
