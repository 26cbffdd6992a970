"""Admit requests, run them on the engine, and end them when their client goes away.

A route makes a `Reservation` before it does any work, hands in an `EngineInput` per prompt, and gets completions or a stream of deltas.
However the response ends, closing the reservation cancels what was running under it. Knows ASGI and the engine's public methods, neither
prompts nor formats of answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self, TypeAlias

from fastapi import Request
from starlette.types import Message, Receive

from ngramspec.engine.llm_engine import Engine
from ngramspec.engine.llm_engine import Request as EngineRequest
from ngramspec.outputs import Completion, Delta
from ngramspec.server.engine_input import EngineInput
from ngramspec.server.error_responses import ApiError, ClientGone, retry_after, translate_error
from ngramspec.server.metrics import Metrics
from ngramspec.server.settings import ServerSettings
from ngramspec.server.stream_padding import Pacer

log = logging.getLogger(__name__)

Piece: TypeAlias = tuple[int, Delta]  # of a stream: the number of a prompt, and what is new of its text
_Result: TypeAlias = tuple[int, Delta | Exception]  # of the engine: the error that ends a prompt, too


async def _read(pieces: asyncio.Queue[_Result], n_inputs: int) -> AsyncIterator[Piece]:
    while n_inputs:
        index, what = await pieces.get()
        if isinstance(what, Exception):
            raise what
        n_inputs -= what.completion is not None
        yield index, what


class Mailbox:
    """Brings what the engine's thread says to the event loop: one wake-up for everything that a pass has to say."""

    def __init__(self) -> None:
        self._posts: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._awake = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self) -> None:
        """Deliver to the running loop from now on."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._awake = loop, False

    def post(self, take: Callable[[Any], None], what: Any) -> None:
        """Have the loop call `take(what)`. From any thread."""
        self._posts.append((take, what))
        if not self._awake:
            self._awake = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits
                assert self._loop is not None
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._awake = False  # first: what is posted from here on wakes the loop again
        while self._posts:
            take, what = self._posts.popleft()
            try:
                take(what)
            except Exception:
                log.exception("a result could not be delivered")


class Reservation:
    """Room for some sequences, reserved before any work is done for them, and the requests that run in it.

    `with` it, or hand it to an `EventStream`. Used in the event loop's thread.
    """

    def __init__(self, admission: AdmissionQueue, sequences: int) -> None:
        self.sequences = sequences
        self.requests: list[EngineRequest] = []
        self.fail: Callable[[Exception], None] = lambda error: None
        """Ends whoever waits for results with an error."""
        self._admission = admission
        self._detached = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._detached:
            self.close()

    def detach(self) -> None:
        """Let a response that outlives the `with` block close the reservation in place of the block's end."""
        self._detached = True

    def return_room(self) -> None:
        """Give the room back once the engine is done with the sequences, even if the answer is still on its way. May be called again."""
        self._admission._reserved -= self.sequences
        self.sequences = 0

    def close(self) -> bool:
        """Cancel what still runs and return the room; return whether anything ran. May be called any number of times."""
        running = [request for request in self.requests if self.sequences and not request.done]  # one is done a moment after its last delta
        for request in running:
            request.cancel()
        self.return_room()
        self._admission._reservations.discard(self)
        return bool(running)


