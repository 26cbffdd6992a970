"""Reading beneath a folder: nothing outside it is opened, whatever stands on the way, and whenever it is put there."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ngramspec.datastore.beneath import MAX_DEPTH, ConfinedFolder, open_beneath, read_beneath

SECRET = b"outside\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "conf.py").write_bytes(SECRET)
    (tmp_path / "tree" / "a" / "b").mkdir(parents=True)
    (tmp_path / "tree" / "a" / "b" / "c.py").write_bytes(b"inside\n")
    (tmp_path / "tree" / "a" / "d.py").write_bytes(b"beside\n")
    return tmp_path / "tree"


def test_files_status_and_entries(root: Path) -> None:
    assert read_beneath(root, "a/b/c.py", 7) == b"inside\n"
    assert read_beneath(f"{root}/", "a/d.py", 100) == b"beside\n"
    with pytest.raises(OSError, match="larger than 6 bytes"):
        read_beneath(root, "a/b/c.py", 6)
    (root / "a" / "link").symlink_to("d.py")
    with ConfinedFolder(root) as tree:
        assert tree.list_folder() == [("a", stat.S_IFDIR)]
        assert tree.list_folder("a") == [("b", stat.S_IFDIR), ("d.py", stat.S_IFREG), ("link", stat.S_IFLNK)]
        assert tree.lstat("a/b/c.py").st_size == 7
        assert stat.S_ISLNK(tree.lstat("a/link").st_mode)
        assert tree.lstat("").st_ino == root.stat().st_ino
        with tree.open("a/b/c.py") as file, tree.open("a/d.py") as other:
            assert file.read() + other.read() == b"inside\nbeside\n"
        with pytest.raises(FileNotFoundError):
            tree.lstat("a/none/c.py")
        with pytest.raises(NotADirectoryError):
            tree.lstat("a/d.py/c.py")
        with tree.open("a/d.py") as file:
            assert file.read() == b"beside\n", "a failure on the way leaves the tree usable"
    tree.close()


@pytest.mark.parametrize(
    "path",
    [
        *("../outside/conf.py", "a/../../outside/conf.py", "{}/conf.py", "", "a//d.py", "a/./d.py", "a/", "/", "a/d.py\0"),
        *(".git/config", "a/.GIT/x", "git~1/config", "a/" * MAX_DEPTH + "d.py", "a/" + "x" * 5000),
    ],
)
def test_paths_that_have_no_place_in_a_tree(root: Path, path: str) -> None:
    path = path.format(root.parent / "outside")
    with pytest.raises(OSError, match="its path"), open_beneath(root, path):
        pass
    if path:
        with pytest.raises(OSError, match="its path"), ConfinedFolder(root) as tree:
            tree.lstat(path)


def test_a_neighbour_of_the_path_before_is_checked_as_any_path(root: Path) -> None:
    with ConfinedFolder(root) as tree:
        for first, paths in {
            "a/d.py": ("a/..", "a/.", "a/", "a/.git", "a/GIT~1", "a/d.py\0", f"a/{'x' * 5000}"),
            "a": ("/a", ".."),
        }.items():
            for path in paths:
                tree.lstat(first)
                with pytest.raises(OSError, match="its path"):
                    tree.lstat(path)
        tree.lstat("a/d.py")
        assert tree.list_folder("a/b") == [("c.py", stat.S_IFREG)]
        with pytest.raises(FileNotFoundError):
            tree.lstat("a/c.py")
        tree.lstat("a/d.py")
    with pytest.raises(ValueError, match="closed"):
        tree.lstat("a/d.py")


def test_links_are_not_followed(root: Path) -> None:
    (root / "file.py").symlink_to(root.parent / "outside" / "conf.py")
    (root / "folder").symlink_to(root.parent / "outside")
    (root / "inner").symlink_to("a")
    (root / "a" / "loop").symlink_to("loop")
    for path in ("file.py", "folder/conf.py", "inner/d.py", "a/loop", "a/loop/c.py"):
        with pytest.raises(OSError, match="leads through a link"):
            read_beneath(root, path, 100)
    for path in ("folder", "inner", "inner/b"):
        with pytest.raises(OSError, match="leads through a link"), ConfinedFolder(root) as tree:
            tree.list_folder(path)
    with pytest.raises(OSError, match="leads through a link"):
        ConfinedFolder(f"{root}/folder/")


def test_only_regular_files_are_opened_and_nothing_is_waited_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(root / "pipe.py")
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(root)
        listener.bind("socket.py")
        for path in ("pipe.py", "socket.py", "a"):
            with pytest.raises(OSError, match="not a regular file"):
                read_beneath(root, path, 100)


def test_git_is_read_only_when_it_is_asked_for(root: Path) -> None:
    (root / ".git").mkdir()
    (root / ".git" / "index").write_bytes(b"DIRC")
    with pytest.raises(OSError, match="its path"):
        read_beneath(root, ".git/index", 100)
    assert read_beneath(root, ".git/index", 100, in_git=True) == b"DIRC"


def test_a_folder_that_can_be_entered_but_not_listed(root: Path) -> None:
    (root / "a").chmod(0o111)
    try:
        assert read_beneath(root, "a/b/c.py", 100) == b"inside\n"
    finally:
        (root / "a").chmod(0o755)


@pytest.mark.parametrize("when", range(8))
def test_a_folder_that_is_exchanged_for_a_link_meanwhile(root: Path, monkeypatch: pytest.MonkeyPatch, when: int) -> None:
    """Before any one call of the system, a folder becomes a link out of the tree; what is read is never from outside."""
    (root / "a" / "b" / "conf.py").write_bytes(b"inside\n")
    (root / "a" / "link").symlink_to(root.parent / "outside")
    n_calls = 0

    def exchanging(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **more: Any) -> Any:
            nonlocal n_calls
            if n_calls == when:
                (root / "a" / "b").rename(root / "a" / "away")
                (root / "a" / "link").rename(root / "a" / "b")
            n_calls += 1
            return call(*arguments, **more)

        return called

    for name in ("open", "lstat", "stat", "fstat"):
        monkeypatch.setattr(os, name, exchanging(getattr(os, name)))
    try:
        found = read_beneath(root, "a/b/conf.py", 100)
    except OSError as error:
        found = str(error.strerror).encode()
    assert found in (b"inside\n", b"its path leads through a link")
    assert n_calls >= 4


def test_no_descriptor_is_left_open(root: Path) -> None:
    folder = Path("/proc/self/fd")
    if not folder.exists():
        pytest.skip("the system does not list descriptors")
    before = len(list(folder.iterdir()))
    for path in ("a/b/c.py", "a/none.py", "a/b", "../x", "a/d.py/x"):
        with contextlib.suppress(OSError):
            read_beneath(root, path, 3)
    assert len(list(folder.iterdir())) == before


@pytest.mark.parametrize("name", ["", ".", "..", ".git", ".GIT", "GIT~1", ".git. .", "a\0b", "x/../y"])
def test_status_of_several_names_refuses_what_has_no_place(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / ".gitignore").write_text("")
    with ConfinedFolder(tmp_path) as tree:
        first, refused, last = tree.lstat_files("", ["a", name, ".gitignore"])
        assert isinstance(first, os.stat_result)
        assert isinstance(last, os.stat_result)
        assert isinstance(refused, OSError)
        assert refused.errno == errno.EINVAL
        assert all(isinstance(status, os.stat_result) for status in tree.lstat_files("", ["a", ".gitignore"]))
