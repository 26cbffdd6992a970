"""Child processes for work that may have to be killed: compiling a client's grammar, rendering a chat template, indexing a folder.

Each message is one line of JSON on a pipe. A child imports nothing from the current folder, ignores the keyboard's interrupt, and ends when
its standard input is closed, which the system does when the parent is killed. Knows nothing of the work itself.

`concurrent.futures` and `multiprocessing` do not fit: their pools cannot kill the process of one overdue task, they start Python without
`-I -S`, and they unpickle what a child sends, so that a child taken over by a hostile template could run code in the parent.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

START_S = 120.0  # for a child to start and import what it needs, on a machine that others keep busy

Message = dict[str, Any]


class ChildEndedError(Exception):
    """The child ended, or was killed, before it answered."""

    def __init__(self, limit_s: float | None) -> None:
        """Record the seconds after which the child was killed, `limit_s`, or None if it ended by itself."""
        super().__init__("the child process has ended" if limit_s is None else f"the child process was killed after {limit_s:g} s")
        self.limit_s = limit_s


# ------------------------------------------------------------------ in the parent


class ChildProcess:
    """One child. `send`, `receive` and `ask` are for one thread at a time; `kill`, `close_input` and `is_alive` are for any."""

    def __init__(self, module: str, packages: Sequence[str], setup: Message, *, use_site: bool = False, log_errors: bool = False) -> None:
        """Start Python on `module.serve()` and send it the message `setup`. Raises OSError if it cannot be started.

        `packages`: top-level packages that the child imports; it finds them where this process does. `use_site`: process the `.pth` files
        of this Python's own site-packages. `log_errors`: let the child write to this process's standard error.
        """
        code = f"import sys; sys.path += sys.argv[1:]; from {module} import serve; serve()"
        flags = ["-I"] if use_site else ["-I", "-S"]
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-c", code, *_find_import_folders(packages)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if log_errors else subprocess.DEVNULL,
            cwd=None if has_current_folder() else os.sep,
            start_new_session=True,  # an interrupt from the keyboard is not for it
        )
        self._limit_s: float | None = None
        self._is_ready = self._is_over = False
        self.send(setup)

    def wait_until_ready(self) -> None:
        """Wait for a child that runs `answer_messages`. Raises ChildEndedError, also after START_S."""
        if not self._is_ready:
            self.receive(START_S)
            self._is_ready = True

    def send(self, message: Message) -> None:
        assert self._process.stdin is not None
        line = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError, ValueError):  # if it has ended, or its input is closed, `receive` tells
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def receive(self, limit_s: float = math.inf) -> Message:
        """Return the child's next message. After `limit_s` it is killed. Raises ChildEndedError."""
        assert self._process.stdout is not None
        with self._kill_after(limit_s):
            line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            self._is_over = True
            raise ChildEndedError(self._limit_s)
        return dict(json.loads(line))

    def ask(self, message: Message, limit_s: float) -> Message:
        """Send a message and return the answer. A child that takes longer than `limit_s` is killed. Raises ChildEndedError."""
        with self._kill_after(limit_s):  # sending blocks, too, if the child does not read
            self.send(message)
            return self.receive()

    @contextlib.contextmanager
    def _kill_after(self, limit_s: float) -> Iterator[None]:
        """Kill the child if the `with` block takes longer than `limit_s`, which may be infinite."""
        if limit_s == math.inf:
            yield
            return
        timer = threading.Timer(limit_s, self.kill, [limit_s])
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()  # a child that it kills at the last moment must not look alive to whoever asks it next

    @property
    def is_alive(self) -> bool:
        return not self._is_over and self._process.poll() is None

    def kill(self, limit_s: float | None = None) -> None:
        """End the child now. `limit_s`: the limit that it exceeded, for ChildEndedError."""
        if limit_s is not None:
            self._limit_s = limit_s
        self._is_over = True
        self._process.kill()

    def close_input(self) -> None:
        """Have the child end by itself."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def close(self) -> int:
        """Kill the child if it still runs, release its pipes and return its exit status."""
        self._process.kill()
        return self.wait()

    def wait(self) -> int:
        """Wait until the child has ended by itself, release its pipes and return its exit status."""
        status = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        return status


class ProcessPool:
    """Up to `size` children that run `answer_messages`: started when needed, kept while idle, replaced when they end. For any thread."""

    def __init__(self, start: Callable[[], ChildProcess], size: int, share_s: float = math.inf) -> None:
        """Create an empty pool. `share_s`: a caller that waits for a child may kill one that has worked longer than this."""
        self._start, self._size, self._share_s = start, size, share_s
        self._forget_children()
        if hasattr(os, "register_at_fork"):
            forget = weakref.WeakMethod(self._forget_children)
            os.register_at_fork(after_in_child=lambda: None if (method := forget()) is None else method())

    def _forget_children(self) -> None:
        """Begin anew, at first and in a forked process: it has its parent's pipes and locks, and answers on a shared pipe would mix."""
        self._idle: list[ChildProcess] = []
        self._busy_since: dict[ChildProcess, float] = {}  # `time.monotonic`; infinite while a child still starts
        self._changed = threading.Condition()

    def prepare(self) -> None:
        """Have a child that is idle, or will be soon. Raises OSError."""
        with self._changed:
            if not self._idle:
                self._idle.append(self._start())

    def ask(self, message: Message, limit_s: float) -> Message:
        """Return a child's answer. It is killed after `limit_s`, or for a waiting caller after its share.

        Raises ChildEndedError, and OSError if no child can be started.
        """
        child = self._take()
        try:
            try:
                child.wait_until_ready()
            except ChildEndedError as error:
                raise OSError(f"it does not start: {error}") from None
            with self._changed:
                self._busy_since[child] = time.monotonic()
                self._changed.notify_all()
            return child.ask(message, limit_s)
        except BaseException:  # if the caller is interrupted, the answer is still to come: the next caller must not get it
            child.kill()
            raise
        finally:
            self._give_back(child)

    def _take(self) -> ChildProcess:
        with self._changed:
            while len(self._busy_since) >= self._size:
                oldest, since = min(self._busy_since.items(), key=lambda each: each[1])
                left_s = since + self._share_s - time.monotonic()
                if left_s <= 0:
                    oldest.kill(self._share_s)
                    del self._busy_since[oldest]
                else:
                    self._changed.wait(None if left_s == math.inf else left_s)
            self._idle = [each for each in self._idle if each.is_alive]
            child = self._idle.pop() if self._idle else self._start()
            self._busy_since[child] = math.inf
            return child

    def _give_back(self, child: ChildProcess) -> None:
        with self._changed:
            was_killed = self._busy_since.pop(child, None) is None
            if not was_killed and child.is_alive and len(self._idle) < self._size:
                self._idle.append(child)
            else:
                child.close()
                with contextlib.suppress(OSError):
                    self.prepare()  # the next caller need not wait until it has started
            self._changed.notify_all()

    def close(self) -> None:
        """End the idle children. Can be called any number of times; new ones are started when needed."""
        with self._changed:
            while self._idle:
                self._idle.pop().close()


