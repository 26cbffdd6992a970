"""The one thread that steps: requests and calls enter from any thread, and new tokens of sequences leave through their requests.

Knows the step and requests; neither prompts nor how an engine is made.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from concurrent.futures import Future
from functools import partial

import numpy as np

from ngramspec.backends.base import is_out_of_memory
from ngramspec.engine.request import Request
from ngramspec.engine.sequence import Sequence
from ngramspec.engine.step import Core
from ngramspec.errors import CallbackError, EngineClosedError, NgramspecError, OutOfMemoryError
from ngramspec.outputs import Choice

log = logging.getLogger(__name__)


class StepThread:
    """Runs a `Core` until it is closed. Methods are for any thread where they do not say otherwise."""

    def __init__(self, make: Callable[[StepThread], Core]) -> None:
        """Start the thread, have it `make` what it runs, and wait for that. Raises what `make` raises.

        The model is loaded in the thread that runs it: OpenMP keeps a team of workers for every thread that ever computed, and once teams
        outnumber the cores they no longer wait awake. A pass from a second thread took 23 ms instead of 13.
        """
        self.core: Core
        self._inbox: deque[Callable[[], None]] = deque()
        self._calls: set[Future[None]] = set()
        self._unfinished: set[Request] = set()
        self._request_of: dict[Sequence, Request] = {}
        self._undelivered: list[tuple[Request, Sequence]] = []  # with new tokens since the last delivery
        self._held: dict[Request, None] = {}  # requests whose tokens are drawn, while the code for that is being compiled
        self._n_arriving = 0  # sequences of requests that the thread has not seen, or holds
        self._wake = threading.Condition()
        self._interrupt = np.zeros(1, np.int64)
        """1: native steps end after the present one, since a message waits."""
        self._closed = self._abandoned = self._ended = False
        self._process = os.getpid()
        self.end_loading: Callable[[], None] = lambda: None
        """Called if the caller is interrupted while `make` runs."""
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(make, ready), name="ngramspec-engine", daemon=True)
        self._thread.start()
        try:
            ready.result()
        except BaseException:  # an interrupt, too: nobody will use what is being made
            with self._wake:
                self._closed = self._abandoned = True
                self._wake.notify()
            self.end_loading()
            raise

    @property
    def closed(self) -> bool:
        """Whether it was closed, or has died."""
        return self._closed or self._forked

    @property
    def n_waiting(self) -> int:
        """How many sequences are not running."""
        return len(self.core.scheduler.waiting) + self._n_arriving

    def check_caller(self) -> None:
        """Raise CallbackError in the thread itself, and EngineClosedError if the thread does not run."""
        if sys.is_finalizing():  # as in `__del__` of an object that lives as long as the process
            raise EngineClosedError("Python is ending, and the engine's thread has been stopped")
        if self._forked:
            raise EngineClosedError(
                f"the engine was made in process {self._process} and its thread runs there; after a fork, make an engine in the new process"
            )
        if threading.current_thread() is self._thread:
            raise CallbackError(
                "a `deliver` callback runs in the engine's own thread and must not call it: hand the piece to another thread"
            )

    def check_open(self) -> None:
        """Raise EngineClosedError if it was closed, also while it is being made."""
        if self._closed:
            raise EngineClosedError("the engine is closed")

    def add(self, request: Request) -> None:
        """Run a request. Raises CallbackError, EngineClosedError."""
        self.check_caller()
        with self._wake:
            self._unfinished.add(request)
            self._n_arriving += len(request.seqs)
        if not self._post(lambda: self._add(request)):
            with self._wake:
                self._unfinished.discard(request)
                self._n_arriving -= len(request.seqs)
            raise EngineClosedError("the engine is closed")

    def cancel(self, request: Request) -> None:
        """Free the request's sequences before the next step. A second call changes nothing."""
        if not self._forked:
            self._post(lambda: self._cancel(request))

    def call(self, what: Callable[[], None], until: Callable[[], bool] = lambda: True) -> None:
        """Call `what` before the next step, and before each one after that until `until` is true, and wait for it.

        Raises what it raises, CallbackError, EngineClosedError.
        """
        self.check_caller()
        done: Future[None] = Future()
        with self._wake:
            self._calls.add(done)
        if not self._post(partial(self._answer_call, what, until, done)):
            raise EngineClosedError("the engine is closed")
        return done.result()

    def close(self) -> None:
        """Stop; requests under way end with EngineClosedError. A second call changes nothing."""
        if self._forked or sys.is_finalizing():
            return
        with self._wake:
            self._closed = True
            self._interrupt[0] = 1
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def close_when_idle(self) -> None:
        """Stop once no request is under way, and free the model: nobody can make another request. Waits for nothing."""
        if self._forked:
            return
        with self._wake:
            self._abandoned = True
            self._wake.notify()
            self._forget_core()

    def fail(self, seq: Sequence, error: Exception) -> None:
        """End the request of a sequence that met an error. In the thread itself."""
        self._fail(self._request_of[seq], error)

    # ------------------------------------------------------------------ in the thread itself

    def expect_prompts(self, list_prompts: Callable[[str], Iterable[Several[int]]], tenant: str, choice: Choice) -> None:
        """Have prompts computed ahead that a tenant will probably ask for after this choice; see `Hints.next_prompts`."""
        written = "" if choice.finish_reason == "cancelled" else choice.text
        self.core.ahead.expect(partial(list_prompts, written), tenant)

    def _fail(self, request: Request, error: Exception) -> None:
        """End a request, all its sequences."""
        self._drop(request)
        self._end(request, error)

    def _drop(self, request: Request) -> None:
        for each in request.seqs:
            if self._request_of.pop(each, None) is not None and (each.slot >= 0 or each in self.core.scheduler.waiting):
                self.core.remove(each)

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._process

    def _post(self, message: Callable[[], None]) -> bool:
        """Have the thread call `message` before its next step; False if it is closed."""
        with self._wake:
            if not self._closed:
                self._inbox.append(message)
                self._interrupt[0] = 1
                self._wake.notify()
            return not self._closed

    def _run(self, make: Callable[[StepThread], Core], ready: Future[None]) -> None:
        error = EngineClosedError("the engine was closed")
        try:
            self.core = make(self)
        except BaseException as e:
            self._closed = True
            ready.set_exception(e)
            return
        ready.set_result(None)
        try:
            while self._wait():
                if self.core.scheduler.has_work:
                    self._step()
                    if self.core.has_small_pages:
                        self.core.enlarge_page_between_steps()
                elif not self._inbox:  # a beam search posts its next turn
                    self.core.work_idle()
            if self.core.prefixes is not None:
                self.core.prefixes.close()
        except BaseException as e:
            log.exception("the engine stops")
            error = EngineClosedError(f"the engine died: {e}")
            error.__cause__ = e
        finally:
            with self._wake:
                self._closed = True
                self._n_arriving = 0
            for request in list(self._unfinished):
                with contextlib.suppress(Exception):  # it may have died in the middle of a change
                    self._drop(request)
                self._end(request, error)
            for call in list(self._calls):
                call.set_exception(error)
            with self._wake:
                self._ended = True
                self._forget_core()

    def _answer_call(self, what: Callable[[], None], until: Callable[[], bool], done: Future[None]) -> None:
        try:
            what()
        except Exception as e:
            done.set_exception(e)
        else:
            if not until():
                self._post(partial(self._answer_call, what, until, done))  # a closed engine ends the call itself
                return
            done.set_result(None)
        self._calls.discard(done)

    def _forget_core(self) -> None:
        """Free the core once nobody can ask for it: it refers to this object, so both would wait for a garbage collection."""
        if self._abandoned and self._ended:
            del self.core

    def _wait(self) -> bool:
        """Wait until there is something to do, and do what was posted; False if the engine is closed."""
        with self._wake:
            while not (self._inbox or self.core.scheduler.has_work or self._closed):
                if self._abandoned:
                    return False
                if not self._wake.wait(self.core.idle_after_s):
                    break
            if self._closed:
                return False
            messages = list(self._inbox)
            self._inbox.clear()
            self._interrupt[0] = 0
        for message in messages:
            message()
        if self._held and not self.core.is_compiling_sampling:
            held, self._held = self._held, {}
            for request in held:
                self._add(request)
        return True

    def _step(self) -> None:
        try:
            changed = self.core.step(self._flush, self._interrupt)
        except (NgramspecError, MemoryError, RuntimeError, ValueError) as e:
            log.exception("a pass failed; its requests end")
            self._flush()  # what the pass before has brought, if this one did not come to deliver it
            cause: Exception = e
            if is_out_of_memory(e):
                cause = OutOfMemoryError(f"out of memory in a pass: {e}")
            for seq in list(self.core.scheduler.running):
                if seq in self._request_of:
                    self.fail(seq, cause)
            return
        for seq in changed:
            request = self._request_of[seq]
            if seq.finished:
                del self._request_of[seq]
            self._undelivered.append((request, seq))
        if not (self.core.runner.asynchronous and self.core.scheduler.has_work):  # else while the device is at the next pass
            self._flush()

    def _flush(self) -> None:
        """Deliver to requests what their sequences got in the last pass."""
        undelivered, self._undelivered = self._undelivered, []
        for request, seq in undelivered:
            if request.done:
                continue
            try:
                if request.emit(seq):
                    self._unfinished.discard(request)
            except Exception as e:  # its text
                self._fail(request, e)

    def _add(self, request: Request) -> None:
        if not all(map(self.core.can_run, request.seqs)):
            self._held[request] = None
            return
        with self._wake:
            self._n_arriving -= len(request.seqs)
        for seq in request.seqs:
            self._request_of[seq] = request
            self.core.add(seq)

    def _cancel(self, request: Request) -> None:
        self._flush()
        if is_held := request in self._held:
            del self._held[request]
            with self._wake:
                self._n_arriving -= len(request.seqs)
        for seq in request.seqs:
            is_known = self._request_of.pop(seq, None) is not None
            if is_known:
                self.core.remove(seq)
            if is_known or is_held:
                seq.finish("cancelled")
                self._undelivered.append((request, seq))
        self._flush()

    def _end(self, request: Request, error: Exception) -> None:
        self._unfinished.discard(request)
        request.end(error)
