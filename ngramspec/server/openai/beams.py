"""Beam search over HTTP: vLLM's `use_beam_search` of `/v1/completions`, with `n` beams.

Checked requests' inputs enter, completions leave, whose choices are the beams, best first. Knows neither how the engine searches nor how
an answer is told.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

from fastapi import Request

from ngramspec.engine.llm_engine import Engine
from ngramspec.outputs import Beam, Choice, Completion
from ngramspec.sampling_params import SamplingParams
from ngramspec.server.engine_input import EngineInput
from ngramspec.server.error_responses import ClientGone, make_field_error, rename_params, translate_error
from ngramspec.server.queue import AdmissionQueue, Reservation, until_gone

_USED = frozenset({"max_tokens", "n", "ignore_eos", "grammar"})
_WITHOUT_EFFECT = frozenset({"temperature", "seed", "skip_special_tokens", "spaces_between_special_tokens"})  # nothing is drawn, as in vLLM


def check_beam_params(params: SamplingParams, defaults: Collection[str]) -> None:
    """Raises ApiError 400 for parameters that beam search does not know. `defaults`: names of those that the request did not give."""
    plain = SamplingParams()
    for name in (field.name for field in fields(params)):
        if name not in _USED | _WITHOUT_EFFECT | set(defaults) and getattr(params, name) != getattr(plain, name):
            raise make_field_error(name, "not with use_beam_search")


async def search_beams(
    admission: AdmissionQueue, reservation: Reservation, http: Request, inputs: Sequence[EngineInput], length_penalty: float
) -> list[Completion]:
    """Search for the beams of one prompt after another. Raises ApiError, and ClientGone if the client left; then nothing runs on."""
    loop = asyncio.get_running_loop()
    stopped = threading.Event()
    failed: asyncio.Future[None] = loop.create_future()
    reservation.fail = lambda error: None if failed.done() else failed.set_exception(error)
    watch = asyncio.ensure_future(until_gone(http.receive))
    thread = ThreadPoolExecutor(1, "beams")  # of its own: a search waits for the engine
    completions = []
    try:
        for each in inputs:
            search = loop.run_in_executor(thread, _search, admission.engine, each, length_penalty, stopped)
            search.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # looked at, so that asyncio does not complain of it
            waited: set[asyncio.Future[Any]] = {search, watch, failed}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
            if not search.done():
                raise ClientGone
            try:
                completions.append(search.result())
            except Exception as error:
                with rename_params(("width", "n")):
                    raise translate_error(error, is_clients=True) from error
            admission.count(completions[-1], http, time.perf_counter() - completions[-1].duration_s)
        return completions
    finally:
        stopped.set()
        watch.cancel()
        failed.cancel()
        thread.shutdown(wait=False)


def _search(engine: Engine, given: EngineInput, length_penalty: float, stopped: threading.Event) -> Completion:
    """Return the beams of one prompt as choices; waits for the engine."""
    from ngramspec.engine.beam_turns import decode_output  # loaded only where beams are asked for

    started, params, hints = time.perf_counter(), given.params, given.hints
    beams = engine.beam_search(
        given.prompt,
        params.n,
        params.max_tokens,
        length_penalty=length_penalty,
        ignore_eos=params.ignore_eos,
        grammar=params.grammar,
        speculation=hints["speculation"],
        tenant=hints["tenant"] if hints["prefix_cache"] else None,
        should_stop=stopped.is_set,
    )
    took = time.perf_counter() - started
    stop_ids = () if params.ignore_eos and params.grammar is None else engine.eos_token_ids
    choices = [
        _make_choice(i, beam, decode_output(engine.tokenizer, given.prompt, beam.token_ids, stop_ids), stop_ids)
        for i, beam in enumerate(beams)
    ]
    return Completion(given.prompt, choices, 0, engine.exactness, took, took, precision=engine.precision)


def _make_choice(index: int, beam: Beam, texts: list[str], stop_ids: Collection[int]) -> Choice:
    reason = "stop" if beam.token_ids[-1] in stop_ids else "length"
    return Choice(index, beam.text, beam.token_ids, reason, texts=texts, draft_sources=[None] * len(texts))
