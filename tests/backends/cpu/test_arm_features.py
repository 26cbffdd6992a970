"""Which dot products an Arm processor has, by what Linux and macOS tell of known machines."""

from __future__ import annotations

import pytest

from ngramspec.backends.cpu.codegen import targets
from ngramspec.backends.cpu.codegen.targets import parse_cpuinfo, translate_sysctl
from ngramspec.backends.cpu.sysctl import parse_sysctl

NEOVERSE_N1 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs"
NEOVERSE_V1 = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 sm3 sm4 asimddp sha512 sve "
    "asimdfhm dit uscat ilrcpc flagm ssbs paca pacg dcpodp svei8mm svebf16 i8mm bf16 dgh rng"
)
CORTEX_A72 = "fp asimd evtstrm crc32 cpuid"
CORTEX_A76 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
SVE_ALONE = NEOVERSE_N1 + " sve svei8mm"  # the matrix instructions of SVE are others
LINUX = [
    ("Graviton 2", NEOVERSE_N1, "0xd0c", {"dotprod": True, "i8mm": False}),
    ("Graviton 3", NEOVERSE_V1, "0xd40", {"dotprod": True, "i8mm": True}),
    ("Ampere Altra", NEOVERSE_N1, "0xd0c", {"dotprod": True, "i8mm": False}),
    ("Raspberry Pi 4", CORTEX_A72, "0xd08", {"dotprod": False, "i8mm": False}),
    ("Raspberry Pi 5", CORTEX_A76, "0xd0b", {"dotprod": True, "i8mm": False}),
    ("SVE's i8mm alone", SVE_ALONE, "0x000", {"dotprod": True, "i8mm": False}),
]
M1 = """hw.optional.arm.FEAT_DotProd: 1
hw.optional.arm.FEAT_I8MM: 0
"""


def write_cpuinfo(*cores: tuple[str, str]) -> str:
    """The text of /proc/cpuinfo for cores with these features and part numbers."""
    return "".join(
        f"processor\t: {i}\nBogoMIPS\t: 50.00\nFeatures\t: {features}\nCPU implementer\t: 0x41\nCPU architecture: 8\n"
        f"CPU variant\t: 0x1\nCPU part\t: {part}\nCPU revision\t: 1\n\n"
        for i, (features, part) in enumerate(cores)
    )


@pytest.mark.parametrize(("features", "part", "expected"), [m[1:] for m in LINUX], ids=[m[0] for m in LINUX])
def test_linux(features: str, part: str, expected: dict[str, bool]) -> None:
    assert parse_cpuinfo(write_cpuinfo(*[(features, part)] * 4)) == expected


def test_only_what_all_cores_have() -> None:
    assert parse_cpuinfo(write_cpuinfo((NEOVERSE_V1, "0xd40"), (CORTEX_A76, "0xd0b"))) == {"dotprod": True, "i8mm": False}
    assert parse_cpuinfo(write_cpuinfo((NEOVERSE_V1, "0xd40"), (CORTEX_A72, "0xd08"))) == {"dotprod": False, "i8mm": False}


def test_a_text_that_tells_nothing() -> None:
    assert parse_cpuinfo("processor\t: 0\nflags\t\t: fpu vme i8mm\n") == {}
    assert parse_cpuinfo("") == {}


def test_macos() -> None:
    assert translate_sysctl(parse_sysctl(M1)) == {"dotprod": True, "i8mm": False}
    assert translate_sysctl(parse_sysctl(M1.replace("I8MM: 0", "I8MM: 1"))) == {"dotprod": True, "i8mm": True}
    assert translate_sysctl(parse_sysctl("hw.optional.neon: 1\n")) == {"dotprod": True, "i8mm": False}, "macOS 11 names no features"


@pytest.mark.parametrize(
    ("features", "dots"),
    [
        ({"dotprod": True, "i8mm": True}, ["usdot", "neon", "plain"]),
        ({"dotprod": True, "i8mm": False}, ["neon", "plain"]),
        ({"dotprod": False, "i8mm": False}, ["plain"]),
    ],
)
def test_targets_of_an_arm_processor(monkeypatch: pytest.MonkeyPatch, features: dict[str, bool], dots: list[str]) -> None:
    """Such a processor as LLVM reports no features of."""
    monkeypatch.setattr(targets, "detect_arm_features", lambda: features)
    monkeypatch.setattr(targets.binding, "get_host_cpu_features", dict)
    monkeypatch.setattr(targets.numba_config, "CPU_FEATURES", None)
    found = targets.list_targets()
    assert [target.dot for target in found] == dots
    for target in found[:-1]:
        assert target.features.split(",") == [f"{'+' if on else '-'}{name}" for name, on in features.items()]
    monkeypatch.setattr(targets.numba_config, "CPU_FEATURES", "+neon")
    assert [target.dot for target in targets.list_targets()] == ["plain"], "the variable overrides what the system tells"


@pytest.mark.parametrize("machine", ["aarch64", "arm64", "x86_64"])
def test_the_system_is_asked_on_arm_alone(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr(targets.platform, "machine", lambda: machine)
    monkeypatch.setattr(targets.sys, "platform", "darwin")
    monkeypatch.setattr(targets, "read_sysctl", lambda names: dict.fromkeys(names, 1))
    assert targets.detect_arm_features() == ({} if machine == "x86_64" else {"dotprod": True, "i8mm": True})
