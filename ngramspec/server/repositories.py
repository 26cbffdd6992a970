"""The working trees that the server drafts from: each has a store, built and kept up to date by a child process.

Folders enter at the start; stores are added to the engine when they are ready, and the state of each is logged and shown to administrators.
The address of a tree is `/repo/NAME/…`: requests at it draft from the tree's stores, and from no other tree's unless they name it. Knows
neither how stores are built nor what is in a request.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ngramspec import __version__
from ngramspec.child_process import ChildEndedError, ChildProcess, Message
from ngramspec.datastore import Datastore, DatastoreError, indexer_process, workspace
from ngramspec.datastore.tokens import hash_tokenizer_json, to_canonical_json
from ngramspec.engine.llm_engine import Engine
from ngramspec.server import logs

RESTART_S = 1.0  # before an indexer is started again whose tree has gone or is another one now
RETRY_S = 30.0  # before an indexer is started again that failed
END_S = 5.0  # for an indexer to delete what it has begun to write
LOG_S = 10.0  # between log lines about one build


@dataclass(slots=True)
class IndexingProgress:
    """The state of a store. Written by its thread, `state` last, and read by others."""

    state: Literal["waiting", "building", "ready", "followed", "failed"] = "waiting"
    """waiting: to be begun, or for another process that builds it. failed: it is tried again. followed: each saved file is read."""
    ready: bool = False
    """The engine drafts from it."""
    files: int = 0
    """Number of files that were read, while the store is built."""
    n_files: int = 0
    """Number of all files, while the store is built."""
    seconds_left: float | None = None
    message: str = ""


@dataclass(slots=True)
class ServedRepository:
    """A working tree and its stores."""

    name: str
    path: str
    stores: list[str]
    """Names of its stores: its own, and its packages'."""
    progress: dict[str, IndexingProgress] = field(default_factory=dict)
    """The progress of each store, by its name."""

    @property
    def address(self) -> str:
        """The beginning of the addresses of its requests."""
        return f"/repo/{self.name}"


class Repositories:
    """The working trees of one server."""

    def __init__(
        self,
        paths: Mapping[str, str] | None = None,
        cache: Path = Path(),
        *,
        with_installed: bool = False,
        max_files: int | None = None,
    ) -> None:
        """Take trees by name: `paths`, absolute, links resolved. `cache`: folder for stores. `max_files`: most files of text in a tree."""
        self.trees = {name: ServedRepository(name, path, [name]) for name, path in (paths or {}).items()}
        self._cache, self._with_installed = cache, with_installed
        self._max_files = max_files or workspace.MAX_FILES
        self._indexers: list[_IndexerThread] = []
        self._lock, self._closed = threading.Lock(), False

    def __len__(self) -> int:
        return len(self.trees)

    def start(self, engine: Engine) -> None:
        """Start building and following the stores, and draft from those that are ready. Returns at once."""
        if not self.trees:
            return
        tokenizer = to_canonical_json(engine.tokenizer.backend_tokenizer)
        fingerprint = hash_tokenizer_json(tokenizer)
        for each in self.trees.values():
            self._start_store(
                engine, each, each.name, workspace.describe_workspace(each.path, self._cache, fingerprint, self._max_files), tokenizer
            )
        if self._with_installed:
            arguments = engine, tokenizer, fingerprint
            threading.Thread(target=self._start_packages, args=arguments, name="ngramspec-repositories-packages", daemon=True).start()
        threading.Thread(target=self._delete_unused, name="ngramspec-repositories-clear", daemon=True).start()

    def _start_store(self, engine: Engine, tree: ServedRepository, name: str, kept: workspace.StoreSpec, tokenizer: bytes) -> None:
        """Build and follow one of a tree's stores, unless another tree has it already."""
        with self._lock:
            if self._closed:
                return
            indexer = next((each for each in self._indexers if each.name == name), None)
            if is_new := indexer is None:
                indexer = _IndexerThread(engine, name, kept, tokenizer)
                self._indexers.append(indexer)
            tree.progress[name] = indexer.progress
            if name not in tree.stores:
                tree.stores.append(name)
            if is_new:
                indexer.start()

    def _start_packages(self, engine: Engine, tokenizer: bytes, fingerprint: str) -> None:
        """Build the stores of the packages that are installed for the trees. Packages are identified by their files' contents."""
        for each in self.trees.values():
            try:
                packages = _find_installed(each.path, self._cache, fingerprint)
            except DatastoreError as error:
                logs.log_event("repository", f"{each.name}: {error}")
                continue
            if packages is not None:
                workspace.mark_used(packages)
                self._start_store(engine, each, Path(packages.folder).name, packages, tokenizer)
            else:
                where = "in it (.venv, venv), with packages; one that is linked or named elsewhere is not read"
                logs.log_event("repository", f"{each.name}: {each.path} has no virtual environment {where}")

    def _delete_unused(self) -> None:
        """Delete the stores of trees that are long gone."""
        for text in workspace.delete_unused_stores(self._cache):
            logs.log_event("repository", text)

    def close(self) -> None:
        """End the indexers."""
        with self._lock:
            self._closed = True
        for each in self._indexers:
            each.end()
        for each in self._indexers:
            each.wait()

    def get_hidden_stores(self, name: str | None) -> frozenset[str]:
        """Return the stores that requests at a tree's address (None: the server's own) use only if they name them. Raises KeyError.

        At the server's own address one tree is everybody's; of several, none is.
        """
        if name is None and len(self.trees) < 2:
            return frozenset()
        shown = set() if name is None else set(self.trees[name].stores)
        return frozenset(store for each in self.trees.values() for store in each.stores) - shown


