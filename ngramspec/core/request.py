"""A request under way: what was asked, the choices in the making, and how pieces and results reach whoever waits.

Made by `Engine.submit`; the engine's thread hands it what its sequences gained, and `deliver` takes it from there. Knows sequences, and
nothing of passes or of how they are run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import TypeAlias, TypedDict

from ngramspec.batch.params import SamplingParams
from ngramspec.batch.types import Completion, Delta
from ngramspec.core.sequence import Sequence
from ngramspec.text.encoding import Prompt

log = logging.getLogger(__name__)

Deliver: TypeAlias = Callable[[Delta | Exception], None]


class Hints(TypedDict, total=False):
    """What a request may say beside its prompt. None of it changes a token."""

    speculation: bool
    """False: one token per pass."""
    prediction: Prompt
    """The output that is expected, text or token ids: an edited file's old text."""
    tenant: str | None
    """Finished answers are drafts for later requests of the same tenant, and computed prefixes are theirs to take over; None keeps both
    to this one."""
    datastores: Several[str] | None
    """Names of the datastores that drafts may come from; None: all."""
    prefix_cache: bool
    """False: what is computed for this request is neither taken from earlier ones nor left to later ones."""


class Request:
    """A submitted prompt. Made by `Engine.submit`; `result()` waits, `cancel()` frees what it holds."""

    def __init__(self, completion: Completion, params: SamplingParams, deliver: Deliver, cancel: Callable[[Request], None]) -> None:
        """`cancel` is called from any thread, any number of times."""
        self.params = params
        self.completion = completion
        self._deliver, self._cancel = deliver, cancel
        self._seqs: list[Sequence] = []
        self._unfinished = params.n
        self._begun = False
        self._started = time.perf_counter()
        self._done = threading.Event()
        self._error: Exception | None = None

    def cancel(self) -> None:
        """Free the request's sequences before the next step; its result is what was written so far. From any thread, at any time."""
        self._cancel(self)

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end. Raises the request's error, or TimeoutError (the request goes on)."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"the request did not end within {timeout} s")
        if self._error is not None:
            raise self._error
        return self.completion

    # Called by the engine's thread only.

    def _emit(self, seq: Sequence) -> None:
        """Hand out what the sequence gained since the last time."""
        choice, n_shown = seq.choice, seq.n_shown
        now = time.perf_counter() - self._started
        if not self._begun:
            self._begun = True
            self.completion.queued_s = min((s.admitted_s - self._started for s in self._seqs if s.admitted_s is not None), default=now)
            self.completion.cached_tokens = self._seqs[0].n_cached
        if not self.completion.ttft_s and choice.token_ids:
            self.completion.ttft_s = now
        delta = Delta(
            choice.index,
            seq.new_text,
            choice.token_ids[n_shown:],
            choice.draft_sources[n_shown:],
            choice.finish_reason,
            texts=choice.texts[n_shown:],
            logprobs=choice.logprobs[n_shown:] if choice.logprobs is not None else None,
        )
        seq.new_text, seq.n_shown = "", len(choice.token_ids)
        self._unfinished -= seq.finished
        if self._unfinished == 0:
            self.completion.duration_s = now
            delta.completion = self.completion
        self._hand_out(delta)
        if self._unfinished == 0:
            self._done.set()

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._hand_out(error)
        self._done.set()

    def _hand_out(self, piece: Delta | Exception) -> None:
        try:
            self._deliver(piece)
        except Exception:  # of whoever submitted it: no matter of the other requests
            log.exception("a request's receiver failed; the request is cancelled")
            self._deliver = lambda _: None
            self.cancel()