def has_current_folder() -> bool:
    """Return whether the current folder is still there: in one that has been deleted, libraries cannot be imported."""
    try:
        Path.cwd()
    except OSError:
        return False
    return True


def _find_import_folders(packages: Sequence[str]) -> list[str]:
    """Return the folders that these packages, and those installed for this Python, are imported from."""
    specs = [importlib.util.find_spec(name) for name in packages]
    folders = [str(Path(spec.origin).parents[1]) for spec in specs if spec is not None and spec.origin is not None]
    return list(dict.fromkeys([*folders, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]))


# ------------------------------------------------------------------ in the child


def answer_messages(make_answer: Callable[[Message], Callable[[Message], Message]]) -> None:
    """Answer the parent's messages, in order, until standard input is closed.

    `make_answer` gets the setup message and returns the function that answers the others; `{}` then tells the parent that it is ready.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # what a library prints is no message
        answer, message = make_answer(json.loads(sys.stdin.buffer.readline())), Message()
        while True:
            out.write(json.dumps(message).encode() + b"\n")
            out.flush()
            line = sys.stdin.buffer.readline()
            if not line.endswith(b"\n"):
                return
            message = answer(json.loads(line))


def limit_memory(n_bytes: int) -> None:
    """Limit this process's address space. Does nothing on Windows."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))