class AdmissionQueue:
    """Bounds what is in flight, runs it, and follows its clients. Used from one event loop."""

    def __init__(self, engine: Engine, settings: ServerSettings, metrics: Metrics) -> None:
        self.engine, self.settings, self.metrics = engine, settings, metrics
        self.n_slots = int(engine.props()["max_seqs"])
        """Sequences that run at a time."""
        self.capacity = self.n_slots + settings.max_queue
        """Sequences in flight: those that run and those that wait."""
        self.draining = False
        self._reservations: set[Reservation] = set()  # of all that are not answered to the end
        self._reserved = 0
        self._mean_s = 1.0  # of a request, lately
        self._mailbox = Mailbox()

    @property
    def in_flight(self) -> int:
        """Sequences that are reserved."""
        return self._reserved

    @property
    def requests(self) -> list[EngineRequest]:
        """Requests under way."""
        return [request for reservation in self._reservations for request in reservation.requests if not request.done]

    # ------------------------------------------------------------------ admission

    def reserve(self, sequences: int = 1) -> Reservation:
        """Reserve room, at once or not at all.

        Raises ApiError 400 for more than there ever is, 429 if there is no room now, 503 if no new work is taken.
        """
        if self.draining:
            raise self._refuse_draining()
        if self.engine.closed:
            self.metrics.count_refused("engine_dead")
            raise ApiError(503, "the engine has stopped", code="engine_stopped", headers=retry_after(30))
        self.check_sequences(sequences)
        self.check_room(sequences)
        self._reserved += sequences
        reservation = Reservation(self, sequences)
        self._reservations.add(reservation)
        return reservation

    def _refuse_draining(self) -> ApiError:
        self.metrics.count_refused("draining")
        return ApiError(503, "the server is shutting down", code="shutting_down", headers=retry_after(10))

    def check_sequences(self, sequences: int) -> None:
        """Raises ApiError 400 for more sequences than there ever is room for."""
        if sequences > self.capacity:
            raise ApiError(400, f"the request is for {sequences} texts at once; this server holds {self.capacity}", param="n")

    def check_room(self, sequences: int) -> None:
        """Raises ApiError 429 if there is no room for this many more sequences."""
        if self._reserved + sequences > self.capacity:
            self.metrics.count_refused("queue_full")
            wait_s = min(60.0, self._mean_s * max(1.0, self._reserved / self.capacity))
            raise ApiError(429, "the queue is full; try again later", code="queue_full", headers=retry_after(wait_s))

    # ------------------------------------------------------------------ running

    async def complete(self, reservation: Reservation, http: Request, inputs: Sequence[EngineInput]) -> list[Completion]:
        """Run to the end. Raises ApiError, and ClientGone where the client left; either way nothing runs on."""
        started = time.perf_counter()
        left: dict[int, Completion] = {}
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take(piece: _Result) -> None:
            index, what = piece
            if ended.done():
                return
            if isinstance(what, Exception):
                ended.set_exception(what)
                return
            assert what.completion is not None
            left[index] = what.completion
            if len(left) == len(inputs):
                ended.set_result(None)

        with reservation:
            watch = asyncio.create_task(until_gone(http.receive))
            try:
                self._submit(reservation, http, inputs, take, final_only=True)
                await asyncio.wait({watch, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not ended.done():
                    raise ClientGone
                ended.result()
                done = [left[i] for i in range(len(inputs))]
                await self._wait_for_pace(done, started, watch)
                return done
            finally:
                watch.cancel()
                if ended.done() and not ended.cancelled():
                    ended.exception()  # looked at, so that asyncio does not complain of it

    def stream(self, reservation: Reservation, http: Request, inputs: Sequence[EngineInput]) -> AsyncIterator[Piece]:
        """Run, and hand out (number of the input, delta) as they come. What is wrong with the inputs raises here, before anything is sent.

        The last delta of each input carries its completion. With `pad_stream` every delta holds one token of each text, at an even rate.
        """
        if self.settings.pad_stream:
            pacer = Pacer(len(inputs), self._interval_s)
            self._submit(reservation, http, inputs, lambda piece: pacer.put(*piece))
            return pacer.read()
        pieces: asyncio.Queue[_Result] = asyncio.Queue()
        self._submit(reservation, http, inputs, pieces.put_nowait)
        return _read(pieces, len(inputs))

    def _submit(
        self,
        reservation: Reservation,
        http: Request,
        inputs: Sequence[EngineInput],
        take: Callable[[_Result], None],
        *,
        final_only: bool = False,
    ) -> None:
        """Submit one or more inputs to the engine; `take` gets what they bring. Raises ApiError; then none of them runs."""
        assert inputs
        if self.draining:  # since the reservation was made
            raise self._refuse_draining()
        assert sum(each.params.n for each in inputs) <= reservation.sequences
        self._mailbox.bind()
        reservation.fail = lambda error: take((0, error))
        started, unfinished = time.perf_counter(), len(inputs)

        def deliver(index: int) -> Callable[[Delta | Exception], None]:
            def from_engine(what: Delta | Exception) -> None:  # in the engine's thread
                self._mailbox.post(receive, (index, what))

            return from_engine

        def receive(piece: _Result) -> None:
            nonlocal unfinished
            index, what = piece
            if isinstance(what, Exception):
                self.metrics.count_finished(reservation.requests[index].completion, "error")
                take((index, translate_error(what)))
                return
            if what.completion is not None:
                unfinished -= 1
                self.count(what.completion, http, started)
                if not unfinished:
                    reservation.return_room()  # a slow reader keeps its text, not its room
            take(piece)

        try:
            for i, each in enumerate(inputs):
                reservation.requests.append(
                    self.engine.submit(each.prompt, each.params, deliver=deliver(i), final_only=final_only, **each.hints)
                )
        except Exception as error:
            reservation.close()
            known = translate_error(error, is_clients=True)
            if known.status == 500:
                raise
            raise known from error

    def count(self, completion: Completion, http: Request, started: float) -> None:
        """Tell the metrics and the log of a request that the engine is done with; `started`: time.perf_counter() then."""
        cancelled = any(choice.finish_reason == "cancelled" for choice in completion.choices)
        self.metrics.count_finished(completion, "cancelled" if cancelled else "done")
        if not cancelled:
            self._mean_s += 0.1 * (time.perf_counter() - started - self._mean_s)
        facts = http.scope.get("state", {}).setdefault("facts", {})
        for name, value in (
            ("prompt_tokens", len(completion.prompt_token_ids)),
            ("cached_tokens", completion.cached_tokens),
            ("completion_tokens", sum(len(choice.token_ids) for choice in completion.choices)),
        ):
            facts[name] = facts.get(name, 0) + value
        facts |= {"queued_ms": round(completion.queued_s * 1e3, 1), "ttft_ms": round(completion.ttft_s * 1e3, 1)}

    @property
    def _interval_s(self) -> float:
        return self.settings.pad_stream / 1e3

    async def _wait_for_pace(self, done: list[Completion], started: float, watch: asyncio.Task[None]) -> None:
        """Hold a whole answer back for as long as its tokens take at the even pace."""
        takes_s = max(c.ttft_s + self._interval_s * max(len(choice.token_ids) for choice in c.choices) for c in done)
        rest = started + takes_s - time.perf_counter()
        if self.settings.pad_stream and rest > 0:
            await asyncio.wait({watch}, timeout=rest)
            if watch.done():
                raise ClientGone

    # ------------------------------------------------------------------ the end

    async def drain(self, timeout: float) -> None:
        """Take no new work; wait until all are answered, for `timeout` seconds, then end the rest with a 503."""
        self.draining = True
        deadline = time.monotonic() + timeout
        while self._reservations and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self.cancel_all()

    def cancel_all(self) -> None:
        """End everything in flight with a 503."""
        for reservation in list(self._reservations):
            reservation.fail(ApiError(503, "the server is shutting down", code="shutting_down", headers=retry_after(10)))
            reservation.close()


async def until_gone(receive: Receive) -> None:
    """Wait until the client is gone. The request's body must have been read."""
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()
