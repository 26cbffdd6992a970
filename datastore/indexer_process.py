"""A process of its own that builds a store and keeps it up to date, out of the way of whoever started it.

What is to be kept enters as a `Job`, what happens leaves as messages through a pipe: `Told`. It ends when the other end of the pipe is
closed, also because the process that held it was killed; what it has begun to write is deleted then. Knows neither engines nor servers.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from .corpus import Skipped
from .errors import ContentsChangedError, DatastoreCorruptError, DatastoreError, DatastoreFormatError, DatastoreLockedError
from .format import MANIFEST, read_manifest
from .progress import Progress, Summary
from .workspace import Kept, check_size, installed

TELL_S = 0.5
RETRY_S = 2.0
RETRY_FACTOR = 4
"""Pause after an attempt that failed, in times what it took, so that at most a fifth of the time is spent in vain; at least RETRY_S."""
POLL_S = 10.0
"""Between looks at a tree that the system cannot watch."""
MEMORY = 1 << 30
"""Bytes for sorting; a larger corpus becomes several segments."""
NICE = {"build": 10, "follow": 5}
"""A build takes what passes leave over, and a tenth of a core that is always busy: with 19 it never came to an end on such a machine. A
saved file is a matter of milliseconds, and somebody waits for it."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a process is to do."""

    kept: Kept
    stage: Literal["build", "follow"]
    """build: until the store is there and up to date. follow: until that fails, or the tree is another one."""
    tokenizer: bytes
    """Its canonical JSON."""
    name: str
    """What users call it."""
    writer: str


Told = tuple[Literal["progress", "problem", "done", "following"], dict[str, Any]]
"""progress: a `Progress`. problem: `text`, and `waits` where another process is at it; it is tried again, unless it is `final`. done: a
`Summary` of what was written, or of what was there. following: files are watched."""
Say = Callable[[Told], None]


def run(job: Job, pipe: Connection) -> None:
    """The process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: whoever started it decides
    signal.signal(signal.SIGTERM, _end)
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE[job.stage])
    with contextlib.suppress(SystemExit, KeyboardInterrupt, BrokenPipeError):
        {"build": bring_up_to_date, "follow": follow}[job.stage](job, pipe.send)


_starting = threading.Lock()


def start_process(process: BaseProcess) -> None:
    """Start a process that imports nothing from the current folder, often a working tree, as `python -c` would; nor do its own children.

    Raises OSError.
    """
    with _starting:
        before = os.environ.get("PYTHONSAFEPATH")
        os.environ["PYTHONSAFEPATH"] = "1"
        try:
            process.start()
        finally:
            del os.environ["PYTHONSAFEPATH"]
            if before is not None:
                os.environ["PYTHONSAFEPATH"] = before


def find_installed(path: str, cache: Path, fingerprint: str) -> Kept | None:
    """`trees.installed`, in a process of its own, for it reads every file of the packages. Raises DatastoreError."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_find_installed, args=(path, cache, fingerprint, theirs), daemon=True)
    try:
        start_process(process)
        theirs.close()
        found: Kept | DatastoreError | None = ours.recv()
    except (EOFError, OSError) as error:
        raise DatastoreError(f"the packages of {path} cannot be read: {error or 'the process that reads them has ended'}") from error
    finally:
        ours.close()
    process.join()
    if isinstance(found, DatastoreError):
        raise found
    return found


def _find_installed(path: str, cache: Path, fingerprint: str, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE["build"])
    with contextlib.suppress(BrokenPipeError):
        try:
            pipe.send(installed(path, cache, fingerprint))
        except (DatastoreError, OSError) as error:
            pipe.send(DatastoreError(str(error)))


