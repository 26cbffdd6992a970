"""llama.cpp's own routes, for the editors that speak them: /infill, /completion, /props, /slots.

Requests in llama.cpp's words enter and become `EngineInput`s; answers leave in llama.cpp's words, errors in the envelope of all other
routes. The fields of requests are in `schemas`, those of answers in `answers`, prompts in `tokenize` and `fim`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request

from ngramspec import __version__
from ngramspec.engine.llm_engine import Hints
from ngramspec.grammar.constraint import Grammar
from ngramspec.prompts.fim import MAX_UNFINISHED
from ngramspec.sampling_params import MAX_SEED, SamplingParams
from ngramspec.server.auth import Identity, check_site, identify, require_operator
from ngramspec.server.engine_input import EngineInput, encode_prediction, make_hints, read_bias
from ngramspec.server.error_responses import ApiError, make_bad_request, make_field_error, retry_after
from ngramspec.server.llamacpp.answers import AnswerFormat, LlamaAnswer, run_to_end, run_unless_gone
from ngramspec.server.llamacpp.schemas import InfillBody, LlamaCompletionBody, LlamaRequest, SlotFile
from ngramspec.server.llamacpp.slots import SavedSlots
from ngramspec.server.llamacpp.tokenize import LlamaTokenizer, join_text
from ngramspec.server.middleware import ParsedBodyRoute
from ngramspec.server.queue import Reservation
from ngramspec.server.request_fields import (
    OTHER_NAMES,
    SHARED,
    FieldGrammar,
    check_grammar,
    read_grammar,
    read_sampling_fields,
    read_unfinished,
)
from ngramspec.server.sse import GENERATES, EventStream
from ngramspec.server.state import ServerState

Who = Annotated[Identity, Depends(identify)]

RESERVE = 256  # tokens of the context that /infill keeps free for the middle if `n_predict` does not say how many


def make_router(state: ServerState) -> APIRouter:
    routes = APIRouter(tags=["llama.cpp"], route_class=ParsedBodyRoute)
    tokens = LlamaTokenizer(state.engine, state.prompts, state.texts)
    handler = _LlamaHandler(state, tokens)

    @routes.post("/infill", responses=GENERATES)
    async def infill(body: InfillBody, http: Request, identity: Who) -> Any:
        """Write the text between `input_prefix` + `prompt` and `input_suffix`; `input_extra`: parts of other files, the best last.

        Greedy unless a temperature is given. `n_predict` 0 computes the prompt into the prefix cache and writes nothing.
        """
        fim = state.fim
        if fim is None:
            message = f"{state.names[0]} has no tokens to fill in the middle with; use /completion, or a model that was trained for it"
            raise ApiError(400, message, type="not_supported_error", code="not_supported")
        handler.set_defaults(body)
        with state.admission.reserve(body.n_cmpl) as reservation:
            size = len(body.input_prefix) + len(body.prompt) + len(body.input_suffix) + sum(len(chunk.text) for chunk in body.input_extra)
            texts, limit = handler.read_infill(body)
            form = read_grammar(body)
            unfinished = read_unfinished(fim, texts[0], body, form, state.settings.sampling)

            def encode() -> list[list[int]]:
                return [fim.make_prompt(*texts, limit=limit, is_healed=unfinished is not None)]

            inputs = await handler.make_inputs(
                identity, body, size, encode, form, stop_ids=fim.stop_ids, cursor=texts[:2], healed=unfinished or ""
            )
            if body.n_predict != 0:  # what computes a prompt alone shows nobody what it writes
                state.expect_prompts(inputs[0].hints, *texts, limit=limit)
            return await handler.answer(reservation, http, body, inputs)

    @routes.post("/completion", responses=GENERATES)
    @routes.post("/completions", responses=GENERATES)
    async def completion(body: LlamaCompletionBody, http: Request, identity: Who) -> Any:
        """Continue a prompt: text, token ids, or a list of both; a list of prompts is answered by a list.

        Control tokens are parsed in text unless `parse_special` is false, here or in the server's settings.
        """
        handler.set_defaults(body)
        given = list(body.list_prompts())
        parse = state.settings.parse_special if body.parse_special is None else body.parse_special
        with state.admission.reserve(len(given) * body.n_cmpl) as reservation:
            for each in given:
                state.limits.check_text(join_text(each))

            def encode() -> list[list[int]]:
                return [tokens.encode(each, bos=True, parse=parse) for each in given]

            inputs = await handler.make_inputs(identity, body, sum(len(join_text(each)) for each in given), encode, read_grammar(body))
            return await handler.answer(reservation, http, body, inputs, several=body.has_several)

    @routes.get("/props")
    async def props(identity: Who) -> dict[str, Any]:
        """Describe the server and its model."""
        return handler.describe_server()

    @routes.get("/slots")
    async def slots(identity: Annotated[Identity, Depends(require_operator)], fail_on_no_slot: str = "") -> list[dict[str, Any]]:
        """Tell how busy the server is; where there are keys, for administrators.

        How far each request is can be seen from this machine and by an administrator: it tells what is drafted. With `fail_on_no_slot=1`
        the answer is 503 if all are busy.
        """
        if not state.settings.slots:
            raise ApiError(501, "the server was started without /slots")
        shown = handler.list_slots(detailed=identity.trusted)
        if fail_on_no_slot and all(slot["is_processing"] for slot in shown):
            raise ApiError(503, "no slot is free", code="no_slot", headers=retry_after(1))
        return shown

    @routes.post("/slots/{id_slot}")
    async def change_slot(
        id_slot: int, action: Literal["save", "restore", "erase"], http: Request, identity: Who, body: SlotFile | None = None
    ) -> dict[str, Any]:
        """Save the tokens of the latest request with this `id_slot`, compute saved ones again, or forget them."""
        check_site(http.scope["headers"], state.settings)
        return await handler.change_slot(identity, id_slot, action, "" if body is None else body.filename, http)

    return routes


class _LlamaHandler:
    """What the routes have in common."""

    def __init__(self, state: ServerState, tokens: LlamaTokenizer) -> None:
        self.state, self.engine, self.admission = state, state.engine, state.admission
        self.format = AnswerFormat(state.engine, tokens, state.names[0])
        self.n_slots = state.admission.n_slots
        self._warm_ups: dict[Reservation, tuple[tuple[str, int], frozenset[str]]] = {}
        """What computes prompts alone: its tenant and `id_slot`, and the parts of files in it."""
        self.saved: SavedSlots | None = None
        if (folder := state.settings.slot_save_path) is not None:
            most = state.engine.max_model_len - 1
            self.saved = SavedSlots(folder, state.engine.name, n_slots=self.n_slots, vocab_size=state.engine.vocab_size, max_tokens=most)

    def set_defaults(self, body: LlamaRequest) -> None:
        """Take what the server's settings say in place of llama.cpp's defaults."""
        given, defaults = body.model_fields_set, self.state.settings.sampling
        if not given & {"n_predict", "max_tokens"}:
            body.n_predict = defaults.get("max_tokens", body.n_predict)
        if "seed" not in given:
            body.seed = -1 if defaults.get("seed") is None else defaults["seed"]

    def read_infill(self, body: InfillBody) -> tuple[tuple[str, str, list[tuple[str, str]]], int]:
        """Return prefix, suffix and further files of a prompt to fill in the middle, and how many tokens it may have."""
        length = self.engine.max_model_len
        reserve = min(body.n_predict + MAX_UNFINISHED, length // 2) if body.n_predict > 0 else min(RESERVE, length // 4)
        limit = min(length - reserve, self.state.settings.limits.prompt_tokens or length)
        extra = [(chunk.filename, chunk.text) for chunk in body.input_extra]
        return (body.input_prefix + body.prompt, body.input_suffix, extra), limit

    async def make_inputs(
        self,
        identity: Identity,
        body: LlamaRequest,
        n_chars: int,
        encode: Callable[[], list[list[int]]],
        form: FieldGrammar | None,
        *,
        stop_ids: Sequence[int] = (),
        cursor: tuple[str, str] | None = None,
        healed: str = "",
    ) -> list[EngineInput]:
        """Return `n_cmpl` inputs for each prompt that `encode` returns. Raises ApiError."""
        hints = make_hints(body, identity, self.engine)
        if cursor is not None:
            hints["cursor"] = cursor
        pairs = body.logit_bias.items() if isinstance(body.logit_bias, dict) else body.logit_bias
        bias = read_bias(pairs, self.engine, self.state.settings.limits.bias)

        def encode_all() -> list[list[int]]:
            prompts = encode()
            encode_prediction(hints, body.prediction, self.engine, healed)
            return prompts

        prompts = await self.state.encoders.run(identity.tenant, n_chars + len(body.prediction or ""), encode_all)
        await asyncio.to_thread(check_grammar, form, self.engine, identity.tenant)
        inputs = []
        for ids in prompts:
            if not ids:
                raise make_field_error("prompt", "is empty, and this model's tokenizer begins texts with nothing")
            self.state.limits.check_prompt(len(ids))
            room = self.state.limits.count_room(len(ids))
            for i in range(body.n_cmpl):
                params = self.make_params(body, i, room=room, grammar=form and form[1], bias=bias, stop_ids=stop_ids, healed=healed)
                self.state.limits.check_params(params, len(prompts) * body.n_cmpl)
                inputs.append(EngineInput(ids, params, hints))
        return inputs

    def make_params(
        self,
        body: LlamaRequest,
        i: int,
        *,
        room: int,
        grammar: Grammar | None,
        bias: dict[int, float],
        stop_ids: Sequence[int] = (),
        healed: str = "",
    ) -> SamplingParams:
        """Return how the i-th text of a prompt is sampled, in up to `room` tokens. `stop_ids` end it, too. Raises ApiError (400)."""
        defaults = {name: value for name, value in self.state.settings.sampling.items() if name in SHARED}
        given = body.defaults | defaults | read_sampling_fields(body, OTHER_NAMES)
        if not given.get("ignore_eos"):
            given["stop_token_ids"] = [*stop_ids, *given.get("stop_token_ids", ())]
        try:
            return SamplingParams(
                max_tokens=max(body.n_predict, 1) if body.n_predict >= 0 else room,
                seed=None if body.seed == -1 else (body.seed + i) % (MAX_SEED + 1),
                stop=tuple(word for word in ([body.stop] if isinstance(body.stop, str) else body.stop) if word),
                logit_bias=bias,
                logprobs=body.n_probs or None,
                grammar=grammar,
                healed=healed if body.n_predict else "",  # of no text, no word has to be spelled
                **given,
            )
        except ValueError as error:
            raise make_bad_request(error) from None

    async def answer(
        self, reservation: Reservation, http: Request, body: LlamaRequest, inputs: Sequence[EngineInput], *, several: bool = False
    ) -> Any:
        """Run the inputs; return one answer, a list of them, or a stream."""
        answers = [LlamaAnswer(each, body, self._note_slot) for each in inputs]
        deltas = self.admission.stream(reservation, http, inputs)
        place = inputs[0].hints["tenant"] or "", body.id_slot
        parts = frozenset(part.text for part in body.input_extra) if isinstance(body, InfillBody) else frozenset[str]()
        for earlier, (slot, known) in self._warm_ups.items() if body.id_slot >= 0 else ():
            is_of_this_window = bool(known & parts) or not (known or parts)  # all of them name slot 0
            if slot == place and (is_of_this_window or body.n_predict != 0):  # nobody waits for another window's
                for request in earlier.requests:
                    request.cancel()  # what it has computed stays in the prefix cache
        if body.stream:
            return EventStream(reservation, self.format.stream_events(reservation, deltas, answers), done=False)
        if body.n_predict == 0 and body.id_slot >= 0:
            self._warm_ups[reservation] = place, parts
        try:
            await run_unless_gone(http, run_to_end(reservation, deltas, answers))
        finally:
            self._warm_ups.pop(reservation, None)
        found = [self.format.describe(i, answer) for i, answer in enumerate(answers)]
        return found if several or len(found) > 1 else found[0]

    # ------------------------------------------------------------------ saved slots

    def _note_slot(self, answer: LlamaAnswer) -> None:
        tenant = answer.given.hints["tenant"]
        if self.saved is not None and tenant is not None:
            self.saved.note_tokens(tenant, answer.body.id_slot, answer.given.prompt + answer.tokens)

    async def change_slot(self, identity: Identity, slot: int, action: str, filename: str, http: Request) -> dict[str, Any]:
        """Save, restore or erase a slot of this tenant. Raises ApiError."""
        saved, tenant, started = self.saved, identity.tenant, time.perf_counter()
        if saved is None:
            why = "slots are not kept here; start the server with --slot-save-path FOLDER"
            raise ApiError(400, why, type="not_supported_error", code="not_supported")
        tokens = saved.get_tokens(tenant, slot)
        if action == "erase":
            return {"id_slot": slot, "n_erased": saved.erase_tokens(tenant, slot)}
        if action == "save":
            n_bytes = await asyncio.to_thread(saved.write, tenant, filename, tokens)
            if self.engine.config.prefix_cache_path is not None:
                await self._compute(tokens, tenant, http)  # again, from the prefix cache: what two requests had is kept on disk
        else:
            tokens, n_bytes = await asyncio.to_thread(saved.read, tenant, filename)
            await self._compute(tokens, tenant, http)
            saved.note_tokens(tenant, slot, tokens)
        took = {f"{action}_ms": (time.perf_counter() - started) * 1e3}
        names = ("n_saved", "n_written") if action == "save" else ("n_restored", "n_read")
        return {"id_slot": slot, "filename": filename, names[0]: len(tokens), names[1]: n_bytes, "timings": took}

    async def _compute(self, tokens: list[int], tenant: str, http: Request) -> None:
        """Have these tokens in the prefix cache. Raises ApiError."""
        if tokens:
            with self.admission.reserve() as reservation:
                hints = Hints(tenant=tenant, speculation=False, prefix_cache=True)
                await self.admission.complete(reservation, http, [EngineInput(tokens, SamplingParams(max_tokens=1), hints)])

    # ------------------------------------------------------------------ the server

    def describe_server(self) -> dict[str, Any]:
        body = LlamaCompletionBody(prompt="")
        self.set_defaults(body)
        params = self.make_params(body, 0, room=self.engine.max_model_len, grammar=None, bias={})
        settings = self.format.describe_settings(body, params) | {"max_tokens": -1}
        engine = self.engine
        template = getattr(engine.tokenizer, "chat_template", None) or ""
        templates = template if isinstance(template, dict) else {"default": template}
        return {
            "default_generation_settings": {"id": 0, "n_ctx": engine.max_model_len, "params": settings},
            "total_slots": self.n_slots,
            "model_path": PurePath(engine.source or engine.name).name,
            "model_alias": self.state.names[0],
            "chat_template": templates.get("default", ""),
            **({"chat_template_tool_use": templates["tool_use"]} if "tool_use" in templates else {}),
            "modalities": {"vision": False, "audio": False},
            "build_info": f"ngramspec-{__version__}",
            "exactness": engine.promise,
            "precision": engine.precision,
            "infill": self.state.fim is not None,
        }

    def list_slots(self, *, detailed: bool) -> list[dict[str, Any]]:
        """Return a description of each slot, in which one sequence can run, without anybody's text."""
        n_slots, status = self.n_slots, self.engine.status()
        slots: list[dict[str, Any]] = [
            {"id": i, "n_ctx": self.engine.max_model_len, "speculative": True, "is_processing": i < status.running} for i in range(n_slots)
        ]
        choices = (
            [(request, choice) for request in self.admission.requests for choice in list(request.completion.choices)] if detailed else []
        )
        running = [(request, choice) for request, choice in choices if choice.finish_reason is None]
        for slot, (request, choice) in zip(slots, running, strict=False):
            n_decoded = choice.n_counted
            slot["n_prompt_tokens"] = len(request.completion.prompt_token_ids)
            slot["next_token"] = {"n_decoded": n_decoded, "n_remain": max(request.params.max_tokens - n_decoded, 0)}
        return slots
