"""Stores of working trees: which there are, what belongs into them, and the process that builds and follows one."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from ngramspec.child_process import ChildEndedError, ChildProcess
from ngramspec.datastore import CorpusError, Datastore, corpus, indexer_process, workspace
from ngramspec.datastore.build import build
from ngramspec.datastore.commit import lock_for_writing
from ngramspec.datastore.tokens import compute_fingerprint, to_canonical_json

BACKEND = tiny.byte_tokenizer().backend_tokenizer
PRINT = compute_fingerprint(BACKEND)
WAIT_S = 300


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    folder.mkdir()
    for n in range(5):
        (folder / f"{n}.py").write_text(f"def f{n}():\n    return {n}\n")
    return folder


def environment(folder: Path, *packages: str) -> Path:
    """A virtual environment with packages of one module each."""
    site = folder / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    (folder / "pyvenv.cfg").touch()
    for package in packages:
        name, _, version = package.partition("-")
        (site / f"{package}.dist-info").mkdir()
        (site / f"{name}.py").write_text(f"def {name}():\n    return {version}\n")
    return folder


def documents(store: str) -> set[str]:
    with Datastore.open(store) as opened:
        return {Path(document.path).name for document in opened.snapshot.iterate_documents()}


class Indexer:
    """An indexer's process, and what it reports."""

    def __init__(self, kept: workspace.StoreSpec, stage: Any) -> None:
        job = indexer_process.Job(kept, stage, to_canonical_json(BACKEND), "bytes", "test")
        packages = "ngramspec", "numpy", "tokenizers"
        self.child = ChildProcess("ngramspec.datastore.indexer_process", packages, job.to_message(), use_site=True, log_errors=True)

    def told(self, kind: str) -> dict[str, Any]:
        """What it reports of this kind next."""
        while True:
            report = self.child.receive(WAIT_S)
            if report["kind"] == kind:
                return report["facts"]  # type: ignore[no-any-return]

    def end(self) -> int:
        self.child.close_input()
        return self.child.wait()


@pytest.fixture
def start() -> Iterator[Callable[..., Indexer]]:
    started: list[Indexer] = []

    def begin(kept: workspace.StoreSpec, stage: str) -> Indexer:
        started.append(Indexer(kept, stage))
        return started[-1]

    yield begin
    for each in started:
        assert each.end() == 0


# ------------------------------------------------------------------ which stores


def test_a_store_per_tree_tokenizer_and_place(tree: Path, tmp_path: Path) -> None:
    kept = workspace.describe_workspace(str(tree), tmp_path / "cache", PRINT)
    assert kept == workspace.describe_workspace(str(tree), tmp_path / "cache", PRINT)
    others = [
        workspace.describe_workspace(str(tmp_path), tmp_path / "cache", PRINT),
        workspace.describe_workspace(str(tree), tmp_path / "cache", "another"),
    ]
    assert len({each.folder for each in [kept, *others]}) == 3
    assert Path(kept.folder).is_relative_to(tmp_path / "cache")


