"""Trees of strangers: nothing of them is run, and nothing outside them is read, when they are built, updated, watched and served."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import tiny_store

from ngramspec.datastore import Datastore, corpus, file_filters, workspace
from ngramspec.datastore.build import build
from ngramspec.datastore.corpus import CorpusOptions, Skipped
from ngramspec.datastore.update import update
from ngramspec.datastore.watch import watch
from ngramspec.server.repositories import Repositories

BACKEND = tiny.byte_tokenizer().backend_tokenizer
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
COMMANDS = """
[core]
    sshCommand = {0}
    fsmonitor = {0}
    hooksPath = {1}
    gitProxy = {0}
    pager = {0}
    editor = {0}
    askPass = {0}
    alternateRefsCommand = {0}
    excludesFile = {1}/outside
    attributesFile = {1}/attributes
[alias]
    ls-files = !{0}
    status = !{0}
[credential]
    helper = !{0}
[diff]
    external = {0}
[diff "d"]
    command = {0}
    textconv = {0}
[difftool "d"]
    cmd = {0}
[filter "f"]
    clean = {0}
    smudge = {0}
    process = {0}
    required = true
[gpg]
    program = {0}
[gpg "ssh"]
    program = {0}
    defaultKeyCommand = {0}
[interactive]
    diffFilter = {0}
[man "m"]
    cmd = {0}
[browser "b"]
    cmd = {0}
[merge "m"]
    driver = {0}
[mergetool "m"]
    cmd = {0}
[pager]
    ls-files = {0}
[sequence]
    editor = {0}
[sendemail]
    sendmailCmd = {0}
[ssh]
    variant = simple
[submodule "vendor"]
    update = !{0}
    url = ext::{0}
    active = true
[tar "x"]
    command = {0}
[trailer "t"]
    command = {0}
    cmd = {0}
[uploadpack]
    packObjectsHook = {0}
[url "ext::{0} "]
    insteadOf = https://
[protocol]
    allow = always
[protocol "ext"]
    allow = always
[http]
    proxy = ext::{0}
[init]
    templateDir = {1}
[include]
    path = {1}/config
[extensions]
    partialClone = origin
[remote "origin"]
    url = {2}
    promisor = true
    partialclonefilter = tree:0
    uploadpack = {0}
    receivepack = {0}
    vcs = ext
    proxy = {0}
