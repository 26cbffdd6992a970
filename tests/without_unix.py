"""Take away what Windows lacks: modules, and attributes of `os`, `signal` and `mmap`. A child process imports this first.

A folder cannot be opened then. What the standard library and other packages need of it is imported before, and `msvcrt`'s lock simulated.
"""

from __future__ import annotations

import asyncio  # noqa: F401
import builtins
import fcntl
import importlib
import io
import mmap
import os
import signal
import stat
import subprocess  # noqa: F401
import sys
import tempfile  # noqa: F401
import types
from typing import Any

import filelock

USED = (
    *("numpy", "numba", "faiss", "tokenizers", "torch", "transformers.modeling_utils", "transformers.models.llama.modeling_llama"),
    *("transformers.models.auto.modeling_auto", "uvicorn", "filelock", "watchfiles", "httpx", "multiprocessing.util", "anyio.to_thread"),
)
for _name in USED:
    importlib.import_module(_name)

MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "crypt", "nis", "ossaudiodev", "spwd", "posix_ipc")
OS = (
    *("O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK", "O_DIRECTORY", "O_PATH", "O_NOCTTY", "O_SYNC", "O_DSYNC", "pread"),
    *(
        "preadv",
        "pwrite",
        "pwritev",
        "sched_getaffinity",
        "sched_setaffinity",
        "sched_yield",
        "sysconf",
        "getuid",
        "geteuid",
        "getgid",
        "getegid",
    ),
    *(
        "fork",
        "killpg",
        "setsid",
        "getpgid",
        "setpgid",
        "posix_fadvise",
        "posix_fallocate",
        "fchmod",
        "fchown",
        "chown",
        "lchown",
        "mkfifo",
    ),
    *(
        "mkfifo",
        "statvfs",
        "fstatvfs",
        "getloadavg",
        "nice",
        "uname",
        "wait3",
        "wait4",
        "WNOHANG",
        "sync",
        "fdatasync",
        "openpty",
        "ctermid",
    ),
)
SIGNALS = (
    *("SIGHUP", "SIGKILL", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGUSR1", "SIGUSR2", "SIGPIPE", "SIGCHLD", "SIGQUIT", "setitimer", "alarm"),
    *("getitimer", "ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF", "pthread_kill", "pthread_sigmask", "sigwait", "pause", "siginterrupt"),
)
PAGES = ("PROT_READ", "PROT_WRITE", "MAP_SHARED", "MAP_PRIVATE", "MAP_ANONYMOUS", "MADV_HUGEPAGE", "MADV_WILLNEED", "MADV_DONTNEED")


def take_away() -> None:
    flock, exclusive = fcntl.flock, fcntl.LOCK_EX | fcntl.LOCK_NB
    lock = types.ModuleType("msvcrt")

    def locking(descriptor: int, mode: int, n_bytes: int) -> None:
        assert (mode, n_bytes) == (2, 1)
        try:
            flock(descriptor, exclusive)
        except BlockingIOError as error:
            raise PermissionError(13, "Permission denied") from error

    lock.locking, lock.LK_NBLCK = locking, 2  # type: ignore[attr-defined]
    sys.modules["msvcrt"] = lock
    filelock.FileLock = filelock.SoftFileLock  # type: ignore[misc]  # its form for Windows is not made on other systems
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for module, names in ((os, OS), (signal, SIGNALS), (mmap, PAGES)):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    os.supports_dir_fd.clear()
    opened = os.open

    def open_file(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        assert not more, "Windows has no dir_fd"
        descriptor = opened(path, flags, mode)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise PermissionError(13, "Permission denied", path)
        return descriptor

    os.open = open_file
    assert builtins.open is io.open


take_away()
