"""Which files a folder has: git is the oracle, and is run by the tests alone."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramspec.datastore import file_filters
from ngramspec.datastore.beneath import MAX_DEPTH, ConfinedFolder
from ngramspec.datastore.corpus import Skipped
from ngramspec.datastore.git_folder import parse_settings
from ngramspec.datastore.git_index import IndexFormatError, read_entries
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


def list_names(root: Path, untracked: bool = False) -> tuple[set[str], Skipped]:
    skipped = Skipped()
    with ConfinedFolder(root) as tree:
        folders = Listing(str(root), tree, skipped, untracked=untracked).list_files()
        found = [f"{folder}/{name}" if folder else name for folder, names, _ in folders for name in names]
    assert len(found) == len(set(found)), "each file once"
    return set(found), skipped


def agree(root: Path) -> None:
    """Ours equal git's, of files that are there."""
    for options, untracked in (((), False), (("--others", "--exclude-standard"), True)):
        found, skipped = list_names(root, untracked)
        expected = ls_files(root, *options)
        if expected:
            there = {path for path in expected | found if os.path.lexists(root / path) and not is_folder(root / path)}
            assert found & there == expected & there
        assert not skipped.named


def is_folder(path: Path) -> bool:
    """Such as a submodule that is not checked out, which git lists as one path."""
    return path.is_dir() and not path.is_symlink()


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
    ours, _ = list_names(root)
    git(root, "init", "-q")
    assert ours == ls_files(root, "--others", "--exclude-standard")


def test_linked_working_trees_submodules_and_sparse_indexes(tmp_path: Path) -> None:
    main, library = tmp_path / "main", tmp_path / "library"
    for root in (library, main):
        root.mkdir()
        git(root, "init", "-q")
        write(root, "a.py", "in/b.py", "out/c.py", "out/deep/d.py")
        git(root, "add", ".")
        git(root, "commit", "-qm", "1")
    git(main, "submodule", "add", "-q", str(library), "in/library")
    git(main, "commit", "-qm", "2")
    write(main, "in/library/new.py", "in/other/e.py")
    git(main / "in/other", "init", "-q")
    inside = {"in/library/a.py", "in/library/in/b.py", "in/library/out/c.py", "in/library/out/deep/d.py"}
    own = {"a.py", "in/b.py", "out/c.py", "out/deep/d.py", ".gitmodules"}
    assert list_names(main)[0] == own | inside == ls_files(main, "--recurse-submodules")
    assert list_names(main, untracked=True)[0] == own | inside | {"in/library/new.py", "in/other/e.py"}
    assert list_names(main / "in")[0] == {path[3:] for path in own | inside if path.startswith("in/")}
    git(main, "worktree", "add", "-q", str(tmp_path / "linked"))
    write(tmp_path / "linked", "new.py")
    agree(tmp_path / "linked")
    git(tmp_path / "linked", "sparse-checkout", "set", "--cone", "--sparse-index", "in")
    agree(tmp_path / "linked")
    there = {path for path in list_names(tmp_path / "linked")[0] if (tmp_path / "linked" / path).is_file()}
    assert there == {"a.py", "in/b.py", ".gitmodules"}


def test_a_conflict_and_an_entry_without_content(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "main")
    for branch, text in (("main", "1"), ("other", "2")):
        git(tmp_path, "checkout", "-q", "--orphan", branch)
        write(tmp_path, "a.py", text=text)
        git(tmp_path, "add", "a.py")
        git(tmp_path, "commit", "-qm", text)
    subprocess.run(
        ["git", "-C", str(tmp_path), "merge", "-q", "--allow-unrelated-histories", "main"], env=os.environ | IDENTITY, check=False
    )
    write(tmp_path, "intended.py")
    git(tmp_path, "add", "-N", "intended.py")
    assert b"\t" in git(tmp_path, "ls-files", "-u")
    assert list_names(tmp_path)[0] == {"a.py", "intended.py"}
    agree(tmp_path)


def test_the_users_own_rules_hold_and_those_that_a_repository_points_at_do_not(tmp_path: Path, home: Path) -> None:
    git(tmp_path, "init", "-q")
    write(tmp_path, "a.py", "a.tmp", "a.log")
    write(home, ".config/git/ignore", text="*.tmp\n")
    agree(tmp_path)
    assert list_names(tmp_path, untracked=True)[0] == {"a.py", "a.log"}
    write(home, ".gitconfig", text='[core] # a comment\n\texcludesFile = "~/my \\\nrules" ; another\n')
    write(home, "my rules", text="*.log\n")
    agree(tmp_path)
    assert list_names(tmp_path, untracked=True)[0] == {"a.py", "a.tmp"}
    write(home, "theirs", text="*.py\n")
    git(tmp_path, "config", "core.excludesFile", str(home / "theirs"))
    assert list_names(tmp_path, untracked=True)[0] == {"a.py", "a.tmp"}


