"""What becomes of the fields that OpenAI, vLLM and llama.cpp document for requests of completions: one table, by route.

A request's JSON as an object enters; an ApiError leaves for the first field that would change the text and is not implemented, or the names
of the fields that no row is about. Fields that are done have their types in the models of requests. docs/server.md shows the table. Knows
no model of requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any

from ngramspec.options import options_of
from ngramspec.sampling_params import SamplingParams
from ngramspec.server.error_responses import ApiError

ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/completion", "/infill")
COMPLETIONS, CHAT, RESPONSES, LLAMA, INFILL = ROUTES
OPENAI, V1, LLAMAS = (COMPLETIONS, CHAT), (COMPLETIONS, CHAT, RESPONSES), (LLAMA, INFILL)
SHOWN_CHARS = 64  # of a name that nobody knows


class FieldSupport(Enum):
    DONE = "done"
    ACCEPTED = "accepted"
    """Whatever it says: the text is the same."""
    REFUSED = "refused"
    """Refused with 400 if it asks for something."""


@dataclass(frozen=True, slots=True)
class Field:
    """One row: fields that share their fate on some routes."""

    names: tuple[str, ...]
    routes: tuple[str, ...]
    fate: FieldSupport
    why: str
    """What it does; for what is refused, why; for what is accepted, why the text is the same."""
    neutral: tuple[Any, ...] = ()
    """Values of a refused field that ask for nothing, beside null."""
    matters_with: tuple[tuple[str, Any], ...] = ()
    """(name, value with which it is off) of the fields that give a refused one its meaning; none: it has one by itself."""

    def asks_for_refused(self, value: Any, given: Mapping[str, Any]) -> bool:
        """Return whether the value, among all that is given, is for what is refused."""
        if value is None or any(_is_same(value, each) for each in self.neutral):
            return False
        return not self.matters_with or any(
            given.get(name) is not None and not _is_same(given[name], off) for name, off in self.matters_with
        )


def _is_same(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _mark_done(routes: tuple[str, ...], names: str, why: str = "") -> Field:
    return Field(tuple(names.split()), routes, FieldSupport.DONE, why)


def _mark_accepted(routes: tuple[str, ...], names: str, why: str) -> Field:
    return Field(tuple(names.split()), routes, FieldSupport.ACCEPTED, why)


def _mark_refused(routes: tuple[str, ...], names: str, why: str, *neutral: Any, matters_with: tuple[tuple[str, Any], ...] = ()) -> Field:
    return Field(tuple(names.split()), routes, FieldSupport.REFUSED, why, neutral, matters_with)


_PENALTIES = (("repeat_penalty", 1), ("repetition_penalty", 1), ("presence_penalty", 0), ("frequency_penalty", 0))
_TEXT_ONLY = "the server reads and writes text only"
_NO_BEAMS = tuple(route for route in ROUTES if route != COMPLETIONS)
_TEMPLATE = "chat templates get messages, tools and `chat_template_kwargs` only"
_NOT_SAMPLED = "this sampler is not implemented"

_ROWS = (
    # ------------------------------------------------------------------ done
    _mark_done((COMPLETIONS, *LLAMAS), "prompt", "the text to continue; for /infill the beginning of the line"),
    _mark_done((CHAT,), "messages", "the conversation: roles system, developer, user, assistant, tool, and others that the template knows"),
    _mark_done((CHAT,), "add_generation_prompt", "false: the prompt ends after the last message, and no answer is begun"),
    _mark_done(
        (CHAT,),
        "continue_final_message",
        "true: the answer continues the last message, which must be the assistant's; with `add_generation_prompt` false",
    ),
    _mark_done(
        (CHAT,),
        "chat_template_kwargs",
        "variables of the chat template, such as `enable_thinking`; those that the server sets cannot be overridden",
    ),
    _mark_done((INFILL,), "input_prefix input_suffix input_extra", "text before and after the cursor, and parts of other files"),
    _mark_done((COMPLETIONS,), "suffix", "text after the cursor: fill in the middle, if the model is trained for it"),
    _mark_done((COMPLETIONS,), "echo", "true: the answer begins with the prompt"),
    _mark_done((CHAT,), "echo", "true: the answer begins with the last message, if that is the assistant's"),
    _mark_done(
        (COMPLETIONS,),
        "use_beam_search",
        "true: the n best texts of beam search, without sampling; not with `stream`, `logprobs` or `stop`",
    ),
    _mark_done(
        (COMPLETIONS,), "length_penalty", "of beam search: a text's score is its log-probability divided by its length to this power"
    ),
    _mark_done((COMPLETIONS,), "best_of", "write this many texts and return the n most likely; must equal `n` in a stream"),
    _mark_done((RESPONSES,), "input instructions", "the conversation: messages, function calls and their results"),
    _mark_done(V1, "model", "any name: the one model answers; with `--strict-model` names that are not its own are refused"),
    _mark_done(ROUTES, "n", "number of texts per prompt; 1 for `/v1/responses`"),
    _mark_done((*OPENAI, *LLAMAS), "n_cmpl", "llama.cpp's name of `n`"),
    _mark_done((*OPENAI, *LLAMAS), "max_tokens", "most tokens to write; 0: only compute the prompt; -1: as many as fit"),
    _mark_done((RESPONSES,), "max_output_tokens", "most tokens to write"),
    _mark_done((CHAT,), "max_completion_tokens", "OpenAI's new name of `max_tokens`; of both, this one counts"),
    _mark_done((*OPENAI, *LLAMAS), "n_predict", "llama.cpp's name of `max_tokens`"),
    _mark_done(ROUTES, "stop", "texts that end the answer"),
    _mark_done(ROUTES, "seed", "the same seed gives the same text"),
    _mark_done(V1, "logit_bias", "numbers added to logits, by token ids"),
    _mark_done(LLAMAS, "logit_bias", "numbers added to logits, by token ids or by texts, whose tokens are meant"),
    _mark_done(OPENAI, "logprobs", "log-probabilities of the tokens; -1: of the whole vocabulary, if the server's limit `logprobs` is -1"),
    _mark_done((CHAT, RESPONSES), "top_logprobs", "how many other tokens' log-probabilities are reported at each place"),
    _mark_done(
        (*OPENAI, *LLAMAS), "n_probs", "llama.cpp's name of `logprobs`: how many tokens' log-probabilities are reported at each place"
    ),
    _mark_done(OPENAI, "prompt_logprobs", "log-probabilities of the prompt's tokens, and of this many others at each place"),
    _mark_done(OPENAI, "return_token_ids", "true: return the token ids of prompt and text"),
    _mark_done(OPENAI, "return_tokens_as_token_ids", "log-probabilities name tokens as `token_id:17`"),
    _mark_done(ROUTES, "return_progress", "true: a stream reports how much of the prompt is computed"),
    _mark_done(ROUTES, "timings_per_token", "true: llama.cpp's `timings` in every chunk of a stream"),
    _mark_done(OPENAI, "verbose", "`__verbose` in the answer shows the prompt"),
    _mark_done(ROUTES, "stream", "true: send the text in chunks while it is written"),
    _mark_done(V1, "stream_options", "`include_usage`, `continuous_usage_stats`; `include_obfuscation` changes nothing"),
    _mark_done(ROUTES, "repeat_penalty", "llama.cpp's name of `repetition_penalty`"),
    _mark_done(LLAMAS, "n_indent", "the text ends before a line that is indented less than this"),
    _mark_done(LLAMAS, "t_max_predict_ms", "after this many milliseconds the text ends at the next line end"),
    _mark_done(LLAMAS, "return_tokens", "true: return token ids"),
    _mark_done(LLAMAS, "response_fields", "the names of the fields that the answer has"),
    _mark_done(ROUTES, "cache_prompt", "false: computed without the prefix cache, with the same text"),
    _mark_done(
        (COMPLETIONS, LLAMA), "parse_special", "false: control tokens in the prompt's text are spelled out; default: the server's setting"
    ),
    _mark_done(
        ROUTES,
        "response_format structured_outputs guided_json guided_regex guided_choice guided_grammar grammar json_schema",
        "the [form of the answer](#the-form-of-an-answer)",
    ),
    _mark_done((RESPONSES,), "text", "`format` is the form of the answer; `verbosity` changes nothing"),
    _mark_done((RESPONSES,), "reasoning", "`effort` is passed to templates as `reasoning_effort`; `summary` changes nothing"),
    _mark_done((CHAT,), "reasoning_effort", "passed to chat templates that read it; changes nothing with others"),
    _mark_done((CHAT,), "reasoning_format", "`none`: thoughts stay in the text; `auto`, `deepseek`: they are `reasoning_content`"),
    _mark_done((CHAT,), "include_reasoning", "false: thoughts are left out"),
    _mark_done((RESPONSES,), "previous_response_id", "the id of the response whose conversation the input continues"),
    _mark_done((RESPONSES,), "store", "false: do not keep the response for later requests"),
    _mark_accepted(tuple(route for route in ROUTES if route != RESPONSES), "store", "nothing is stored"),
    _mark_done((RESPONSES,), "include", "what else to return: `message.output_text.logprobs`; other values change nothing"),
    _mark_done(
        (RESPONSES,),
        "enable_response_messages",
        "true: also return prompt and output as the model sees them, with control tokens and ids, as in vLLM",
    ),
    _mark_done(
        V1,
        "truncate_prompt_tokens truncation_side",
        "keep only this many of the prompt's last tokens (`right`: first tokens); -1: as many as the context holds",
    ),
    _mark_done((*OPENAI, *LLAMAS), "prediction", "[ours](#what-a-request-may-carry)"),
    _mark_done(ROUTES, "datastore speculation speculative_metrics return_sources", "[ours](#what-a-request-may-carry)"),
    # ------------------------------------------------------------------ of tools
    _mark_done((CHAT, RESPONSES), "tools tool_choice", "the functions that the answer may call, and whether it must call one"),
    _mark_done((CHAT, RESPONSES), "parallel_tool_calls", "false: at most one call; absent: one if a call is required, else any number"),
    _mark_refused((CHAT,), "functions function_call", "use `tools` and `tool_choice`", [], "none"),
    _mark_refused((CHAT,), "parse_tool_calls", "calls are always recognised if a request has tools", True),
    # ------------------------------------------------------------------ accepted, whatever they say
    _mark_accepted((CHAT,), "verbosity", "a hint that no chat template reads"),
    _mark_accepted(
        ROUTES,
        "user safety_identifier metadata client_metadata service_tier priority request_id session_id "
        "prompt_cache_key prompt_cache_retention prompt_cache_options",
        "labels of the request: nothing is stored or passed on, and requests run in the order in which they come",
    ),
    _mark_done(
        LLAMAS,
        "id_slot",
        "the slot whose tokens can be saved afterwards. A request that only computes a prompt (`n_predict` 0) ends when its slot is named "
        "again; if that request only computes a prompt, too, then only if it is of the same editor window",
    ),
    _mark_accepted(V1, "id_slot", "there are no slots to choose"),
    _mark_accepted(
        (CHAT,),
        "response_fields",
        "a field of /completion that llama.vim sends with chats; llama.cpp ignores it there, too",
    ),
    _mark_accepted(ROUTES, "n_cache_reuse n_keep n_discard", "no context is shifted"),
    _mark_accepted(
        ROUTES,
        "speculative.n_min speculative.n_max speculative.p_min speculative.type t_max_prompt_ms stream_interval sse_ping_interval "
        "backend_sampling mm_payload guided_decoding_backend",
        "concerns only how soon the answer comes",
    ),
    _mark_accepted(
        ROUTES, "samplers", "the order is always penalties, temperature, top-k, top-p, min-p; each applies if its own field says so"
    ),
    _mark_accepted(
        ROUTES,
        "dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers mirostat_tau mirostat_eta xtc_threshold dynatemp_exponent "
        "adaptive_decay",
        "only with a refused field: `dry_multiplier`, `mirostat`, `xtc_probability`, `dynatemp_range`, `adaptive_target`",
    ),
    _mark_accepted(LLAMAS, "model", "there is only one model"),
    _mark_accepted((LLAMA,), "input_prefix input_suffix input_extra", "fields of /infill; here only `prompt` counts, as in llama.cpp"),
    # ------------------------------------------------------------------ refused: sampling
    _mark_refused(ROUTES, "typical_p typ_p", _NOT_SAMPLED, 1),
    _mark_refused(ROUTES, "top_n_sigma", _NOT_SAMPLED, -1, 0),
    _mark_refused(ROUTES, "mirostat", _NOT_SAMPLED, 0),
    _mark_refused(ROUTES, "dry_multiplier xtc_probability dynatemp_range", _NOT_SAMPLED, 0),
    _mark_refused(ROUTES, "adaptive_target", _NOT_SAMPLED, -1),
    _mark_refused(ROUTES, "min_keep", _NOT_SAMPLED, 0),
    _mark_refused(ROUTES, "repeat_last_n", "penalties always look at the whole text", -1, matters_with=_PENALTIES),
    _mark_refused(ROUTES, "watermarking", _NOT_SAMPLED, False),
    _mark_refused(_NO_BEAMS, "use_beam_search", "only /v1/completions has beam search", False),
    _mark_refused(_NO_BEAMS, "length_penalty", "a field of beam search", 1),
    _mark_refused(ROUTES, "repetition_detection", _NOT_SAMPLED),
    _mark_refused(ROUTES, "lora", "adapters are not supported", []),
    _mark_refused(ROUTES, "guided_whitespace_pattern", "docs/server.md says which white space JSON may have", ""),
    _mark_refused(ROUTES, "grammar_lazy", "a grammar always holds from the first token on", False),
    _mark_refused(ROUTES, "grammar_triggers preserved_tokens", "a grammar always holds from the first token on", []),
    _mark_refused(ROUTES, "vllm_xargs kv_transfer_params ec_transfer_params", "extensions are not supported", {}),
    _mark_refused(ROUTES, "cache_salt", "cached prompts are shared within a key's tenant; to separate users, give out several keys"),
    # ------------------------------------------------------------------ refused: what would have to be stored
    _mark_refused((RESPONSES,), "conversation", "conversations are not stored here; use `previous_response_id` to continue a response"),
    _mark_refused((RESPONSES,), "prompt", "prompts are not stored here"),
    _mark_refused((RESPONSES,), "background", "a response is written while the client waits; use `stream`", False),
    # ------------------------------------------------------------------ refused: prompts
    _mark_refused((RESPONSES,), "truncation", "use `truncate_prompt_tokens` to shorten a prompt", "disabled"),
    _mark_refused((CHAT,), "chat_template", "a request cannot bring a chat template; --chat-template sets one at the start"),
    _mark_refused((CHAT,), "documents", _TEMPLATE, []),
    _mark_refused((CHAT,), "add_special_tokens", "the chat template adds them", False),
    _mark_refused(
        (COMPLETIONS,), "add_special_tokens", "the tokenizer's special tokens are always added; send token ids to leave them out", True
    ),
    _mark_refused((COMPLETIONS,), "prompt_embeds", "a prompt is text or token ids"),
    _mark_refused(
        (INFILL, CHAT, RESPONSES),
        "parse_special",
        "here text is never a control token; /v1/completions and /completion have this field",
        False,
    ),
    _mark_refused((LLAMA,), "image_data multimodal_data", _TEXT_ONLY, []),
    _mark_refused((CHAT,), "audio web_search_options moderation", "the server writes only the model's text"),
    _mark_refused((CHAT,), "modalities", _TEXT_ONLY, ["text"]),
    _mark_refused((CHAT,), "media_io_kwargs mm_processor_kwargs", _TEXT_ONLY, {}),
    # ------------------------------------------------------------------ refused: chains of thought
    _mark_refused((CHAT,), "reasoning_control thinking_forced_open", "the chat template or the model begins thoughts", False),
    _mark_refused(OPENAI, "thinking_token_budget", "the model ends its thoughts", -1),
    # ------------------------------------------------------------------ refused: one dialect's words on another's routes
    _mark_refused((RESPONSES,), "logprobs", "use `include` here", 0, False),
    _mark_refused((RESPONSES,), "max_tokens max_completion_tokens", "use `max_output_tokens` here"),
    _mark_refused((RESPONSES,), "max_tool_calls", "the client calls the functions"),
    _mark_refused(V1, "n_indent", "only /completion and /infill have it", 0),
    _mark_refused(V1, "t_max_predict_ms", "only /completion and /infill have it", 0, -1),
    _mark_refused(LLAMAS, "truncate_prompt_tokens", "only routes under /v1 have it"),
)

NO_FIELDS = frozenset({"healed"})  # sampling parameters that follow from a prompt and are no fields of requests


def _list_rows() -> Iterator[Field]:
    told = {name for row in _ROWS for name in row.names}
    for name, option in options_of(SamplingParams).items():
        if name not in told and name not in NO_FIELDS:
            yield _mark_done(ROUTES, name, option.help)
    yield from _ROWS


# The whole table. Sampling parameters that all dialects have under their own names come first, as they are declared.
FIELDS = tuple(_list_rows())
BY_ROUTE: dict[str, dict[str, Field]] = {
    route: {name: row for row in FIELDS if route in row.routes for name in row.names} for route in ROUTES
}


def check(route: str, given: Mapping[str, Any]) -> None:
    """Raises ApiError 400 for a field that asks for what is refused."""
    table = BY_ROUTE[route]
    for name, value in given.items():
        row = table.get(name)
        if row is not None and row.fate is FieldSupport.REFUSED and row.asks_for_refused(value, given):
            raise ApiError(400, f"{name} is not supported: {row.why}", param=name, code="not_supported")


def find_unknown(route: str, given: Mapping[str, Any]) -> list[str]:
    """Return the names of fields that no row is about, without those that are null. They are ignored."""
    table = BY_ROUTE[route]
    return [name for name, value in given.items() if value is not None and name not in table]


def describe_unknown(route: str, name: str) -> str:
    """Return an unknown field's name, and the known one that may be meant, in letters that a header can hold."""
    shown = re.sub(r"[^\w.-]", "?", name[:SHOWN_CHARS], flags=re.ASCII)
    near = get_close_matches(shown, BY_ROUTE[route], 1)
    return f"{shown} (did you mean {near[0]}?)" if near else shown


def add_fields_to_schema(route: str, schema: dict[str, Any]) -> None:
    """Add to the JSON schema of a route's requests what its model does not name."""
    for name, row in BY_ROUTE[route].items():
        if row.fate is FieldSupport.ACCEPTED:
            schema["properties"].setdefault(name, {"description": f"Accepted: {row.why}."})
        elif row.fate is FieldSupport.REFUSED and not row.matters_with:
            schema["properties"].setdefault(name, {"enum": [None, *row.neutral], "description": f"Not supported: {row.why}."})
