"""A request: its parameters, its sequences, and how deltas and the result reach the caller.

Sequences that got tokens go in, `Delta`s come out for the request's receiver, and the completion for `result()`. Knows nothing of passes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Several
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, TypedDict

from ngramspec.engine.sequence import Sequence
from ngramspec.errors import InvalidInputError
from ngramspec.foreign_names import explain_parameters
from ngramspec.options import options_of
from ngramspec.outputs import Choice, Completion, Delta
from ngramspec.sampling_params import SamplingOptions, SamplingParams
from ngramspec.tokenizer.encode import Prompt

log = logging.getLogger(__name__)

Deliver: TypeAlias = Callable[[Delta | Exception], None]
Files: TypeAlias = Several[tuple[str, str]] | Mapping[str, str]  # path and text

_SAMPLING = options_of(SamplingParams)
DETOKENIZED_AT_ONCE = 32  # tokens that become text in one go if nobody waits for deltas; more would delay the other sequences


class Hints(TypedDict, total=False):
    """Optional hints of a request. None of them changes a token."""

    speculation: bool
    """False: one token per pass."""
    prediction: Prompt
    """The expected output, text or token ids: an edited file's old text."""
    tenant: str | None
    """Whose request this is. Its output and its prefix are reused for later requests of the same tenant; None shares neither."""
    datastores: Collection[str] | None
    """Names of the datastores that drafts may come from; None: all."""
    cursor: tuple[str, str]
    """What stands before and after the text that is asked for. What is left of an earlier answer at this place is the prediction, unless
    there is another: people type along what was suggested to them."""
    prefix_cache: bool
    """False: this request neither uses the prefix cache nor leaves anything in it."""
    next_prompts: Callable[[str], Iterable[Several[int]]]
    """Called with what was written, once the request has ended and nothing else runs, in the engine's thread: returns token ids with which
    the tenant's next prompts probably begin, in order of urgency. They are computed into the prefix cache until a request comes, which
    waits for one step of an iterator at most. What a cancelled request has written is "": nobody has seen it."""


class PromptOptions(SamplingOptions, Hints, total=False):
    """The keywords of a prompt: fields of `SamplingParams`, and hints."""


class BeamControl(TypedDict, total=False):
    """The tenant of a beam search, and when it ends early."""

    tenant: str | None
    """Whose prompts it shares what was computed for; None: nobody's."""
    should_stop: Callable[[], bool]
    """Asked before each pass, in the engine's thread."""


class InfillFiles(TypedDict, total=False):
    """What a prompt that fills a gap shows beside the texts before and after it."""

    extra: Files
    """Further files or parts of files, the least useful first."""
    path: str | None
    """That of the file being edited."""
    repo: str | None
    """The repository's name."""


class InfillOptions(PromptOptions, InfillFiles, total=False):
    """The keywords of an infill: those of a prompt, and what the prompt shows beside."""


class ChatFields(TypedDict, total=False):
    """How the template is asked for a chat's prompt."""

    tools: Several[Mapping[str, Any]]
    """OpenAI's declarations of functions."""
    tool_choice: str | Mapping[str, Any] | None
    """Which tools may be called: "auto", "none", "required" or a tool's name."""
    parallel_tool_calls: bool | None
    """False: one call at most; None: one if a call is required, else any number."""
    chat_template_kwargs: Mapping[str, Any] | None
    """What the model's template reads beside messages and tools, such as {"enable_thinking": False}."""
    continue_final_message: bool
    """Go on with the last message, which is the assistant's."""


class ChatOptions(PromptOptions, ChatFields, total=False):
    """The keywords of a chat: those of a prompt, and how the template is asked for one."""


