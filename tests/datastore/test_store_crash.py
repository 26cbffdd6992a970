"""A writer that is killed leaves the old generation or the new one. `python -m benchmarks.datastore crash` kills more often."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_kill_9_leaves_one_generation_or_the_other() -> None:
    command = [sys.executable, "-m", "tools.store_crash", "--moments", "40", "--documents", "20"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=240, check=False)
    assert done.stdout, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["failures"] == []
    assert done.returncode == 0
    assert document["moments"] == 40
    outcomes = {row["operation"]: row["outcomes"] for row in document["operations"]}
    assert outcomes["build"].get("none", 0) > 0
    assert all(row["calls"] > 10 for row in document["operations"])
    assert sum(counts.get("old", 0) for counts in outcomes.values()) > 0
