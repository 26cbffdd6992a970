"""Run peers' own server tests against our server: `make peers-tests`, or `python -m tests.peers.run`.

Their tests are fetched from the package that carries them, into .peers/, and are no part of this project. Those that fail must be listed in
`expected.toml` with a reason. The last line is one JSON document.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE, FETCHED = Path(__file__).parent, ROOT / ".peers"
PACKAGE = "llama-cpp-python==0.3.36"  # whose source has llama.cpp's


def fetch() -> Path:
    """Return the folder of llama.cpp's server tests, downloaded if it is not there yet."""
    found = sorted(FETCHED.glob("*/vendor/llama.cpp/tools/server/tests"))
    if not found:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(FETCHED), PACKAGE]
        subprocess.run(pip, check=True)
        with tarfile.open(next(FETCHED.glob("*.tar.gz"))) as archive:
            wanted = re.compile(r"[^/]+/vendor/llama\.cpp/(tools/server/tests|models/templates)/")
            archive.extractall(FETCHED, [each for each in archive if wanted.match(each.name)], filter="data")
        found = sorted(FETCHED.glob("*/vendor/llama.cpp/tools/server/tests"))
    return found[0]


def run(folder: Path, files: list[str]) -> dict[str, str]:
    """Run the tests of these files -> {test: "passed", "failed" or "skipped"}."""
    path = os.pathsep.join(map(str, (folder, ROOT, HERE)))
    outcomes: dict[str, str] = {}
    for file in files:  # each by itself, so that models do not add up in memory
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "llamacpp_shim",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow",
            "--tb=no",
            "-rA",
            "-q",
        ]
        environment = os.environ | {"PYTHONPATH": path, "PORT": os.environ.get("PORT", "18080")}
        done = subprocess.run([*command, file], cwd=folder, env=environment, capture_output=True, text=True, check=False)
        for outcome, test in re.findall(r"^(PASSED|FAILED|ERROR) (?:unit/)?(\S+\.py::\w+)", done.stdout, re.MULTILINE):
            failed = outcomes.get(test) == "failed" or outcome != "PASSED"
            outcomes[test] = "failed" if failed else "passed"
        print(f"{file}: {done.stdout.strip().splitlines()[-1] if done.stdout.strip() else 'no output'}", flush=True)
    return outcomes


def main() -> int:
    expected = tomllib.loads((HERE / "expected.toml").read_text("utf-8"))
    folder = fetch()
    files = sorted(f"unit/{path.name}" for path in (folder / "unit").glob("test_*.py") if path.name not in expected["out_of_scope"])
    outcomes = run(folder, sys.argv[1:] or files)
    failed = {test for test, outcome in outcomes.items() if outcome == "failed"}
    listed = {test: reason for reason, tests in expected["failures"].items() for test in tests}
    for test in sorted(failed):
        print(f"{'expected' if test in listed else 'NEW     '} {test}{': ' + listed[test] if test in listed else ''}")
    new = sorted(failed - listed.keys())
    print(
        json.dumps({"tests": len(outcomes), "failed": len(failed), "new": new, "mended": sorted(listed.keys() & outcomes.keys() - failed)})
    )
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())