def bring_up_to_date(job: Job, say: Say) -> None:
    """Build the store, or update the one that is there. What is in the way (another writer, a tree that is gone, a full disk) is told once
    and waited for."""
    from . import build, update  # noqa: F401  # seconds of importing are no part of an attempt

    told = ""
    while True:
        started = time.monotonic()
        try:
            say(("done", _facts(_build_or_update(job, _teller(say)))))
            return
        except (DatastoreError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            if isinstance(error, ContentsChangedError):
                say(("problem", {"text": f"{error}; they are looked at again at the next start", "waits": False, "final": True}))
                return
            if str(error) != told:
                told = str(error)
                say(("problem", {"text": told, "waits": isinstance(error, DatastoreLockedError)}))
            time.sleep(max(RETRY_S, RETRY_FACTOR * (time.monotonic() - started)))


def _build_or_update(job: Job, tell: Callable[[Progress], None]) -> Summary:
    from tokenizers import Tokenizer

    from .build import build, summarize
    from .update import update

    kept, folder = job.kept, Path(job.kept.store)
    for path in filter(os.path.isdir, kept.paths):  # what is gone is said below
        if kept.max_files is not None:
            check_size(path, kept.max_files)
    try:
        manifest = read_manifest(folder)
    except DatastoreError:  # none, damaged, or of another format
        pass
    else:
        if kept.contents:  # it is what it is called by, whatever the tree holds now
            return replace(summarize(manifest, Skipped(), {}), committed=False)
        with contextlib.suppress(DatastoreCorruptError, DatastoreFormatError):
            return update(folder, options=kept.options, max_memory=MEMORY, writer=job.writer, tell=tell)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds the tree's text
    tokenizer = Tokenizer.from_str(job.tokenizer.decode())
    how: dict[str, Any] = {"options": kept.options, "router": True, "max_memory": MEMORY, "writer": job.writer, "tell": tell}
    return build(kept.paths, folder, tokenizer, job.name, contents=kept.contents, **how)


def _facts(summary: Summary) -> dict[str, Any]:
    return asdict(summary) | {"skipped": dict(summary.skipped), "secrets": dict(summary.secrets)}  # `asdict` breaks a Counter


def _teller(say: Say) -> Callable[[Progress], None]:
    last = 0.0

    def tell(progress: Progress) -> None:
        nonlocal last
        if (now := time.monotonic()) - last > TELL_S:
            last = now
            say(("progress", asdict(progress) | {"seconds_left": progress.seconds_left}))

    return tell


def follow(job: Job, say: Say) -> None:
    """Update the store whenever files change. Ends when the tree is gone or another one, or an update fails: `bring_up_to_date` waits until
    it can be done."""
    from watchfiles._rust_notify import WatchfilesRustInternalError

    from .update import update
    from .watch import watch

    stop, folder = threading.Event(), Path(job.kept.store)
    before = _identity(job.kept)
    threading.Thread(target=_until_other, args=(job.kept, before, stop), daemon=True).start()

    def outcome(what: Summary | Exception) -> None:
        if isinstance(what, Summary):
            say(("done", _facts(what)))
        elif not isinstance(what, DatastoreLockedError):  # another server's process, which is at the same files; `watch` tries again
            say(("problem", {"text": str(what), "waits": False}))
            stop.set()

    try:
        watch(folder, stop=stop, max_memory=MEMORY, writer=job.writer, say=outcome, ready=lambda _: say(("following", {})))
    except DatastoreError as error:
        outcome(error)
    except (WatchfilesRustInternalError, OSError) as error:  # the system's limit of watches, most often
        if isinstance(error, BrokenPipeError):
            raise
        say(("problem", {"text": f"its files cannot be watched ({error}): it is looked through every {POLL_S:g} s", "waits": False}))
        while not stop.wait(POLL_S):
            with contextlib.suppress(DatastoreError):
                done = update(folder, max_memory=MEMORY, writer=job.writer)
                if done.committed:
                    outcome(done)


def _until_other(kept: Kept, before: list[Any], stop: threading.Event) -> None:
    while _identity(kept) == before and (Path(kept.store) / MANIFEST).exists():
        time.sleep(1)
    stop.set()


def _identity(kept: Kept) -> list[Any]:
    """What tells a folder from another one of the same name."""
    found: list[Any] = []
    for path in kept.paths:
        try:
            status = Path(path).stat()
            found.append((status.st_dev, status.st_ino))
        except OSError:
            found.append(None)
    return found


def _end(signum: int, frame: object) -> None:
    raise SystemExit(0)


def _end_with(pipe: Connection) -> None:
    """End when the other end of the pipe is closed, as the system does for a process that is killed."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    os.kill(os.getpid(), signal.SIGTERM)