def take_options(options: Mapping[str, Any], kind: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keywords into those of a TypedDict and the others."""
    mine = {name: value for name, value in options.items() if name in kind.__annotations__}
    return mine, {name: value for name, value in options.items() if name not in mine}


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], Hints]:
    """Return the sampling parameters and the hints among the keywords of a prompt. Raises TypeError for others."""
    sampling = {name: value for name, value in options.items() if name in _SAMPLING}
    hints = {name: value for name, value in options.items() if name not in _SAMPLING}
    if unknown := hints.keys() - Hints.__annotations__.keys():
        raise TypeError(explain_parameters(sorted(unknown), [*_SAMPLING, *Hints.__annotations__]))
    return sampling, hints  # type: ignore[return-value]  # its keys were checked


def merge_params(params: SamplingParams | None, sampling: Mapping[str, Any]) -> SamplingParams:
    """Return parameters with those that were given as keywords in the place of their own. Raises InvalidInputError."""
    if params is None:
        return SamplingParams(**sampling)
    if not isinstance(params, SamplingParams):
        raise InvalidInputError(f"params must be SamplingParams, got {type(params).__name__}")
    return replace(params, **sampling) if sampling else params


class EngineThread(Protocol):
    """What a request needs of the engine's thread (`thread.StepThread`)."""

    def cancel(self, request: Request) -> None: ...

    def check_caller(self) -> None:
        """Raise CallbackError or EngineClosedError if the caller would wait forever."""


class Request:
    """A submitted prompt. Made by `Engine.submit`; `result()` waits, `cancel()` frees what it holds."""

    def __init__(
        self, completion: Completion, params: SamplingParams, seqs: list[Sequence], deliver: Deliver | None, thread: EngineThread, *,
        final_only: bool = False, on_end: Several[Callable[[Choice], None]] = (),
    ) -> None:  # fmt: skip
        """Make a request with one of `seqs` per choice.

        `deliver` is called in the engine's thread with each delta, or if `final_only` with the last one; None: nobody wants deltas.
        `on_end` are called with the first choice once the request has ended, cancelled or not.
        """
        self.params = params
        self.completion = completion
        self.seqs = seqs
        self._deliver, self._thread, self._on_end = deliver, thread, on_end
        self._n_unfinished = len(seqs)
        self._streams = deliver is not None and not final_only
        for seq in seqs:
            seq.streams = self._streams
        self._begun = False
        self._started = time.perf_counter()
        self._done = threading.Event()
        self._error: Exception | None = None

    def cancel(self) -> None:
        """Free the request's sequences before the next step; its result is what was written so far. Safe from any thread."""
        self._thread.cancel(self)

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end. Raises the request's error, TimeoutError (the request goes on), CallbackError, EngineClosedError."""
        self.check_caller()
        if not self._done.wait(timeout):
            raise TimeoutError(f"the request did not end within {timeout} s")
        if self._error is not None:
            raise self._error
        return self.completion

    def check_caller(self) -> None:
        """Raise CallbackError or EngineClosedError if the caller would wait forever."""
        if not self.done:
            self._thread.check_caller()

    # Only the engine's thread calls the following.

    def emit(self, seq: Sequence) -> bool:
        """Deliver the sequence's new tokens, if anybody waits for them -> whether they end the request. Raises what its text raises."""
        completion, now = self.completion, time.perf_counter() - self._started
        if not self._begun:
            self._begun = True
            completion.queued_s = min((s.admitted_s - self._started for s in self.seqs if s.admitted_s is not None), default=now)
            completion.cached_tokens = self.seqs[0].n_cached
        if not completion.ttft_s and seq.choice.token_ids:
            completion.ttft_s = now
        if not self._streams and not seq.finished and seq.n_unsent < DETOKENIZED_AT_ONCE:
            return False
        delta = seq.make_delta()
        self._n_unfinished -= seq.finished
        if self._n_unfinished == 0:
            completion.duration_s = time.perf_counter() - self._started
            delta.completion = completion
            for each in self._on_end:
                each(completion.choices[0])
        self._deliver_delta(delta)
        if is_over := self._n_unfinished == 0:
            self._done.set()
        return is_over

    def end(self, error: Exception) -> None:
        """End the request with this error."""
        self._error = error
        self._deliver_delta(error)
        self._done.set()

    def _deliver_delta(self, piece: Delta | Exception) -> None:
        if self._deliver is None or (not self._streams and isinstance(piece, Delta) and piece.completion is None):
            return
        try:
            self._deliver(piece)
        except Exception:  # the caller's own fault: it does not concern the other requests
            log.exception("a request's receiver failed; the request is cancelled")
            self._deliver = None
            self.cancel()
