"""The child process that builds a store and keeps it up to date, at low priority beside the process that drafts from the store.

A `Job` enters as a line of JSON on standard input, reports leave as lines of JSON on standard output. The process ends when its standard
input is closed, also because its parent was killed; what it has begun to write is deleted then. Knows neither engines nor servers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from .corpus import CorpusOptions
from .errors import ContentsChangedError, DatastoreCorruptError, DatastoreError, DatastoreFormatError, DatastoreLockedError
from .format import MANIFEST
from .manifest import read_manifest
from .progress import Progress, ProgressCallback, Summary
from .recorder import summarize_manifest
from .workspace import StoreSpec, check_size, describe_packages

REPORT_S = 0.5  # between two reports of progress
RETRY_S = 2.0  # least pause after an attempt that failed
RETRY_FACTOR = 4  # the same pause in times what the attempt took, so that at most a fifth of the time is spent in vain
POLL_S = 10.0  # between looks at a tree that the system cannot watch
MEMORY = 1 << 30  # bytes for sorting; a larger corpus becomes several segments
# Priorities. A build takes what forward passes leave over and a tenth of a core that is always busy; with 19 it never came to an end on
# such a machine. A saved file is a matter of milliseconds, and somebody waits for it.
NICE = {"find_installed": 10, "build": 10, "follow": 5}


@dataclass(frozen=True, slots=True)
class Job:
    """What an indexer builds or follows."""

    kept: StoreSpec
    stage: Literal["build", "follow"]
    """build: until the store is there and up to date. follow: until that fails, or the tree is another one."""
    tokenizer: bytes
    """The tokenizer's canonical JSON."""
    name: str
    """What users call the tokenizer's model."""
    writer: str
    """The program that writes the store, for its manifest."""

    def to_message(self) -> dict[str, Any]:
        """Return the message that starts this job."""
        return asdict(self) | {"tokenizer": self.tokenizer.decode()}


def make_search_message(path: str, cache: Path, fingerprint: str) -> dict[str, Any]:
    """Return the message that starts `workspace.describe_packages`, which reads every file of the packages.

    `read_search_result` takes the answer.
    """
    return {"stage": "find_installed", "path": path, "cache": str(cache), "fingerprint": fingerprint}


def read_search_result(answer: dict[str, Any]) -> StoreSpec | None:
    """Return what `workspace.describe_packages` found. Raises DatastoreError."""
    if "error" in answer:
        raise DatastoreError(answer["error"])
    return None if answer["kept"] is None else _read_kept(answer["kept"])


# progress: a `Progress`. problem: `text`, and `waits` if another process is at it; it is tried again, unless it is `final`. done: a
# `Summary` of what was written, or of what was there. following: files are watched
Report = tuple[Literal["progress", "problem", "done", "following"], dict[str, Any]]
SendReport = Callable[[Report], None]


def serve() -> None:
    """Run the process: do the job that standard input names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # comes from the terminal: the parent decides
    signal.signal(signal.SIGTERM, _exit)
    message = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE[message["stage"]])
    with contextlib.suppress(SystemExit, KeyboardInterrupt, BrokenPipeError), os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # what a library prints is no report

        def send(answer: object) -> None:
            out.write(json.dumps(answer).encode() + b"\n")
            out.flush()

        if message["stage"] == "find_installed":
            send(_find_installed(message))
        else:
            job = Job(**message | {"kept": _read_kept(message["kept"]), "tokenizer": message["tokenizer"].encode()})
            run = {"build": bring_up_to_date, "follow": follow_changes}[job.stage]
            run(job, lambda report: send({"kind": report[0], "facts": report[1]}))


def _exit(signum: int, frame: object) -> None:
    raise SystemExit(0)


def _exit_with_parent() -> None:
    """Exit when standard input is closed, as the system does when the parent is killed."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


def _read_kept(fields: dict[str, Any]) -> StoreSpec:
    options: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields["options"].items()}
    known: dict[str, Any] = fields | {"paths": tuple(fields["paths"]), "options": CorpusOptions(**options)}
    return StoreSpec(**known)


def _find_installed(message: dict[str, Any]) -> dict[str, Any]:
    try:
        kept = describe_packages(message["path"], Path(message["cache"]), message["fingerprint"])
    except (DatastoreError, OSError) as error:
        return {"error": str(error)}
    return {"kept": None if kept is None else asdict(kept)}


