"""Build a wheel that carries machine code, so that a first start after `pip install` compiles nothing.

    python -m tools.build_wheel dist

The machine code is for the levels of x86-64 that this processor has (`ngramspec/datastore/bundled_code.py`), this version of Python, this
system, and the installed version of numba; with another numba the wheel's users compile at their first start, as they do with a wheel of
`pip wheel .`. Takes some minutes for each level.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numba

from ngramspec.engine.portable_code import compile_portable

ROOT = Path(__file__).parent.parent
SYSTEM = "manylinux2014_x86_64"  # that of numba's own wheels: machine code calls nothing but numba's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the wheel is written")
    folder = parser.parse_args().folder.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        source = copy_sources(Path(temporary, "source"))
        compile_portable(source / "datastore" / "machine_code", lambda text: print(text, file=sys.stderr))
        pack_wheel(source, folder)
    print(f"machine code for numba {numba.__version__}")


def copy_sources(to: Path) -> Path:
    """Copy what a wheel is built from, so that no file is left in the working tree."""
    without = shutil.ignore_patterns("__pycache__", "machine_code", "*.egg-info")
    for name in ("ngramspec", "datastore"):
        shutil.copytree(ROOT / name, to / name, ignore=without)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, to / name)
    return to


def pack_wheel(source: Path, folder: Path) -> None:
    python = f"--python-tag=cp{sys.version_info.major}{sys.version_info.minor}"
    options = f"--config-settings=--build-option={python} --plat-name={SYSTEM}"
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*pip, options, str(source)], check=True)


if __name__ == "__main__":
    main()
