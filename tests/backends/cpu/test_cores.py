"""How many threads passes get, by what fake trees of /proc and /sys and macOS tell."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ngramspec.backends.cpu import cores
from ngramspec.backends.cpu.cores import count_cores, find_fast_cpus
from ngramspec.backends.cpu.sysctl import parse_sysctl
from ngramspec.datastore.control_groups import read_cpu_quota


def write_tree(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def list_siblings(siblings: list[str]) -> dict[str, object]:
    return {f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": text for i, text in enumerate(siblings)}


def set_affinity(monkeypatch: pytest.MonkeyPatch, n_cpus: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(n_cpus)), raising=False)


def test_two_threads_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(tmp_path, list_siblings(["0,4", "1,5", "2,6", "3,7"] * 2))
    set_affinity(monkeypatch, 8)
    assert count_cores(tmp_path) == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 6})
    assert count_cores(tmp_path) == 2, "the affinity mask has threads of two cores"


def test_a_tree_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_affinity(monkeypatch, 3)
    assert count_cores(tmp_path) == 3


INTEL = {"sys/devices/cpu_core/cpus": "0-7", "sys/devices/cpu_atom/cpus": "8-15"}
RK3588 = {f"sys/devices/system/cpu/cpu{i}/cpu_capacity": 530 if i < 4 else 1024 for i in range(8)}
PHONE = {f"sys/devices/system/cpu/cpu{i}/cpu_capacity": c for i, c in enumerate([261] * 4 + [772] * 3 + [1024])}
CLOCKS = {f"sys/devices/system/cpu/cpu{i}/cpufreq/cpuinfo_max_freq": 5100000 if i < 4 else 3300000 for i in range(8)}
FAVOURED = {f"sys/devices/system/cpu/cpu{i}/cpufreq/cpuinfo_max_freq": 4600000 + 200000 * (i == 3) for i in range(8)}


@pytest.mark.parametrize(
    ("tree", "fast"),
    [(INTEL, range(8)), (RK3588, range(4, 8)), (PHONE, range(4, 8)), (CLOCKS, range(4)), (FAVOURED, range(8))],
    ids=["Intel hybrid", "RK3588", "prime, big and little", "two clocks", "one favoured core"],
)
def test_efficiency_cores_are_left_out(tmp_path: Path, tree: dict[str, object], fast: range) -> None:
    write_tree(tmp_path, tree)
    assert find_fast_cpus(set(range(8)), tmp_path) == set(fast)
    slow = set(range(8)) - set(fast)
    assert not slow or find_fast_cpus(slow, tmp_path) == slow, "a process bound to efficiency cores uses them"


def test_intel_hybrid_with_two_threads_per_performance_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(tmp_path, INTEL | list_siblings(["0-1", "0-1", "2-3", "2-3", "4-5", "4-5", "6-7", "6-7", *map(str, range(8, 16))]))
    set_affinity(monkeypatch, 16)
    assert count_cores(tmp_path) == 4


V1 = "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n2:cpuset:/docker/abc\n0::/"
QUOTAS = [
    ("none", {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None),
    ("a container's own", {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "250000 100000"}, 2.5),
    (
        "a group's around this one",
        {
            "proc/self/cgroup": "0::/kubepods/pod1/c2",
            "sys/fs/cgroup/kubepods/pod1/c2/cpu.max": "max 100000",
            "sys/fs/cgroup/kubepods/pod1/cpu.max": "150000 50000",
            "sys/fs/cgroup/kubepods/cpu.max": "700000 100000",
        },
        3.0,
    ),
    ("outside of the namespace", {"proc/self/cgroup": "0::/../../other", "sys/fs/cgroup/cpu.max": "100000 100000"}, 1.0),
    (
        "version 1",
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_quota_us": "50000",
            "sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_period_us": "100000",
        },
        0.5,
    ),
    (
        "version 1 in a container",
        {"proc/self/cgroup": V1, "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
        2.0,
    ),
    ("damaged", {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "many 0"}, None),
    ("no control groups", {}, None),
]


@pytest.mark.parametrize(("tree", "quota"), [q[1:] for q in QUOTAS], ids=[q[0] for q in QUOTAS])
def test_quotas_of_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: dict[str, object], quota: float | None) -> None:
    write_tree(tmp_path, tree)
    assert read_cpu_quota(tmp_path) == quota
    set_affinity(monkeypatch, 64)
    assert count_cores(tmp_path) == (64 if quota is None else max(1, int(quota)))


def test_macos_counts_performance_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def count_told(text: str) -> int:
        monkeypatch.setattr(cores, "read_sysctl", lambda _: parse_sysctl(text))
        return count_cores(tmp_path)

    assert count_told("hw.perflevel0.physicalcpu: 8\nhw.physicalcpu: 10\n") == 8
    assert count_told("hw.physicalcpu: 6\n") == 6, "an Intel Mac has no levels"