def bring_up_to_date(job: Job, send: SendReport) -> None:
    """Build the store, or update the one that is there.

    What is in the way (another writer, a tree that is gone, a full disk) is reported once, and the attempt is repeated.
    """
    from . import build, update  # noqa: F401  # seconds of importing are no part of an attempt

    reported = ""
    while True:
        started = time.monotonic()
        try:
            send(("done", _get_facts(_build_or_update(job, _make_progress_reporter(send)))))
            return
        except (DatastoreError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            if isinstance(error, ContentsChangedError):
                send(("problem", {"text": f"{error}; they are looked at again at the next start", "waits": False, "final": True}))
                return
            if str(error) != reported:
                reported = str(error)
                if isinstance(error, DatastoreLockedError):
                    send(("problem", {"text": error.waiting, "waits": True}))
                else:
                    send(("problem", {"text": reported, "waits": False}))
            time.sleep(max(RETRY_S, RETRY_FACTOR * (time.monotonic() - started)))


def _build_or_update(job: Job, on_progress: ProgressCallback) -> Summary:
    from tokenizers import Tokenizer

    from .build import build
    from .update import update

    kept, folder = job.kept, Path(job.kept.folder)
    for path in filter(os.path.isdir, kept.paths):  # what is gone is said below
        if kept.max_files is not None:
            check_size(path, kept.max_files)
    try:
        manifest = read_manifest(folder)
    except DatastoreError:  # none, damaged, or of another format
        pass
    else:
        if kept.contents:  # it is what it is called by, whatever the tree holds now
            return replace(summarize_manifest(folder, manifest), committed=False)
        with contextlib.suppress(DatastoreCorruptError, DatastoreFormatError):
            return update(folder, options=kept.options, max_memory=MEMORY, writer=job.writer, on_progress=on_progress)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds the tree's text
    tokenizer = Tokenizer.from_str(job.tokenizer.decode())
    how: dict[str, Any] = {"options": kept.options, "router": True, "max_memory": MEMORY, "writer": job.writer, "on_progress": on_progress}
    return build(kept.paths, folder, tokenizer, job.name, contents=kept.contents, **how)


def _get_facts(summary: Summary) -> dict[str, Any]:
    return asdict(summary) | {"skipped": dict(summary.skipped), "secrets": dict(summary.secrets)}  # `asdict` breaks a Counter


def _make_progress_reporter(send: SendReport) -> ProgressCallback:
    last = 0.0

    def report(progress: Progress) -> None:
        nonlocal last
        if (now := time.monotonic()) - last > REPORT_S:
            last = now
            send(("progress", asdict(progress) | {"seconds_left": progress.seconds_left}))

    return report


def follow_changes(job: Job, send: SendReport) -> None:
    """Update the store whenever files change.

    Ends when the tree is gone or another one, or an update fails: `bring_up_to_date` waits until it can be done.
    """
    from watchfiles._rust_notify import WatchfilesRustInternalError

    from .update import update
    from .watch import watch

    stop, folder = threading.Event(), Path(job.kept.folder)
    before = _identify_folders(job.kept)
    threading.Thread(target=_wait_for_another_tree, args=(job.kept, before, stop), daemon=True).start()

    def report(what: Summary | Exception) -> None:
        if isinstance(what, Summary):
            send(("done", _get_facts(what)))
        elif not isinstance(what, DatastoreLockedError):  # another server's process, which is at the same files; `watch` tries again
            send(("problem", {"text": str(what), "waits": False}))
            stop.set()

    try:
        watch(folder, stop=stop, max_memory=MEMORY, writer=job.writer, on_outcome=report, on_ready=lambda _: send(("following", {})))
    except DatastoreError as error:
        report(error)
    except (WatchfilesRustInternalError, OSError) as error:  # the system's limit of watches, most often
        if isinstance(error, BrokenPipeError):
            raise
        send(("problem", {"text": f"its files cannot be watched ({error}): it is looked through every {POLL_S:g} s", "waits": False}))
        while not stop.wait(POLL_S):
            with contextlib.suppress(DatastoreError):
                done = update(folder, max_memory=MEMORY, writer=job.writer)
                if done.committed:
                    report(done)


def _wait_for_another_tree(kept: StoreSpec, before: list[Any], stop: threading.Event) -> None:
    while _identify_folders(kept) == before and (Path(kept.folder) / MANIFEST).exists():
        time.sleep(1)
    stop.set()


def _identify_folders(kept: StoreSpec) -> list[Any]:
    """Return what tells the folders from others of the same names."""
    found: list[Any] = []
    for path in kept.paths:
        try:
            status = Path(path).stat()
            found.append((status.st_dev, status.st_ino))
        except OSError:
            found.append(None)
    return found
