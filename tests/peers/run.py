"""Run peers' own server tests against our server: `make peers-tests`, or `python -m tests.peers.run [llamacpp | vllm] [FILE …]`.

Their tests are no part of this project: they lie in .peers/, llama.cpp's fetched from the package that carries them, vLLM's put there from
its source package. Those that fail must be listed in `expected.toml` with a reason. The last line is one JSON document.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE, FETCHED = Path(__file__).parent, ROOT / ".peers"
SITE = FETCHED / "site"  # what vLLM's tests import beside what ours do
PACKAGE = "llama-cpp-python==0.3.36"  # whose source has llama.cpp's
FILE_S = 1200  # that the tests of one file may take
ENDED = (0, 1, 5)  # what pytest returns when all tests passed, when some failed, and when there are none


@dataclass(frozen=True)
class Peer:
    """A project whose tests are run."""

    name: str
    folder: Path
    """Where its tests run."""
    files: Sequence[str]
    """All that are run, within the folder."""
    prefix: str
    """What names of tests have in front that `expected.toml` leaves out."""
    options: tuple[str, ...]
    """pytest's."""


def find_llamacpp(out_of_scope: Sequence[str]) -> Peer:
    """Return llama.cpp's server tests, downloaded if they are not there yet."""
    found = sorted(FETCHED.glob("*/vendor/llama.cpp/tools/server/tests"))
    if not found:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(FETCHED), PACKAGE]
        subprocess.run(pip, check=True)
        with tarfile.open(next(FETCHED.glob("llama_cpp_python-*.tar.gz"))) as archive:
            wanted = re.compile(r"[^/]+/vendor/llama\.cpp/(tools/server/tests|models/templates)/")
            archive.extractall(FETCHED, [each for each in archive if wanted.match(each.name)], filter="data")
        found = sorted(FETCHED.glob("*/vendor/llama.cpp/tools/server/tests"))
    files = sorted(f"unit/{path.name}" for path in (found[0] / "unit").glob("test_*.py") if path.name not in out_of_scope)
    return Peer("llamacpp", found[0], files, "unit/", ("-p", "llamacpp_shim", "-m", "not slow"))


def find_vllm(files: Sequence[str]) -> Peer | None:
    """Return vLLM's tests of its server; None if they are not there, after saying how to put them there."""
    found = sorted(FETCHED.glob("vllm-*/tests/entrypoints"))
    if not found:
        print(f"vLLM's tests are not run: unpack tests/ of its source package into {FETCHED}/vllm-VERSION")
        return None
    if not (SITE / "pytest_asyncio").exists():
        wanted = ["pytest-asyncio", "pybase64", "anthropic", "docstring-parser", "jsonschema", "jsonschema-specifications"]
        wanted += ["referencing", "rpds-py"]
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(SITE), *wanted], check=True)
    prefix = "tests/entrypoints/"
    options = ("-p", "vllm_shim", "-p", "pytest_asyncio", f"--confcutdir={prefix}")  # tests/conftest.py imports all of vLLM
    return Peer("vllm", found[0].parents[1], [prefix + file for file in files], prefix, options)


def run(peer: Peer, files: Sequence[str]) -> dict[str, str]:
    """Run the tests of these files -> {test: "passed", "failed" or "skipped"}."""
    path = os.pathsep.join(map(str, (peer.folder, ROOT, HERE, SITE)))
    outcomes: dict[str, str] = {}
    pattern = re.compile(rf"^(PASSED|FAILED|ERROR) (?:{re.escape(peer.prefix)})?(\S+\.py::\w+)", re.MULTILINE)
    for file in files:  # each by itself, so that models do not add up in memory
        command = [sys.executable, "-m", "pytest", *peer.options, "-p", "no:cacheprovider", "--tb=no", "-rA", "-q", file]
        environment = os.environ | {"PYTHONPATH": path, "PORT": os.environ.get("PORT", "18080")}
        try:
            ended = subprocess.run(command, cwd=peer.folder, env=environment, capture_output=True, text=True, check=False, timeout=FILE_S)
            done = ended.stdout if ended.returncode in ENDED else f"{ended.stderr}\nERROR {file}::collection\npytest cannot run it"
        except subprocess.TimeoutExpired:
            done = f"ERROR {file}::timeout\nit takes longer than {FILE_S} s"
        for outcome, test in pattern.findall(done):
            failed = outcomes.get(test) == "failed" or outcome != "PASSED"
            outcomes[test] = "failed" if failed else "passed"
        print(f"{file}: {done.strip().splitlines()[-1] if done.strip() else 'no output'}", flush=True)
    return outcomes


def main() -> int:
    expected = tomllib.loads((HERE / "expected.toml").read_text("utf-8"))
    find = {
        "llamacpp": lambda: find_llamacpp(expected["llamacpp"]["out_of_scope"]),
        "vllm": lambda: find_vllm(expected["vllm"]["files"]),
    }
    wanted, files = sys.argv[1:2] or list(find), sys.argv[2:]
    if not find.keys() >= set(wanted):
        sys.exit(f"{wanted[0]} is no project; say llamacpp or vllm, and then its files")
    peers = [peer for peer in (find[name]() for name in wanted) if peer is not None]
    report: dict[str, object] = {}
    new: list[str] = []
    for peer in peers:
        outcomes = run(peer, [peer.prefix + file.removeprefix(peer.prefix) for file in files] or peer.files)
        failed = {test for test, outcome in outcomes.items() if outcome == "failed"}
        listed = {test: reason for reason, tests in expected[peer.name]["failures"].items() for test in tests}
        for test in sorted(failed):
            print(f"{'expected' if test in listed else 'NEW     '} {test}{': ' + listed[test] if test in listed else ''}")
        new += sorted(failed - listed.keys())
        mended = sorted(listed.keys() & outcomes.keys() - failed)
        report[peer.name] = {"tests": len(outcomes), "failed": len(failed), "new": sorted(failed - listed.keys()), "mended": mended}
    print(json.dumps(report))
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())