"""
HOOKS = ("fsmonitor-watchman", "post-index-change", "post-checkout", "pre-commit", "reference-transaction", "pre-auto-gc", "update")
NOT_GIT = {
    **dict.fromkeys(("sitecustomize.py", "usercustomize.py", "conftest.py", "setup.py", "multiprocessing.py", "tokenizers.py"), "python"),
    **dict.fromkeys((".envrc", "Makefile", ".venv/bin/python", ".venv/bin/activate", ".githooks/pre-commit"), "shell"),
}
"""What tools and Python would run by its name."""


def git(root: Path, *arguments: str, **more: Any) -> bytes:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always")
    return subprocess.run(["git", *identity, "-C", str(root), *arguments], check=True, capture_output=True, **more).stdout


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def arm(root: Path, script: Path, url: str) -> None:
    """Have everything in a repository name a script."""
    folder = Path(os.fsdecode(git(root, "rev-parse", "--absolute-git-dir")).strip())
    with (folder / "config").open("a") as file:
        file.write(COMMANDS.format(script, script.parent, url))
    for name in HOOKS:
        for hooks in (folder / "hooks", script.parent):
            hooks.mkdir(exist_ok=True)
            shutil.copy(script, hooks / name)


def make_partial(root: Path, cone: str) -> None:
    """A sparse index and a tree object that is missing: whoever lists files with git fetches it."""
    git(root, "init", "-q", "-b", "main")
    write(root, {f"{cone}/kept.py": f"kept = '{root.name}'\n", "away/gone.py": "gone = 1\n", "away/deep/gone.py": "gone = 2\n"})
    write(root, {".gitattributes": "*.py filter=f diff=d merge=m\n"})
    git(root, "add", ".")
    git(root, "commit", "-qm", "1")
    git(root, "sparse-checkout", "set", "--cone", "--sparse-index", cone)
    missing = git(root, "rev-parse", "HEAD:away").decode().strip()
    (root / ".git" / "objects" / missing[:2] / missing[2:]).unlink()


@pytest.fixture
def armed(tmp_path: Path) -> tuple[Path, Path]:
    """(A repository with others in it, all of which try to run a script; a file that appears when it is run.)"""
    ran, script = tmp_path / "ran", tmp_path / "commands" / "script"
    script.parent.mkdir()
    script.write_text(f"#!/bin/sh\necho $0 $@ >> {ran}\n")
    script.chmod(0o755)
    tree, library = tmp_path / "tree", tmp_path / "library"
    for folder in (tree, library):
        folder.mkdir()
        make_partial(folder, "src")
    vendored = tree / "src" / "vendored"
    shutil.copytree(library, vendored)
    git(tree, "-c", "submodule.recurse=false", "clone", "-q", "--no-checkout", str(library), "src/module")
    git(tree / "src" / "module", "update-ref", "-d", "HEAD")
    write(tree / "src" / "module", {"module.py": "module = 1\n"})
    git(tree / "src" / "module", "add", "module.py")
    git(tree, "update-index", "--add", "--cacheinfo", f"160000,{git(library, 'rev-parse', 'HEAD').decode().strip()},src/module")
    lines = {"shell": f"{script} $0 # {{}}\n", "python": f"import os\nos.system('{script} ' + __file__)  # {{}}\n"}
    for folder in ("", "src/"):
        write(tree, {folder + name: lines[kind].format(folder + name) for name, kind in NOT_GIT.items()})
    write(tree, {".venv/pyvenv.cfg": "", ".venv/lib/python3.11/site-packages/x.pth": f"import os; os.system('{script} pth')\n"})
    (tree / ".venv/bin/python").chmod(0o755)
    for each, url in ((tree, "ssh://host/x"), (vendored, str(library)), (tree / "src" / "module", f"ext::{script}")):
        arm(each, script, url)
    return tree, ran


def texts(store: Path | str) -> set[str]:
    with Datastore.open(store) as opened:
        return {Path(document.path).name for document in opened.snapshot.iterate_documents()}


@needs_git
@pytest.mark.parametrize("untracked", [False, True])
def test_nothing_of_a_tree_is_run(armed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untracked: bool) -> None:
    tree, ran = armed
    monkeypatch.chdir(tree)
    store, options = tmp_path / "store", CorpusOptions(untracked=untracked, exclude=("*.js",))
    build([tree], store, BACKEND, "bytes", options=options)
    assert {"kept.py", "module.py"} <= texts(store)
    assert ("sitecustomize.py" in texts(store)) is untracked, "it is text like any other"
    write(tree, {"src/kept.py": "kept = 'changed'\n"})
    assert update(store).added == 1
    stop, ready = threading.Event(), threading.Event()
    watching = threading.Thread(target=watch, args=(store,), kwargs={"stop": stop, "on_ready": lambda _: ready.set()})
    watching.start()
    assert ready.wait(60)
    stop.set()
    watching.join(60)
    workspace.check_size(str(tree), 1000)
    workspace.describe_packages(str(tree), tmp_path / "cache", "print")
    assert not ran.exists(), ran.read_text()


@needs_git
def test_git_would_have_run_it(armed: tuple[Path, Path]) -> None:
    """The tree above does what it is for."""
    tree, ran = armed
    subprocess.run(["git", "-C", str(tree), "ls-files"], capture_output=True, check=False)
    assert ran.exists()


@needs_git
def test_nothing_of_a_tree_is_run_when_a_server_is_started_in_it(
    armed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes are Python's, which imports from the current folder unless it is told not to."""
    tree, ran = armed
    monkeypatch.chdir(tree)
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    ready = threading.Event()
    engine: Any = SimpleNamespace(add_datastore=lambda *_: ready.set(), tokenizer=tiny.byte_tokenizer(), name="m")
    repositories = Repositories({"a": str(tree)}, tmp_path / "cache", with_installed=True)
    repositories.start(engine)
    assert ready.wait(120), repositories.trees["a"].progress
    repositories.close()
    assert not ran.exists(), ran.read_text()


