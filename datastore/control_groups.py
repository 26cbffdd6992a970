"""The control groups that this process is in: where Linux, systemd and containers say how much memory and processor time it may use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def iterate_groups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the folders of the groups that limit this process, from its own to the outermost; `root` is where /proc and /sys lie.

    Of version 1 those of this controller ("cpu", "memory"), of version 2 all. The limits of each hold. A folder need not exist.
    """
    for controllers, path in re.findall(r"^\d+:([^:]*):(.*)$", read_file(root / "proc/self/cgroup"), re.MULTILINE):
        if not controllers:
            yield from _walk_up(root / "sys/fs/cgroup", path)
        elif controller in controllers.split(","):
            for mount in dict.fromkeys((controller, controllers)):
                yield from _walk_up(root / "sys/fs/cgroup" / mount, path)


def _walk_up(mount: Path, path: str) -> Iterator[Path]:
    """Yield a group's folder and those of the groups around it. A container that sees its own group alone has it at the mount."""
    inside = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    for n in range(len(inside), -1, -1):
        yield mount.joinpath(*inside[:n])


def read_free_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that the groups' limits leave, the least of all levels; None: no limit.

    What a group counts as used includes files that were read once: they are free. Above `memory.high`, processes are slowed down.
    """
    free = []
    for folder in iterate_groups("memory", root):
        stat = read_file(folder / "memory.stat")
        for limit, used, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.high", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
        ):
            most, now = read_file(folder / limit), read_file(folder / used)
            if most.isdigit() and now.isdigit():  # "max": none
                read_once = re.search(rf"^{cached} (\d+)", stat, re.MULTILINE)
                free.append(max(0, int(most) - int(now) + (int(read_once[1]) if read_once else 0)))
    return min(free, default=None)


def read_cpu_quota(root: Path = Path("/")) -> float | None:
    """Return how many processors' time the groups grant this process, the least of all levels; None: no limit."""
    quotas = []
    for folder in iterate_groups("cpu", root):
        quota, _, period = read_file(folder / "cpu.max").partition(" ")
        quotas.append(_divide_quota(quota, period))
        quotas.append(_divide_quota(read_file(folder / "cpu.cfs_quota_us"), read_file(folder / "cpu.cfs_period_us")))  # version 1
    return min((quota for quota in quotas if quota is not None), default=None)


def _divide_quota(quota: str, period: str) -> float | None:
    """Return quota / period, both microseconds; None if there is none ("max", "-1", or no file)."""
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def read_file(path: Path) -> str:
    """Return a file's text without white space around it; empty if it cannot be read."""
    try:
        return path.read_text("utf-8").strip()
    except (OSError, ValueError):
        return ""