def test_ignored_files_and_environments_are_no_part_of_a_tree(tree: Path) -> None:
    environment(tree / "my.env", "numpy-2.0")
    (tree / "node_modules").mkdir()
    (tree / "node_modules" / "left.js").write_text("left")
    (tree / "secret.txt").write_text("s")
    (tree / ".gitignore").write_text("secret.txt\n")
    expected = 5
    assert workspace.count_files(str(tree), 100) == (expected, True), "without git"
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    subprocess.run(["git", "-C", str(tree), "add", "0.py"], check=True)
    assert workspace.count_files(str(tree), 100) == (expected, True), "files that git does not track yet belong to it"


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always")
    subprocess.run(["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True)


def test_submodules_are_part_of_a_tree(tree: Path, tmp_path: Path) -> None:
    """With what git does not track in them yet, without what they ignore, and however deep."""
    for name in ("inner", "outer"):
        (tmp_path / name).mkdir()
        git(tmp_path / name, "init", "-q")
        (tmp_path / name / f"{name}.py").write_text(f"{name} = 1\n")
        (tmp_path / name / ".gitignore").write_text("ignored.py\n")
        git(tmp_path / name, "add", ".")
        git(tmp_path / name, "commit", "-qm", "1")
    git(tmp_path / "outer", "submodule", "add", "-q", str(tmp_path / "inner"), "deps/inner")
    git(tmp_path / "outer", "commit", "-qam", "2")
    git(tree, "init", "-q")
    git(tree, "submodule", "add", "-q", str(tmp_path / "outer"), "outer")
    before = set(corpus.list_names(str(tree), workspace.get_workspace_options(str(tree))))
    assert {f"{n}.py" for n in range(5)} | {"outer/outer.py"} <= before
    assert "outer/deps/inner/inner.py" not in before, "it is not checked out"
    git(tree, "submodule", "update", "-q", "--init", "--recursive")
    (tree / "outer" / "saved.py").write_text("saved = 1\n")
    (tree / "outer" / "ignored.py").write_text("ignored = 1\n")
    (tree / "link").symlink_to(tmp_path / "outer")
    found = set(corpus.list_names(str(tree), workspace.get_workspace_options(str(tree))))
    assert found - before - {"link"} == {"outer/deps/inner/inner.py", "outer/saved.py"}
    files = corpus.find_files(corpus.resolve_sources([str(tree)]), workspace.get_workspace_options(str(tree)), corpus.Skipped())
    assert sum(file.relative.startswith("outer/") and file.relative.endswith(".py") for file in files) == 3
    assert not any(file.relative.startswith("link") for file in files)


def test_stores_of_trees_that_are_long_gone_are_deleted(tree: Path, tmp_path: Path) -> None:
    cache, other = tmp_path / "cache", tmp_path / "other"
    shutil.copytree(tree, other)
    kept = [workspace.describe_workspace(str(folder), cache, PRINT) for folder in (tree, other)]
    for each in kept:
        build(each.paths, Path(each.folder), BACKEND, "bytes", options=each.options)
    (cache / "trees" / "no-store").mkdir()
    assert workspace.delete_unused_stores(cache) == []
    tree.rename(tmp_path / "away")
    (said,) = workspace.delete_unused_stores(cache)
    assert f"{tree} is gone" in said
    assert workspace.delete_unused_stores(cache) == [], "it is said once"
    mark = Path(f"{kept[0].folder}.gone")
    old = time.time() - 31 * 86_400
    os.utime(mark, (old, old))
    (tmp_path / "away").rename(tree)
    assert workspace.delete_unused_stores(cache) == [], "it is back"
    assert not mark.exists()
    tree.rename(tmp_path / "away")
    workspace.delete_unused_stores(cache)
    os.utime(mark, (old, old))
    with lock_for_writing(Path(kept[0].folder)):
        assert workspace.delete_unused_stores(cache) == [], "somebody writes it"
    assert documents(kept[0].folder)
    (said,) = workspace.delete_unused_stores(cache)
    assert "is deleted" in said
    assert sorted(path.name for path in (cache / "trees").iterdir()) == sorted(["no-store", Path(kept[1].folder).name])


def test_stores_of_packages_that_no_tree_has_are_deleted(tmp_path: Path) -> None:
    """They are named by what packages hold: an upgrade makes another one."""
    cache, kept = tmp_path / "cache", []
    for name in ("old", "new"):
        environment(tmp_path / name / ".venv", f"{name}-1.0")
        found = workspace.describe_packages(str(tmp_path / name), cache, PRINT)
        assert found is not None
        kept.append(found)
        build_here(found)
        workspace.mark_used(found)
    long_ago = time.time() - 31 * 86_400
    for each in kept:
        os.utime(f"{each.folder}.used", (long_ago, long_ago))
    workspace.mark_used(kept[1])
    (said,) = workspace.delete_unused_stores(cache)
    assert kept[0].folder in said
    assert sorted(path.name for path in (cache / "packages").iterdir()) == [Path(kept[1].folder).name, f"{Path(kept[1].folder).name}.used"]
    assert workspace.delete_unused_stores(cache) == []


def test_too_large_a_tree_is_counted(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert workspace.check_size(str(tree), 5) == 5
    with pytest.raises(CorpusError, match="holds 5 files of text, a tree may have 4"):
        workspace.check_size(str(tree), 4)
    monkeypatch.setattr(workspace, "COUNT_S", -1.0)
    with pytest.raises(CorpusError, match="holds more than 3 files"):
        workspace.check_size(str(tree), 2)


def test_packages_are_one_store_for_all_trees_with_the_same_files(tmp_path: Path) -> None:
    for name, packages in (("a", ["one-1.0", "two-2.0"]), ("b", ["two-2.0", "one-1.0"]), ("c", ["one-1.1", "two-2.0"])):
        environment(tmp_path / name / ".venv", *packages)
    a, b, c = (workspace.describe_packages(str(tmp_path / name), tmp_path / "cache", PRINT) for name in "abc")
    assert a is not None
    assert b is not None
    assert c is not None
    assert a.folder == b.folder != c.folder
    assert not a.follow
    other = workspace.describe_packages(str(tmp_path / "a"), tmp_path / "cache", "another tokenizer")
    assert other is not None
    assert other.folder != a.folder


SITE = Path(".venv/lib/python3.11/site-packages")


def build_here(kept: workspace.StoreSpec) -> indexer_process.Report:
    """What a keeper's process tells last of building a store, in this process."""
    told: list[indexer_process.Report] = []
    indexer_process.bring_up_to_date(indexer_process.Job(kept, "build", to_canonical_json(BACKEND), "bytes", "test"), told.append)
    return told[-1]


@pytest.mark.parametrize("changed", ["a byte", "a name", "one more", "one less"])
def test_a_tree_cannot_pass_its_files_off_as_a_package(tmp_path: Path, changed: str) -> None:
    """Two trees whose metadata say that they have the same packages; what they draft from is their own."""
    for name in ("hostile", "mine"):
        environment(tmp_path / name / ".venv", "fake-1.0", "other-1.0")
        (tmp_path / name / SITE / "fake-1.0.dist-info" / "RECORD").write_text(
            "fake.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\n"
        )
    file = tmp_path / "hostile" / SITE / "fake.py"
    if changed == "a byte":
        file.write_bytes(file.read_bytes().replace(b"1", b"2"))
    elif changed == "a name":
        file.rename(file.with_name("fake2.py"))
    elif changed == "one more":
        file.with_name("more.py").write_text("import os\n")
    else:
        file.unlink()
    hostile, mine = (workspace.describe_packages(str(tmp_path / name), tmp_path / "cache", PRINT) for name in ("hostile", "mine"))
    assert hostile is not None
    assert mine is not None
    assert hostile.folder != mine.folder
    assert build_here(hostile)[0] == build_here(mine)[0] == "done"
    assert documents(mine.folder) == {"fake.py", "other.py"}
    with Datastore.open(mine.folder) as store:
        (fake,) = [document for document in store.snapshot.iterate_documents() if document.path.endswith("fake.py")]
        text = bytes(store.snapshot.text_tokens(fake.segment, fake.number).astype(np.uint8)).decode()
    assert text == (tmp_path / "mine" / SITE / "fake.py").read_text()


def test_files_that_change_after_they_were_looked_at_are_in_no_store(tmp_path: Path) -> None:
    """A store is named by what its files held: others would draft from what took their place."""
    environment(tmp_path / "mine" / ".venv", "fake-1.0")
    kept = workspace.describe_packages(str(tmp_path / "mine"), tmp_path / "cache", PRINT)
    assert kept is not None
    before = (tmp_path / "mine" / SITE / "fake.py").read_text()
    (tmp_path / "mine" / SITE / "fake.py").write_text("import os\n")
    kind, problem = build_here(kept)
    assert (kind, problem["final"]) == ("problem", True)
    assert "changed while they were read" in problem["text"]
    assert not (Path(kept.folder) / "MANIFEST").exists()
    (tmp_path / "mine" / SITE / "fake.py").write_text(before)
    assert build_here(kept)[0] == "done"
    (tmp_path / "mine" / SITE / "fake.py").write_text("import os\n")
    assert not build_here(kept)[1]["committed"], "what is there stays what it is called by"
    assert documents(kept.folder) == {"fake.py"}


def test_packages_never_leave_the_trees_environment(tmp_path: Path) -> None:
    """Links to other folders and files, paths in metadata, devices and pipes; and what environments legitimately link to."""
    secret = tmp_path / "secret"
    environment(secret / "env", "private-1.0")
    (secret / "outside.py").write_text("outside = 1\n")
    environment(tmp_path / "tree" / ".venv", "one-1.0")
    site = tmp_path / "tree" / SITE
    (tmp_path / "tree" / ".venv" / "lib64").symlink_to("lib")
    (tmp_path / "tree" / ".venv" / "bin").mkdir()
    (tmp_path / "tree" / ".venv" / "bin" / "python").symlink_to("/usr/bin/python3")
    (site / "linked.py").symlink_to(secret / "outside.py")
    (site / "linked").symlink_to(secret)
    (site / "one").mkdir()
    (site / "one" / "inner").symlink_to(secret)
    (site / "zero.py").symlink_to("/dev/zero")
    (site / "paths.pth").write_text(f"{secret}\nimport os\n")
    (site / "one-1.0.dist-info" / "RECORD").write_text(f"{secret}/outside.py,,\n../../../../../secret/outside.py,,\n")
    (site / "one-1.0.dist-info" / "top_level.txt").symlink_to("/dev/zero")
    os.mkfifo(site / "pipe.py")
    os.mkfifo(site / "one-1.0.dist-info" / "METADATA")
    kept = workspace.describe_packages(str(tmp_path / "tree"), tmp_path / "cache", PRINT)
    assert kept is not None
    assert kept.paths == (str(site),)
    _, done = build_here(kept)
    assert documents(kept.folder) == {"one.py"}
    assert (done["skipped"]["link"], done["skipped"]["not a regular file"]) == (5, 1)


@pytest.mark.parametrize("linked", [".venv", ".venv/lib", ".venv/lib/python3.11", ".venv/lib/python3.11/site-packages", ".venv/pyvenv.cfg"])
def test_an_environment_behind_a_link_is_not_the_trees_own(tmp_path: Path, linked: str) -> None:
    environment(tmp_path / "elsewhere" / ".venv", "private-1.0")
    environment(tmp_path / "tree" / ".venv", "one-1.0")
    assert workspace.describe_packages(str(tmp_path / "tree"), tmp_path / "cache", PRINT) is not None
    place = tmp_path / "tree" / linked
    place.rename(tmp_path / "moved")
    place.symlink_to(tmp_path / "elsewhere" / linked)
    assert workspace.describe_packages(str(tmp_path / "tree"), tmp_path / "cache", PRINT) is None


@pytest.mark.parametrize("hostile", ["nested", "long", "zero", "pipe", "folder", "outside", "absolute"])
def test_a_hostile_pyproject_is_passed_over(tmp_path: Path, hostile: str) -> None:
    environment(tmp_path / "envs" / "mine", "private-1.0")
    tree = tmp_path / "tree"
    tree.mkdir()
    file = tree / "pyproject.toml"
    if hostile == "nested":
        file.write_text("a = " + "[" * 10_000 + "]" * 10_000)
    elif hostile == "long":
        file.write_text("[tool.pyright]\nvenv = 'mine'\n#" + "x" * (1 << 20))
    elif hostile == "zero":
        file.symlink_to("/dev/zero")
    elif hostile == "pipe":
        os.mkfifo(file)
    elif hostile == "folder":
        file.mkdir()
    else:
        file.write_text(f"[tool.pyright]\nvenvPath = '{'../envs' if hostile == 'outside' else tmp_path / 'envs'}'\nvenv = 'mine'\n")
    assert workspace.find_environment(tree) is None
    assert workspace.describe_packages(str(tree), tmp_path / "cache", PRINT) is None


def test_where_an_environment_is_found(tree: Path, tmp_path: Path) -> None:
    assert workspace.find_environment(tree) is None
    assert workspace.describe_packages(str(tree), tmp_path, PRINT) is None
    made = environment(tree / "envs" / "mine", "one-1.0")
    for text in ("[tool.pyright]\nvenvPath = 3", "[tool.pyright]\nvenv = 'absent'", "[tool", "tool = 3", "[tool]\npyright = 3", "\x00"):
        (tree / "pyproject.toml").write_text(text)
        assert workspace.find_environment(tree) is None, text
    (tree / "pyproject.toml").write_text("[tool.pyright]\nvenvPath = './envs'\nvenv = 'mine'\n")
    assert workspace.find_environment(tree) == made
    (tree / "venv").mkdir()
    assert workspace.find_environment(tree) == made, "a folder of that name alone is no environment"
    (tree / "venv" / "conda-meta").mkdir()
    assert workspace.find_environment(tree) == tree / "venv"
    assert workspace.find_environment(tree.parent) is None
    assert workspace.find_environment(environment(tree / ".venv").parent) == tree / ".venv"
    assert workspace.describe_packages(str(tree), tmp_path, PRINT) is None, "it holds no package"


# ------------------------------------------------------------------ the process


def test_built_followed_and_gone(tree: Path, tmp_path: Path, start: Callable[..., Indexer]) -> None:
    kept = workspace.describe_workspace(str(tree), tmp_path / "cache", PRINT)
    assert start(kept, "build").told("done")["files"] == 5
    assert (tmp_path / "cache" / "trees").stat().st_mode & 0o077 == 0, "it holds text of the tree"
    following = start(kept, "follow")
    following.told("following")
    (tree / "new.py").write_text("new = 1\n")
    assert following.told("done")["added"] == 1
    assert "new.py" in documents(kept.folder)
    tree.rename(tmp_path / "moved")
    with pytest.raises(ChildEndedError) as ended:  # the tree is gone: who started it decides
        following.told("end")
    assert ended.value.limit_s is None
    waiting = start(kept, "build")
    assert "is gone" in waiting.told("problem")["text"]
    (tmp_path / "moved").rename(tree)
    assert waiting.told("done")["files"] == 6


def test_two_servers_on_a_tree(tree: Path, tmp_path: Path, start: Callable[..., Indexer]) -> None:
    kept = workspace.describe_workspace(str(tree), tmp_path / "cache", PRINT)
    start(kept, "build").told("done")
    with lock_for_writing(Path(kept.folder)):
        other = start(kept, "build")
        assert other.told("problem") == {"text": f"another process writes to {kept.folder}: waiting for it", "waits": True}
    assert not other.told("done")["committed"], "there is nothing left to do"


@pytest.mark.parametrize("damage", ["MANIFEST", "tokenizer"])
def test_a_damaged_store_is_built_anew(tree: Path, tmp_path: Path, start: Callable[..., Indexer], damage: str) -> None:
    kept = workspace.describe_workspace(str(tree), tmp_path / "cache", PRINT)
    start(kept, "build").told("done")
    (path,) = (each for each in Path(kept.folder).iterdir() if each.name.startswith(damage))
    path.write_bytes(b"{}")
    assert start(kept, "build").told("done")["added"] == 5
    Datastore.open(kept.folder, verify="full").close()


def test_a_tree_without_text_is_waited_for(tmp_path: Path, start: Callable[..., Indexer]) -> None:
    (tmp_path / "tree").mkdir()
    waiting = start(workspace.describe_workspace(str(tmp_path / "tree"), tmp_path / "cache", PRINT), "build")
    assert "there is no text" in waiting.told("problem")["text"]
    (tmp_path / "tree" / "first.py").write_text("first = 1\n")
    assert waiting.told("done")["files"] == 1


def test_an_interrupted_build_leaves_nothing_and_is_begun_again(tree: Path, tmp_path: Path, start: Callable[..., Indexer]) -> None:
    for n in range(3000):
        (tree / f"more{n}.py").write_text(f"x = {n}\n" * 50)
    kept = workspace.describe_workspace(str(tree), tmp_path / "cache", PRINT)
    first = start(kept, "build")
    assert first.told("progress")["stage"] in ("looking", "reading", "sorting")
    assert first.end() == 0
    assert not Path(kept.folder).exists()
    assert start(kept, "build").told("done")["files"] == 3005


def test_a_file_that_cannot_be_read_is_named(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = corpus.open_beneath

    def locked(root: str, path: str) -> Any:
        if path == "0.py":
            raise PermissionError(13, "Permission denied")
        return before(root, path)

    monkeypatch.setattr(corpus, "open_beneath", locked)
    told: list[indexer_process.Report] = []
    kept = workspace.describe_workspace(str(tree), tree.parent / "cache", PRINT)
    indexer_process.bring_up_to_date(indexer_process.Job(kept, "build", to_canonical_json(BACKEND), "bytes", "test"), told.append)
    kind, facts = told[-1]
    assert (kind, facts["files"]) == ("done", 4)
    assert facts["named"] == [(f"{tree}/0.py", "Permission denied")]


def test_too_large_a_tree_is_told_by_the_process(tree: Path, tmp_path: Path, start: Callable[..., Indexer]) -> None:
    waiting = start(workspace.describe_workspace(str(tree), tmp_path / "cache", PRINT, max_files=5), "build")
    assert waiting.told("done")["files"] == 5
    waiting = start(workspace.describe_workspace(str(tree), tmp_path / "cache", PRINT, max_files=4), "build")
    assert "a tree may have 4; name a folder within it" in waiting.told("problem")["text"]


def test_files_that_cannot_be_watched_are_looked_through(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ngramspec.datastore import watch

    told: list[indexer_process.Report] = []
    kept = workspace.describe_workspace(str(tree), tree.parent / "cache", PRINT)
    job = indexer_process.Job(kept, "follow", to_canonical_json(BACKEND), "bytes", "test")
    indexer_process.bring_up_to_date(job, told.append)
    monkeypatch.setattr(indexer_process, "POLL_S", 0.05)
    monkeypatch.setattr(watch.watchfiles, "watch", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "no space left for watches")))
    seen = threading.Event()

    def say(what: indexer_process.Report) -> None:
        told.append(what)
        if what[0] == "done":
            seen.set()

    thread = threading.Thread(target=indexer_process.follow_changes, args=(job, say), daemon=True)
    thread.start()
    (tree / "new.py").write_text("new = 1\n")
    assert seen.wait(WAIT_S)
    tree.rename(tree.parent / "moved")
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert any(kind == "problem" and "cannot be watched" in facts["text"] for kind, facts in told)