# ------------------------------------------------------------------ nothing outside


def documents(root: Path, **options: Any) -> tuple[set[str], Skipped]:
    found, skipped = tiny_store.read_documents(root, **options)
    return {each.text for each in found}, skipped


@needs_git
@pytest.mark.parametrize("untracked", [False, True])
def test_a_folder_of_tracked_files_that_becomes_a_link(tmp_path: Path, untracked: bool) -> None:
    tree = tmp_path / "tree"
    write(tree, {"a.py": "a\n", "d/conf.py": "inside\n", "e/f/conf.py": "deep\n"})
    write(tmp_path / "outside", {"conf.py": "outside\n", "f/conf.py": "outside, too\n"})
    git(tree, "init", "-q")
    git(tree, "add", ".")
    assert documents(tree, untracked=untracked)[0] == {"a\n", "inside\n", "deep\n"}
    found = corpus.find_files(corpus.resolve_sources([tree]), CorpusOptions(), Skipped())
    for name in ("d", "e"):
        shutil.rmtree(tree / name)
        (tree / name).symlink_to(tmp_path / "outside")
    expected, skipped = documents(tree, untracked=untracked)
    assert expected == {"a\n"}
    assert skipped.counts[file_filters.LINK] >= 2
    late = Skipped()
    assert {each.text for file in found for each in corpus.read_documents(file, CorpusOptions(), late)} == {"a\n"}, "it was listed before"
    assert len(late.named) == 2


@needs_git
@pytest.mark.parametrize(
    "path", ["../outside/conf.py", "{}/outside/conf.py", "d/../../outside/conf.py", "./a.py", "d//a.py", ".git/conf.py"]
)
@pytest.mark.parametrize("untracked", [False, True])
def test_an_entry_of_an_index_that_leads_out_of_the_tree(tmp_path: Path, path: str, untracked: bool) -> None:
    tree, path = tmp_path / "tree", path.format(tmp_path)
    write(tree, {"a.py": "a\n", "d/b.py": "b\n"})
    write(tmp_path, {"outside/conf.py": "outside\n"})
    git(tree, "init", "-q")
    write(tree, {".git/conf.py": "git's\n"})
    git(tree, "add", ".")
    index = (tree / ".git" / "index").read_bytes()
    write(tree, {".git/index": ""})
    (tree / ".git" / "index").write_bytes(with_entry(index, path.encode()))
    texts, skipped = documents(tree, untracked=untracked)
    assert texts == {"a\n", "b\n"}
    assert [name for name, why in skipped.named if "no place" in why or "its path" in why or "component" in why]


def with_entry(index: bytes, path: bytes, mode: int = 0o100644) -> bytes:
    """An index with one more entry in front, as version 2."""
    import hashlib

    count = int.from_bytes(index[8:12], "big") + 1
    entry = bytes(24) + mode.to_bytes(4, "big") + bytes(12) + bytes([1]) * 20 + min(len(path), 0xFFF).to_bytes(2, "big") + path
    entry += bytes(8 - len(entry) % 8)
    data = index[:8] + count.to_bytes(4, "big") + entry + index[12:-20]
    return data + hashlib.sha1(data).digest()


def test_a_source_that_becomes_a_link(tmp_path: Path) -> None:
    write(tmp_path, {"tree/inner/a.py": "a\n", "outside/conf.py": "outside\n"})
    store = tmp_path / "store"
    build([tmp_path / "tree" / "inner"], store, BACKEND, "bytes")
    shutil.rmtree(tmp_path / "tree" / "inner")
    (tmp_path / "tree" / "inner").symlink_to(tmp_path / "outside")
    with pytest.raises(corpus.CorpusError, match="a link is where"):
        update(store)
    assert texts(store) == {"a.py"}


