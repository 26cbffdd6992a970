"""The contracts of who may know whom, against code that breaks them: `make check` must fail, and name what is wrong."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the contracts look at."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("ngramspec", "datastore", "tools"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.nb[ic]"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def check(tree: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-m", "tools.contracts"], cwd=tree, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_they_hold(tree: Path) -> None:
    code, told = check(tree)
    assert code == 0, told


# What breaks a contract: a file, the lines added to it, and what must be told of it
BREAKS = [
    ("ngramspec/outputs.py", "from ngramspec.models import loader", "ngramspec.outputs -> ngramspec.models.loader"),
    (
        "ngramspec/engine/step.py",
        "def lazy():\n    from ngramspec.backends.cpu import runner",
        "ngramspec.engine.step -> ngramspec.backends.cpu.runner",
    ),
    (
        "ngramspec/server/response_stats.py",
        "from ngramspec.engine.step import Core",
        "ngramspec.server.response_stats -> ngramspec.engine.step",
    ),
    ("ngramspec/speculative/budget/backoff.py", "import torch", "ngramspec.speculative.budget.backoff -> torch"),
    (
        "datastore/tokens.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ngramspec import errors",
        "datastore.tokens -> ngramspec.errors",
    ),
    ("ngramspec/cli/common.py", "from ngramspec.cli import main", "No cycles are allowed in ngramspec.cli"),
    ("ngramspec/papers/shape.py", "from ngramspec.speculative.ngram_table import _hash", "ngramspec/papers/shape.py:"),
    ("ngramspec/server/response_stats.py", "def f(engine):\n    return engine._encoding", "_encoding"),
    ("ngramspec/rogue.py", "x = 1", "rogue"),
]


@pytest.fixture(scope="module")
def told_of_all(tree: Path) -> str:
    """What is told of a copy in which all contracts are broken."""
    broken = tree.with_name("broken")
    shutil.copytree(tree, broken)
    for file, lines, _ in BREAKS:
        with (broken / file).open("a") as added:
            added.write(f"\n{lines}\n")
    code, told = check(broken)
    assert code == 1
    return told


@pytest.mark.parametrize("told", [told for _, _, told in BREAKS])
def test_what_breaks_one_is_named(told_of_all: str, told: str) -> None:
    assert told in told_of_all


def test_no_two_test_files_have_one_name() -> None:
    """They are imported by their bare name: pytest refuses the second."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name not in ("conftest.py", "__init__.py"))
    assert [name for name, n in names.items() if n > 1] == []
