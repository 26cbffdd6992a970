"""Compile what the engine runs for all processors of a level, to be carried along with the package (`datastore.bundled_code`).

For whoever makes wheels and images: their users' first starts compile nothing. A child process compiles what numba compiles, since numba is
told the processor once per process. Only levels that this processor has are compiled: compiling runs the code.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ngramspec.backends.cpu import tiny_pass
from ngramspec.backends.cpu.codegen.targets import list_targets
from ngramspec.datastore import bundled_code, code_cache
from ngramspec.datastore.bundled_code import Level
from ngramspec.engine.background_compiler import Progress


def compile_portable(folder: Path, progress: Progress) -> None:
    """Write a folder of machine code for each level that this processor has, in place of earlier ones.

    Raises OSError if `folder` cannot be written or this processor has no level, subprocess.CalledProcessError if a child fails.
    """
    if not (levels := bundled_code.list_levels()):
        raise OSError("code can be compiled for processors from x86-64-v3 on, which this one is not")
    for level in levels:
        with tempfile.TemporaryDirectory() as temporary:
            made = Path(temporary, "made")
            made.mkdir()
            for target in list_targets()[:-1]:
                progress(f"for {level.name}: kernels of {target.name}")
                tiny_pass.compile_all_kernels(target.cover_level(level), made)
            progress(f"for {level.name}: what numba compiles, for some minutes")
            _compile_for(level, Path(temporary, "numba"), Path(temporary, "cache"))
            for path in [*Path(temporary, "numba").rglob(f"*{code_cache.SUFFIX}"), *Path(temporary, "cache", "code").iterdir()]:
                shutil.copyfile(path, made / path.name)
            shutil.rmtree(folder / level.name, ignore_errors=True)
            shutil.copytree(made, folder / level.name)


def _compile_for(level: Level, numba_folder: Path, cache: Path) -> None:
    folders = {"NUMBA_CACHE_DIR": str(numba_folder), "NGRAMSPEC_CACHE": str(cache)}
    processor = {"NUMBA_CPU_NAME": level.name, "NUMBA_CPU_FEATURES": level.features}
    subprocess.run([sys.executable, "-m", "ngramspec", "warm-up", "--quiet"], env={**os.environ, **folders, **processor}, check=True)