def test_settings_have_the_values_that_git_reads(tmp_path: Path) -> None:
    """Blanks at an end are the value's if they are quoted or escaped; what is a blank to Unicode alone is a character."""
    values = [
        '"a "',
        '"a "  # c',
        "a\\t",
        '"a"  "b" ',
        " a  b ;c",
        'a "b; ";c',
        '"a#b" # c',
        "a\xa0",
        "\u3000a ",
        '"" ',
        'a\\" ',
        'a ""',
        "a\\\\",
        "\fa\f",
    ]
    write(tmp_path, "config", text="[core]\n" + "".join(f"\tkey{i} = {value}\n" for i, value in enumerate(values)))
    listed = git(tmp_path, "config", "--file", str(tmp_path / "config"), "--list", "-z").decode().removesuffix("\0")
    assert parse_settings((tmp_path / "config").read_bytes()) == dict(line.split("\n", 1) for line in listed.split("\0"))


@pytest.mark.parametrize("key", ["core.worktree", "core.bare"])
def test_a_repository_whose_working_tree_is_elsewhere_is_named(tmp_path: Path, key: str) -> None:
    git(tmp_path, "init", "-q", "tree")
    tree = tmp_path / "tree"
    write(tree, "a.py", "b.py")
    git(tree, "add", "a.py")
    git(tree, "config", key, "/" if key == "core.worktree" else "true")
    found, skipped = list_names(tree)
    assert found == {"a.py", "b.py"}
    assert key in skipped.named[0][1]


@pytest.mark.parametrize(
    "text", ["", "x", "gitdir: ", "gitdir: /nowhere", "gitdir: ..", "gitdir: \0", "gitdir: /dev/zero", "gitdir: " + "/x" * 9000]
)
def test_what_is_called_git_and_is_no_repository_is_part_of_a_plain_folder(tmp_path: Path, text: str) -> None:
    write(tmp_path, "a.py", "inner/b.py")
    write(tmp_path, ".git", "inner/.git", text=text)
    assert list_names(tmp_path, untracked=True)[0] == {"a.py", "inner/b.py"}


def test_trees_deeper_than_paths_may_be_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "a.py")
    folder = os.open(tmp_path, os.O_RDONLY)
    for _ in range(MAX_DEPTH + 20):
        os.mkdir("d", dir_fd=folder)
        inner = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    found, skipped = list_names(tmp_path)
    assert found == {"a.py"}
    assert skipped.counts[file_filters.UNREADABLE] == 1
    subprocess.run(["rm", "-rf", str(tmp_path / "d")], check=True)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_indexes_are_errors_and_nothing_else(data: Any, indexes: list[tuple[bytes, bytes]]) -> None:
    index, shared = data.draw(st.sampled_from(indexes))
    damaged = bytearray(index)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 21))] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
    cut = bytes(damaged[: data.draw(st.sampled_from([len(damaged) - 20, data.draw(st.integers(12, len(damaged) - 20))]))])
    with contextlib.suppress(IndexFormatError):
        entries = read_entries(cut + hashlib.sha1(cut).digest(), "sha1", lambda _: shared)
        assert all(0 < len(entry.path) <= 4096 for entry in entries)


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[bytes, bytes]]:
    """Indexes of each version, and of each one that is split, with what they share."""
    made = []
    for version in ("2", "3", "4"):
        root = tmp_path_factory.mktemp(f"v{version}")
        git(root, "init", "-q")
        write(root, "a.py", "a/b.py", "a/bc.py", "d.py")
        git(root, "update-index", "--index-version", version, "--add", "a.py", "a/b.py", "a/bc.py")
        made.append(((root / ".git/index").read_bytes(), b""))
        git(root, "-c", "splitIndex.maxPercentChange=100", "update-index", "--split-index")
        write(root, "a.py", text="changed\n")
        git(root, "-c", "splitIndex.maxPercentChange=100", "update-index", "--add", "a.py", "d.py", "--force-remove", "a/b.py")
        (shared,) = (root / ".git").glob("sharedindex.*")
        made.append(((root / ".git/index").read_bytes(), shared.read_bytes()))
    return made
