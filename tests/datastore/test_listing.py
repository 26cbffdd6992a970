"""Which files a folder has: git is the oracle, and is run by the tests alone."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramspec.datastore.beneath import Beneath
from ngramspec.datastore.corpus import Skipped
from ngramspec.datastore.listing import Listing

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is the oracle, and is not installed")
IDENTITY = dict.fromkeys(("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"), "t")
PATTERNS = [
    "*.py",
    "a",
    "/a",
    "a/",
    "b/c.py",
    "**/c.py",
    "!c.py",
    "!b/",
    "b/*",
    "!*.py",
    "a/**",
    "!a/**",
    "?.py",
    "[ab].py",
    "# x",
    "",
    "é*",
]
FOLDERS = ["", "a/", "b/", "a/b/", "a/b/c é/"]
NAMES = ["a.py", "b.py", "c.py", "a", "é.txt", "[x].py", "\udcff.py"]


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without a configuration of git's."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return folder


def git(root: Path, *arguments: str, **more: Any) -> bytes:
    done = subprocess.run(
        ["git", "-c", "protocol.file.allow=always", "-C", str(root), *arguments],
        env=os.environ | IDENTITY,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        **more,
    )
    return done.stdout


def write(root: Path, *names: str, text: str = "x\n") -> None:
    for name in names:
        path = root / name
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True)
        if not path.is_dir():
            path.write_text(text)


def ls_files(root: Path, *options: str) -> set[str]:
    return {os.fsdecode(path) for path in git(root, "ls-files", "-z", "--cached", *options).split(b"\0") if path}


def listed(root: Path, untracked: bool = False) -> tuple[set[str], Skipped]:
    skipped = Skipped()
    with Beneath(root) as tree:
        found = list(Listing(str(root), tree, skipped, untracked=untracked).files())
    assert len(found) == len({path for path, _ in found}), "each file once"
    return {path for path, _ in found}, skipped


def agree(root: Path) -> None:
    """Ours equal git's, of files that are there."""
    for options, untracked in (((), False), (("--others", "--exclude-standard"), True)):
        found, skipped = listed(root, untracked)
        expected = ls_files(root, *options)
        if expected:
            assert {path for path in found if os.path.lexists(root / path)} == {path for path in expected if os.path.lexists(root / path)}
        assert not skipped.named


def draw_patterns(data: Any) -> str:
    return "\n".join(data.draw(st.lists(st.sampled_from(PATTERNS), max_size=4))) + "\n"


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_random_repository_is_listed_as_git_lists_it(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("random")
    everything = sorted({folder + name for folder in FOLDERS for name in NAMES} - {"a"})
    present = data.draw(st.sets(st.sampled_from(everything), min_size=1, max_size=25))
    git(root, "init", "-q", f"--object-format={data.draw(st.sampled_from(['sha1', 'sha256']))}")
    write(root, *sorted(present))
    for folder in data.draw(st.sets(st.sampled_from(FOLDERS[:4]))):
        write(root, f"{folder}.gitignore", text=draw_patterns(data))
    write(root, ".git/info/exclude", text=draw_patterns(data))
    files = sorted(path for path in present if (root / path).is_file())
    added = data.draw(st.sets(st.sampled_from(files)))
    stdin = b"".join(os.fsencode(path) + b"\0" for path in sorted(added))
    git(root, "update-index", "--index-version", str(data.draw(st.sampled_from([2, 3, 4]))), "--add", "-z", "--stdin", input=stdin)
    if data.draw(st.booleans()):
        git(root, "-c", "splitIndex.maxPercentChange=100", "update-index", "--split-index")
        again = data.draw(st.sets(st.sampled_from(files)))
        for path in sorted(again):
            (root / path).write_text("changed\n")
        git(
            root,
            "-c",
            "splitIndex.maxPercentChange=100",
            "update-index",
            "--add",
            "-z",
            "--stdin",
            input=b"".join(os.fsencode(path) + b"\0" for path in sorted(again)),
        )
        gone = data.draw(st.sets(st.sampled_from(files)))
        git(
            root,
            "-c",
            "splitIndex.maxPercentChange=100",
            "update-index",
            "--force-remove",
            "-z",
            "--stdin",
            input=b"".join(os.fsencode(path) + b"\0" for path in sorted(gone)),
        )
    for flag in ("--skip-worktree", "--assume-unchanged"):
        marked = sorted(data.draw(st.sets(st.sampled_from(files))) & ls_files(root))
        if marked:
            git(root, "update-index", flag, "-z", "--stdin", input=b"".join(os.fsencode(path) + b"\0" for path in marked))
    agree(root)
    inner = root / data.draw(st.sampled_from(FOLDERS[1:]))
    if inner.is_dir():
        agree(inner)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_plain_folder_is_listed_as_git_lists_what_is_not_ignored(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("plain")
    write(root, *(folder + name for folder in FOLDERS[:4] for name in ("a.py", "b.py", "c.py")))
    for folder in data.draw(st.sets(st.sampled_from(["", "a/", "a/b/"]), min_size=1)):
        write(root, f"{folder}.gitignore", text=draw_patterns(data))
    ours, _ = listed(root)
    git(root, "init", "-q")
    assert ours == ls_files(root, "--others", "--exclude-standard")
