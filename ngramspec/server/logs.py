"""What the server writes to its log: one line a request, as text or JSON. Never a prompt, an answer or a key.

Facts about finished requests enter, lines on standard error leave.
"""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import queue
import threading
import time
from typing import Any, TextIO

access, server = logging.getLogger("ngramspec.access"), logging.getLogger("ngramspec.server")

WAITING_LINES = 10_000
FLUSH_S = 2


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        facts = getattr(record, "facts", None)
        line |= facts if facts is not None else {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


def log_request(facts: dict[str, Any]) -> None:
    """Log a request. `facts`: id, method, route, status, duration_ms, and what `queue` and the middleware have added."""
    more = " ".join(
        f"{name}={value}" for name, value in facts.items() if name not in ("event", "method", "route", "status") and value != ""
    )
    access.info("%s %s %s %s", facts["method"], facts["route"], facts["status"], more, extra={"facts": facts})


def log_event(name: str, text: str, **facts: Any) -> None:
    """Log something that happens to the server: a sentence for people, facts for programs."""
    server.info("%s", text, extra={"facts": {"event": name, "message": text, **facts}})


class Log(logging.handlers.QueueHandler):
    """Writes lines from a thread of its own. Where whoever reads them has stopped, they are dropped: the server does not wait."""

    def __init__(self, writer: logging.Handler) -> None:
        self._lines: queue.Queue[logging.LogRecord | None] = queue.Queue(WAITING_LINES)
        super().__init__(self._lines)
        self._writer = writer
        self._thread = threading.Thread(target=self._write, name="ngramspec-log", daemon=True)
        self._thread.start()

    def enqueue(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(record)

    def stop(self) -> None:
        """Write what is waiting, for a moment."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=FLUSH_S)
        self._thread.join(FLUSH_S)

    def _write(self) -> None:
        while (record := self._lines.get()) is not None:
            self._writer.handle(record)


def configure(log_format: str, level: str = "INFO", stream: TextIO | None = None) -> Log:
    """Write the log in this format to a stream, by default standard error. `stop()` what is returned at the end."""
    writer = logging.StreamHandler(stream)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    writer.setFormatter(JsonFormatter() if log_format == "json" else plain)
    root = logging.getLogger()
    root.handlers[:] = [log := Log(writer)]
    root.setLevel(logging.WARNING)
    logging.getLogger("ngramspec").setLevel(level)
    return log
