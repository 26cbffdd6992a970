"""Chat templates are programs of a model's author: they are rendered in child processes, within limits of time, memory and size.

A template and its variables enter, the rendered text leaves. A child renders with transformers' own function. Knows no tokenizer.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ngramspec.child_process import ChildEndedError, ChildProcess, Message, ProcessPool, answer_messages, limit_memory
from ngramspec.errors import NgramspecError

CPU_S = 1  # processor time of one rendering
WALL_S = 20.0  # time of one rendering on a machine that others keep busy
MEMORY = 1 << 30  # bytes of address space that a child may take beyond what it has when it has started
MAX_OUTPUT = 16 << 20  # characters of a rendered text: eight times what a request may have by default
N_PROCESSES = 2  # renderings at a time: one for long texts and one for short ones


class TemplateLimitError(NgramspecError):
    """Rendering the chat template takes more time, memory or text than a template may; the message says which."""


class TemplateProcesses:
    """The child processes that render templates. For any thread."""

    def __init__(self) -> None:
        self._pool = ProcessPool(lambda: ChildProcess(__name__, ("ngramspec", "transformers"), {}), N_PROCESSES)

    def prepare(self) -> None:
        """Start a child, which takes a second, if there is none: the first rendering will wait for less. Does nothing where none starts."""
        with contextlib.suppress(OSError):  # `render` tells
            self._pool.prepare()

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Render a template with these variables, all of them JSON.

        Raises TemplateLimitError, and ValueError for what the template itself refuses.
        """
        try:
            answer = self._pool.ask({"template": template, "variables": variables}, WALL_S)
        except OSError as error:
            raise TemplateLimitError(f"no process for rendering the chat template can be started: {error}") from None
        except ChildEndedError:
            raise TemplateLimitError(f"rendering the chat template takes more than {CPU_S} s, or more memory than it may") from None
        if "text" in answer:
            return str(answer["text"])
        raise (TemplateLimitError if answer["limit"] else ValueError)(answer["error"])


@cache
def get_template_processes() -> TemplateProcesses:
    """Return the processes that all models and requests share: they keep nothing of a rendering."""
    return TemplateProcesses()


# ------------------------------------------------------------------ in the child


class _OutOfTimeError(BaseException):
    """The rendering's processor time is over. It is not an Exception, which a filter of the template could catch."""


def serve() -> None:
    """Render the templates that the parent sends as `{"template", "variables"}`; answer `{"text"}` or `{"error", "limit"}`.

    The system ends a child that no signal interrupts after twice the processor time.
    """
    answer_messages(_make_renderer)


def _make_renderer(_: Message) -> Callable[[Message], Message]:
    import transformers.utils.chat_template_utils  # noqa: F401 - takes a second, and memory that is not the template's

    limit_cpu = _limit_resources()

    def render_message(message: Message) -> Message:
        limit_cpu(True)
        try:
            return _render(message)
        finally:
            limit_cpu(False)

    return render_message


def _limit_resources() -> Callable[[bool], None]:
    """Limit this process's memory. Returns what begins (True) and ends (False) the processor time of one rendering."""
    try:
        import resource
    except ImportError:  # on Windows the parent ends this process after WALL_S
        return lambda on: None

    with contextlib.suppress(OSError, ValueError):
        n_pages = int(Path("/proc/self/statm").read_text("utf-8").split()[0])
        limit_memory(n_pages * resource.getpagesize() + MEMORY)

    def out_of_time(*_: object) -> None:
        raise _OutOfTimeError

    signal.signal(signal.SIGVTALRM, out_of_time)

    def limit_cpu(on: bool) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 2 * CPU_S + 1, hard))
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S if on else 0)

    return limit_cpu


def _render(message: Message) -> Message:
    from transformers.utils.chat_template_utils import render_jinja_template

    variables = dict(message["variables"])
    try:
        # ([text], …), whatever its annotation says.
        rendered: Any = render_jinja_template(conversations=[variables.pop("messages")], chat_template=message["template"], **variables)
        text = str(rendered[0][0])
    except _OutOfTimeError:
        return {"limit": True, "error": f"rendering the chat template takes more than {CPU_S} s"}
    except MemoryError:
        return {"limit": True, "error": f"rendering the chat template takes more than {MEMORY} bytes"}
    except Exception as error:
        return {"limit": False, "error": f"{error}"[:1000] or type(error).__name__}
    if len(text) > MAX_OUTPUT:
        return {"limit": True, "error": f"the chat template makes a text of {len(text)} characters; it may have {MAX_OUTPUT}"}
    return {"text": text}
