"""Chat templates are programs of a model's author: they are rendered in a process of their own, within limits of time, memory and size.

A template and what it can read enter, its text leaves. The other process renders with transformers' own function. Knows no tokenizer.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ngramspec.errors import NgramspecError

CPU_S, WALL_S, START_S = 1, 20, 120
"""Seconds of one rendering: of the processor, and in all, on a machine that others keep busy. And until the process has started."""
MEMORY = 1 << 30
"""Address space that the process may take beyond what it has when it has started."""
OUTPUT = 16 << 20
"""Characters of a rendered text: eight times what a request may have by default."""
AT_ONCE = 2
"""Renderings at a time: one for long texts and one for short ones."""
_SERVE = "import sys; sys.path += sys.argv[1:]; from ngramspec.server.template_process import serve; serve()"


class TemplateLimitError(NgramspecError):
    """Rendering the chat template takes more time, memory or text than a template may; the message says which."""


class TemplateProcesses:
    """The processes: started when one is wanted, and kept. From any thread."""

    def __init__(self) -> None:
        self._idle: list[_Process] = []
        self._lock, self._room = threading.Lock(), threading.Semaphore(AT_ONCE)

    def render(self, template: str, told: Mapping[str, Any]) -> str:
        """The text of a template that is told these variables, all of them JSON.

        Raises TemplateLimitError, and ValueError for what the template itself refuses.
        """
        question = json.dumps({"template": template, "told": told}).encode() + b"\n"
        with self._room:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            process = process or _Process()
            try:
                answer = process.ask(question)
            finally:
                if process.alive:
                    with self._lock:
                        self._idle.append(process)
                else:
                    process.close()
        if "text" in answer:
            return str(answer["text"])
        raise (TemplateLimitError if answer["limit"] else ValueError)(answer["error"])


@cache
def template_processes() -> TemplateProcesses:
    """Those of this process: they hold nothing of one model's or one request's, so that all share them."""
    return TemplateProcesses()


class _Process:
    def __init__(self) -> None:
        spec = importlib.util.find_spec("ngramspec")
        assert spec is not None
        assert spec.origin is not None
        folders = [str(Path(spec.origin).parents[1]), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        self._process = subprocess.Popen(  # in isolation, and an interrupt from the keyboard is not for it
            [sys.executable, "-I", "-S", "-c", _SERVE, *folders],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._ready = False

    def ask(self, question: bytes) -> dict[str, Any]:
        if not self._ready:
            if self._within(START_S, b"") != b"{}\n":
                raise TemplateLimitError("the process that renders chat templates does not start")
            self._ready = True
        line = self._within(WALL_S, question)
        if not line.endswith(b"\n"):
            self.close()
            return {"limit": True, "error": f"rendering the chat template takes more than {CPU_S} s, or more memory than it may"}
        return dict(json.loads(line))

    def _within(self, seconds: float, question: bytes) -> bytes:
        """The next line of its output; less if it ends, or is ended because that takes longer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(seconds, self._process.kill)
        timer.start()
        try:
            with contextlib.suppress(OSError):  # it has ended, as the answer will tell
                self._process.stdin.write(question)
                self._process.stdin.flush()
            return self._process.stdout.readline()
        finally:
            timer.cancel()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


# ------------------------------------------------------------------ in the other process


class _OutOfTimeError(BaseException):
    """Not an Exception, which a filter could catch."""


def serve() -> None:
    """Render for another process until it closes standard input; each line is JSON, first `{}` when this is ready.

    `{"template", "told"}` is answered by `{"text"}` or `{"error", "limit"}`. What no signal interrupts is ended by the system, with this
    process, after twice the time.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import transformers.utils.chat_template_utils  # noqa: F401 - takes a second, and memory that is not the template's

    limit_cpu = _limit()
    print("{}", flush=True)
    for line in sys.stdin:
        limit_cpu(True)
        try:
            answer = _rendered(json.loads(line))
        finally:
            limit_cpu(False)
        print(json.dumps(answer), flush=True)


def _limit() -> Any:
    """Bound this process's memory. Returns what begins (True) and ends the time of one rendering."""
    try:
        import resource
    except ImportError:  # on Windows the other process ends this one
        return lambda on: None

    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

    def out_of_time(*_: object) -> None:
        raise _OutOfTimeError

    signal.signal(signal.SIGVTALRM, out_of_time)

    def limit_cpu(on: bool) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 2 * CPU_S + 1, hard))
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S if on else 0)

    return limit_cpu


def _rendered(question: dict[str, Any]) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import render_jinja_template

    told = dict(question["told"])
    try:
        # ([text], …), whatever its annotation says.
        found: Any = render_jinja_template(conversations=[told.pop("messages")], chat_template=question["template"], **told)
        text = str(found[0][0])
    except _OutOfTimeError:
        return {"limit": True, "error": f"rendering the chat template takes more than {CPU_S} s"}
    except MemoryError:
        return {"limit": True, "error": f"rendering the chat template takes more than {MEMORY} bytes"}
    except Exception as error:
        return {"limit": False, "error": f"{error}"[:1000] or type(error).__name__}
    if len(text) > OUTPUT:
        return {"limit": True, "error": f"the chat template makes a text of {len(text)} characters; it may have {OUTPUT}"}
    return {"text": text}
