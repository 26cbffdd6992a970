"""Remember what was suggested at a cursor: while somebody types along a suggestion, what is left of it is the best draft there is.

Texts around cursors and suggestions enter, the rest of an earlier suggestion leaves. Knows neither tokens nor requests. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import NamedTuple

MAX_TENANTS = 256
PER_TENANT = 16  # suggestions: an editor's latest, in a few files
TAIL_CHARS = 400  # of the text before the cursor, by which the place is found again
HEAD_CHARS = 400  # of the text after it
MAX_CHARS = 4000  # of a suggestion


class _Suggestion(NamedTuple):
    tail: str
    head: str
    text: str


class Suggestions:
    """The latest suggestions of each tenant."""

    def __init__(self) -> None:
        self._of_tenant: OrderedDict[str, deque[_Suggestion]] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, tenant: str | None, prefix: str, suffix: str, text: str) -> None:
        """Remember that `text` was suggested between prefix and suffix. A `tenant` of None shares nothing, with itself neither."""
        if tenant is None or not text:
            return
        with self._lock:
            latest = self._of_tenant.setdefault(tenant, deque(maxlen=PER_TENANT))
            latest.appendleft(_Suggestion(prefix[-TAIL_CHARS:], suffix[:HEAD_CHARS], text[:MAX_CHARS]))
            self._of_tenant.move_to_end(tenant)
            if len(self._of_tenant) > MAX_TENANTS:
                self._of_tenant.popitem(last=False)

    def find(self, tenant: str | None, prefix: str, suffix: str) -> str | None:
        """Return what is left of the latest suggestion of which all that was typed since is the beginning; None if there is none."""
        if tenant is None:
            return None
        with self._lock:
            latest = list(self._of_tenant.get(tenant, ()))
        head = suffix[:HEAD_CHARS]
        for each in latest:
            at = prefix.rfind(each.tail, max(len(prefix) - len(each.tail) - len(each.text), 0)) if each.tail else 0
            if at < 0 or each.head != head:
                continue
            typed = prefix[at + len(each.tail) :]
            if each.text.startswith(typed) and len(typed) < len(each.text):
                return each.text[len(typed) :]
        return None