def _start_indexer(message: Message) -> ChildProcess:
    """Start an indexer. Raises OSError."""
    packages = "ngramspec", "numpy", "tokenizers"
    return ChildProcess("ngramspec.datastore.indexer_process", packages, message, use_site=True, log_errors=True)


def _find_installed(path: str, cache: Path, fingerprint: str) -> workspace.StoreSpec | None:
    """Return the store of the packages that are installed for a tree, found by a child process. Raises DatastoreError."""
    try:
        child = _start_indexer(indexer_process.make_search_message(path, cache, fingerprint))
    except OSError as error:
        raise DatastoreError(f"the packages of {path} cannot be read: {error}") from error
    try:
        return indexer_process.read_search_result(child.receive())
    except ChildEndedError as error:
        raise DatastoreError(f"the packages of {path} cannot be read: the process that reads them has ended") from error
    finally:
        child.close()


class _IndexerThread(threading.Thread):
    """Runs the child processes that build and follow one store, and has the engine draft from it."""

    def __init__(self, engine: Engine, name: str, kept: workspace.StoreSpec, tokenizer: bytes) -> None:
        super().__init__(name=name, daemon=True)
        self.progress = IndexingProgress()
        self._engine, self._store, self._kept, self._tokenizer = engine, name, kept, tokenizer
        self._ended = threading.Event()
        self._child: ChildProcess | None = None
        self._lock = threading.Lock()  # around the process that runs
        self._logged_s = 0.0
        self._is_final = False  # trying again would not help

    def run(self) -> None:
        with contextlib.suppress(DatastoreError):
            Datastore.open(self._kept.folder).close()
            self._add_to_engine()
        if self.progress.ready and not self._kept.follow:
            return
        while not self._ended.is_set():
            pause_s = RETRY_S
            if self._run_indexer("build") and self.progress.ready:
                if not self._kept.follow:
                    return
                self._run_indexer("follow")
                self.progress.state, pause_s = "ready", RESTART_S
            if self._is_final:
                return
            self._ended.wait(pause_s)

    def end(self) -> None:
        """Tell the thread and its child process to end. For any thread; can be called any number of times."""
        with self._lock:
            self._ended.set()
            if self._child is not None:
                self._child.close_input()

    def wait(self) -> None:
        """Wait until the thread has ended, after `end`. A child that does not end in time is killed; the next writer deletes its files."""
        self.join(END_S)
        with self._lock:
            if self._child is not None:
                self._child.kill()
        self.join(END_S)

    def _run_indexer(self, stage: Literal["build", "follow"]) -> bool:
        """Run one child process from its start to its end. Returns whether it reported that the store is there."""
        job = indexer_process.Job(self._kept, stage, self._tokenizer, self._engine.name, f"ngramspec {__version__}")
        try:
            child = _start_indexer(job.to_message())
        except OSError as error:
            self._handle_report("problem", {"text": f"no process can be started for it: {error}", "waits": False})
            return False
        with self._lock:
            self._child = child
            if self._ended.is_set():
                child.close_input()
        done = False
        try:
            if not self.progress.ready:
                self.progress.state = "building"
            while True:
                report = child.receive()
                done |= report["kind"] == "done"
                self._handle_report(report["kind"], report["facts"])
        except ChildEndedError:
            child.wait()
        finally:
            with self._lock:
                self._child = None
                child.close_input()  # after an error here the child still runs, and ends by itself
        return done

    def _handle_report(self, kind: str, facts: dict[str, Any]) -> None:
        progress = self.progress
        if kind == "progress":
            progress.files, progress.n_files, progress.seconds_left = facts["files"], facts["n_files"], facts["seconds_left"]
            progress.message = facts["stage"]
            progress.state = "building"
            now = time.monotonic()
            if facts["stage"] == "reading" and facts["n_files"] and now - self._logged_s > LOG_S:
                left = facts["seconds_left"]
                self._logged_s = now
                self._log(f"{facts['files']:,} of {facts['n_files']:,} files are read" + (f", about {left:.0f} s left" if left else ""))
        elif kind == "problem":
            progress.message, progress.state = facts["text"], "waiting" if facts["waits"] else "failed"
            self._is_final = facts.get("final", False)
            self._log(facts["text"])
        elif kind == "following":
            progress.message, progress.state = "", "followed"
            self._log("its files are followed")
        else:
            self._finish_build(facts)

    def _finish_build(self, facts: dict[str, Any]) -> None:
        progress = self.progress
        progress.state = "followed" if progress.state == "followed" else "ready"
        progress.message, progress.seconds_left = "", None
        if not progress.ready:
            self._add_to_engine()
        for path, why in facts["named"]:
            self._log(f"{path} is left out: {why}")
        if facts["committed"]:
            self._log(
                f"{facts['added']:,} files read, {facts['removed']:,} dropped in {facts['seconds'].get('total', 0):.1f} s; "
                f"{facts['files']:,} files, {facts['tokens']:,} tokens"
                + (f"; left out: {left_out}" if (left_out := ", ".join(f"{n:,} {why}" for why, n in facts["skipped"].items())) else "")
            )

    def _add_to_engine(self) -> None:
        """Have the engine draft from the store. It picks up later generations by itself."""
        try:
            self._engine.add_datastore(self._store, self._kept.folder)
        except Exception as error:  # such as an engine that was closed: what is said here is all that is heard of it
            self.progress.message, self.progress.state = str(error), "failed"
            self._log(str(error))
        else:
            self.progress.ready, self.progress.state = True, "ready"
            self._log(f"drafts come from {self._kept.folder}")

    def _log(self, text: str) -> None:
        logs.log_event("repository", f"{self._store}: {text}", store=self._store, path=self._kept.paths[0], state=self.progress.state)