# ------------------------------------------------------------------ rules


PATIENCE_S = 60


def test_ignore_rules_that_make_matchers_backtrack(tmp_path: Path) -> None:
    write(tmp_path, {".gitignore": "*a*a*a*a*a*a*a*a*b\n**/a*a*a*a*a*a*/**/*a*a*a*a*a*b\n", "a" * 60: "a", f"{'a' * 60}.py": "a\n"})
    write(tmp_path, {"/".join(["a" * 50] * 8) + "/c.py": "c\n"})
    started = time.monotonic()
    assert documents(tmp_path)[0] == {"a\n", "c\n"}
    assert time.monotonic() - started < PATIENCE_S


def test_ignore_rules_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ngramspec.datastore import listing

    write(tmp_path, {".gitignore": "".join(f"*{n}*a?[b]c\n" for n in range(20_000)), "a.py": "a\n"})
    monkeypatch.setattr(listing, "RULES_S", 0.05)
    with pytest.raises(corpus.CorpusError, match=r"takes more than 0.05 s"):
        documents(tmp_path)


@needs_git
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
def test_a_tree_of_another_user_keeps_to_gits_rules(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "a\n", "untracked.py": "untracked\n", "ignored.py": "ignored\n", ".gitignore": "ignored.py\n"})
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "a.py")
    write(tmp_path, {".git/info/exclude": "untracked.py\n"})
    for path in [tmp_path, *tmp_path.rglob("*")]:
        os.chown(path, 12345, 12345)
    for untracked in (False, True):
        texts, skipped = documents(tmp_path, untracked=untracked)
        assert texts == {"a\n"}
        assert not skipped.named


@needs_git
@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda index: index[:-1] + bytes([index[-1] ^ 1]), "checksum"),
        (lambda index: index[:40], "damaged"),
        (lambda index: b"", "damaged"),
        (lambda index: with_entry(index, b"x" * 5000), "4096 bytes"),
        (lambda index: index.replace(b"DIRC\0\0\0\2", b"DIRC\0\0\0\7"), "version is 7"),
    ],
)
def test_a_repository_that_cannot_be_read_is_named(tmp_path: Path, damage: Any, why: str) -> None:
    write(tmp_path, {"a.py": "a\n", "untracked.py": "untracked\n"})
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "a.py")
    index = tmp_path / ".git" / "index"
    index.write_bytes(damage(index.read_bytes()))
    texts, skipped = documents(tmp_path)
    assert texts == {"a\n", "untracked\n"}
    ((path, reason),) = skipped.named
    assert path == f"{tmp_path}/.git"
    assert why in reason
    assert "as if it were no repository" in reason


@pytest.mark.skipif(not Path("/proc/self/fdinfo").is_dir(), reason="the system does not list watches")
def test_links_are_not_watched_and_new_folders_are(tmp_path: Path) -> None:
    write(tmp_path, {"tree/a.py": "a\n", **{f"outside/{n}/x.py": "x\n" for n in range(50)}})
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "outside")
    store, before = tmp_path / "store", n_watches()
    build([tmp_path / "tree"], store, BACKEND, "bytes")
    stop, ready, saved = threading.Event(), threading.Event(), threading.Semaphore(0)
    more = {"stop": stop, "on_ready": lambda _: ready.set(), "on_outcome": lambda _: saved.release()}
    watching = threading.Thread(target=watch, args=(store,), kwargs=more)
    watching.start()
    try:
        assert ready.wait(60)
        assert n_watches() - before < 10
        for name in ("new/deep/b.py", "new/deep/c.py", "new/deep/er/d.py"):
            write(tmp_path / "tree", {name: f"{name}\n"})
            assert saved.acquire(timeout=60), name
    finally:
        stop.set()
        watching.join(60)
    assert texts(store) == {"a.py", "b.py", "c.py", "d.py"}


def n_watches() -> int:
    found = 0
    for path in Path("/proc/self/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            found += path.read_text().count("inotify wd:")
    return found
