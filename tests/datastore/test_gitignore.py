"""Ignore patterns: git is the oracle for what they match, and no pattern takes longer than its length times that of the path."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramspec.datastore.gitignore import UNION, IgnoreRules, TimeLimit, TooSlowError

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
LETTERS = "ab.-"
ATOMS = [
    *LETTERS,
    "*",
    "**",
    "/",
    "?",
    "[ab]",
    "[!a]",
    "[^b]",
    "[a-b]",
    "[]a]",
    "[a",
    "[[:alpha:]]",
    "[[:no:]]",
    "[a\\]]",
    "\\*",
    "\\",
    "\\!",
    "!",
    "#",
    " ",
    "\\ ",
    "é",
]
PIECES = ["a", "b", "*", "*.b", "a*b", "?", "**", "[ab]*", ".a", "a?", "*a*"]


def decide(patterns: str | bytes, path: str, is_folder: bool = False, **more: bool) -> bool | None:
    data = patterns.encode() if isinstance(patterns, str) else patterns
    return IgnoreRules(data, TimeLimit(60), **more).match_path(os.fsencode(path), is_folder)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("oracle")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


def ask_git(root: Path, patterns: str, paths: list[str], ignore_case: bool = False) -> list[str]:
    """The pattern that git finds for each path ("" for none), about paths of which no folder exists."""
    (root / ".gitignore").write_bytes(patterns.encode())
    options = ["-c", "core.excludesFile=", "-c", f"core.ignoreCase={ignore_case}"]
    command = ["git", "-C", str(root), *options, "check-ignore", "--no-index", "--stdin", "-z", "-v", "-n"]
    asked = b"".join(path.encode() + b"\0" for path in paths)
    fields = subprocess.run(command, input=asked, stdout=subprocess.PIPE, check=False).stdout.decode().split("\0")
    return [fields[at] for at in range(2, len(fields) - 1, 4)]


def ours(patterns: str, path: str) -> bool | None:
    """As check-ignore says it: the outermost ignored folder on the way decides."""
    rules = IgnoreRules(patterns.encode(), TimeLimit(60))
    parts = path.rstrip("/").split("/")
    for depth in range(1, len(parts)):
        if rules.match_path(os.fsencode("/".join(parts[:depth])), True):
            return True
    return rules.match_path(os.fsencode("/".join(parts)), path.endswith("/"))


paths = st.lists(st.text("ab.-é !#*\\", min_size=1, max_size=4), min_size=1, max_size=4).map("/".join)
patterns = st.lists(
    st.one_of(
        st.lists(st.sampled_from(ATOMS), min_size=1, max_size=6).map("".join),
        st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("/".join),
        st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map(lambda parts: "!" + "/".join(parts) + "/"),
    ),
    min_size=1,
    max_size=4,
)


@needs_git
@settings(max_examples=50, deadline=None)
@given(lines=patterns, asked=st.lists(paths, min_size=40, max_size=60, unique=True))
def test_patterns_match_what_git_matches(lines: list[str], asked: list[str], repository: Path) -> None:
    asked = [path for path in asked if not {".", "..", ".git"}.intersection(path.split("/")) and not path.startswith(":")]
    text = "\n".join(lines) + "\n"
    found = ask_git(repository, text, asked)
    assert len(found) == len(asked)
    for path, pattern in zip(asked, found, strict=True):
        verdict = None if not pattern else not pattern.startswith("!")
        assert ours(text, path) == verdict, (text, path, pattern)


@needs_git
def test_letters_of_either_case_match_as_in_git(repository: Path) -> None:
    """Git folds neither what is in brackets nor what is behind a backslash."""
    asked = ["a", "A", "b", "B", "z", "Z", "_", "-", "aB", "Ab"]
    tried = ["A", "\\A", "*B", "[A]", "[!A]", "[A-B]", "[B-a]", "[!Z-y]", "[A-_]", "[_-Z]", "[[:upper:]]", "[![:upper:]]", "[[:lower:]]B"]
    for pattern in tried:
        for ignore_case in (False, True):
            found = [bool(decide(pattern, path, ignore_case=ignore_case)) for path in asked]
            assert found == [each != "" for each in ask_git(repository, pattern, asked, ignore_case)], (pattern, ignore_case)


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("*a*a*a*a*a*a*a*a*b", "a" * 60),
        ("*a" * 2000 + "b", "a" * 255),
        ("**/" + "*a" * 100 + "/**/b", "/".join(["a" * 100] * 40)),
        ("x/" + "**/a*a*/" * 400 + "b", "x/" + "/".join(["aa"] * 127)),
        ("[a]" * 1300 + "*b", "a" * 255),
    ],
)
def test_no_pattern_backtracks(pattern: str, path: str) -> None:
    started = time.process_time()
    assert decide(pattern, path) is None
    assert time.process_time() - started < 5


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.lists(st.sampled_from([*PIECES, "/", "!"]), min_size=1, max_size=4).map("".join), min_size=1, max_size=3 * UNION),
    path=st.lists(st.sampled_from(["a", "b", "ab", ".a", "a.b"]), min_size=1, max_size=3).map("/".join),
    is_folder=st.booleans(),
)
def test_the_last_of_many_patterns_decides(lines: list[str], path: str, is_folder: bool) -> None:
    alone = [verdict for line in lines if (verdict := decide(line, path, is_folder)) is not None]
    assert decide("\n".join(lines), path, is_folder) == (alone[-1] if alone else None)


def test_case_and_marks() -> None:
    assert decide("*.PY\nReadMe", "a.py", ignore_case=True)
    assert decide("ReadMe", "x/README", ignore_case=True)
    assert decide("*.PY", "a.py") is None
    assert decide(b"\xef\xbb\xbfa.py\r\n", "a.py"), "a byte order mark and line ends of Windows"
    assert decide(b"*" * 5000, "a") is None, "longer than any path"


def test_time_is_bounded() -> None:
    with pytest.raises(TooSlowError):
        IgnoreRules(b"*a?\n" * 10, TimeLimit(0))
