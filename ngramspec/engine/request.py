"""A request under way: what was asked, the choices in the making, and how pieces and results reach whoever waits.

Sequences that gained something enter, `Delta`s leave for the request's sink, and its result for `result()`. Knows nothing of passes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import Protocol, TypeAlias, TypedDict

from ngramspec.engine.sequence import Sequence
from ngramspec.outputs import Completion, Delta
from ngramspec.sampling_params import SamplingParams
from ngramspec.tokenizer.encode import Prompt

log = logging.getLogger(__name__)

Deliver: TypeAlias = Callable[[Delta | Exception], None]


MANY = 32
"""Tokens that are brought to text together where nobody waits for pieces; more would hold up the other sequences."""


class Hints(TypedDict, total=False):
    """What a request may say beside its prompt. None of it changes a token."""

    speculation: bool
    """False: one token per pass."""
    prediction: Prompt
    """The output that is expected, text or token ids: an edited file's old text."""
    tenant: str | None
    """Finished answers are drafts for later requests of the same tenant, and computed prefixes are theirs to take over; None keeps both
    to this one."""
    datastores: Collection[str] | None
    """Names of the datastores that drafts may come from; None: all."""
    prefix_cache: bool
    """False: what is computed for this request is neither taken from earlier ones nor left to later ones."""


class Owner(Protocol):
    """What a request needs of the thread that steps."""

    def cancel(self, request: Request) -> None: ...

    def check_caller(self) -> None:
        """Raises CallbackError, EngineClosedError where the caller would wait forever."""


class Request:
    """A submitted prompt. Made by `Engine.submit`; `result()` waits, `cancel()` frees what it holds."""

    def __init__(
        self, completion: Completion, params: SamplingParams, seqs: list[Sequence], deliver: Deliver | None, thread: Owner, *,
        final_only: bool = False,
    ) -> None:  # fmt: skip
        """One of `seqs` per choice; `deliver` is called in the thread that steps, of pieces with the last one where it is `final_only`.
        None: nobody wants pieces."""
        self.params = params
        self.completion = completion
        self.seqs = seqs
        self._deliver, self._thread = deliver, thread
        self._n_unfinished = len(seqs)
        self._streams = deliver is not None and not final_only
        for seq in seqs:
            seq.streams = self._streams
        self._begun = False
        self._started = time.perf_counter()
        self._done = threading.Event()
        self._error: Exception | None = None

    def cancel(self) -> None:
        """Free the request's sequences before the next step; its result is what was written so far. From any thread, at any time."""
        self._thread.cancel(self)

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end. Raises the request's error, TimeoutError (the request goes on), CallbackError, EngineClosedError."""
        if not self.done:
            self._thread.check_caller()
        if not self._done.wait(timeout):
            raise TimeoutError(f"the request did not end within {timeout} s")
        if self._error is not None:
            raise self._error
        return self.completion

    # Called by the thread that steps only.

    def emit(self, seq: Sequence) -> None:
        """Deliver what the sequence gained since the last time, where anybody waits for it. Raises what its text raises."""
        if not self._streams and self._begun and not seq.finished and seq.n_untold < MANY:
            return
        delta = seq.delta()
        completion, now = self.completion, time.perf_counter() - self._started
        if not self._begun:
            self._begun = True
            completion.queued_s = min((s.admitted_s - self._started for s in self.seqs if s.admitted_s is not None), default=now)
            completion.cached_tokens = self.seqs[0].n_cached
        if not completion.ttft_s and seq.choice.token_ids:
            completion.ttft_s = now
        self._n_unfinished -= seq.finished
        if self._n_unfinished == 0:
            completion.duration_s = now
            delta.completion = completion
        self._hand(delta)
        if self._n_unfinished == 0:
            self._done.set()

    def end(self, error: Exception) -> None:
        """Nothing follows but this error."""
        self._error = error
        self._hand(error)
        self._done.set()

    def _hand(self, piece: Delta | Exception) -> None:
        if self._deliver is None or (not self._streams and isinstance(piece, Delta) and piece.completion is None):
            return
        try:
            self._deliver(piece)
        except Exception:  # of whoever submitted it: no matter of the other requests
            log.exception("a request's receiver failed; the request is cancelled")
            self._deliver = None
            self.cancel()
