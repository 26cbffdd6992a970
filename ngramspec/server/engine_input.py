"""What a request asks of the engine: token ids, sampling parameters and hints, within the server's limits.

Checked requests and ids enter, an `EngineInput` for `Engine.submit` leaves. Knows neither dialects nor routes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ngramspec.engine.llm_engine import Engine, Hints
from ngramspec.errors import InvalidInputError, TokenizerError
from ngramspec.options import MAX_INT
from ngramspec.sampling_params import SamplingParams
from ngramspec.server.auth import Identity
from ngramspec.server.error_responses import ApiError, make_context_error, make_field_error
from ngramspec.server.request_fields import GenerationFields
from ngramspec.server.settings import Limits

ALL = -1  # log-probabilities: those of the whole vocabulary
MAX_VOCABULARY = 1 << 21  # log-probabilities of one request that asks for all; each takes some hundred bytes
MAX_BIAS_CHARS = 64  # of a text in `logit_bias`
SHOWN_TEXTS = 8  # that one error names


@dataclass(slots=True)
class EngineInput:
    """One prompt for the engine."""

    prompt: list[int]
    params: SamplingParams
    hints: Hints


def make_hints(request: GenerationFields, identity: Identity, engine: Engine) -> Hints:
    """Return what the engine is told beside the prompt; `encode_prediction` adds the prediction.

    Raises ApiError 403 if the request asks for what this identity may not see, 400 for a datastore that cannot be used.
    """
    for name, asked in (("return_sources", request.return_sources), ("speculative_metrics", request.speculative_metrics == "detailed")):
        if asked and not identity.trusted:
            why = "where drafts come from is told to an administrator, or, without keys, on this machine"
            raise ApiError(403, f"{name}: {why}", param=name)
    return Hints(
        tenant=identity.tenant,
        datastores=identity.choose_datastores(request.datastore, engine.datastores),
        speculation=request.speculation is not False,
        prefix_cache=request.cache_prompt is not False,
    )


def encode_prediction(hints: Hints, text: str | None, engine: Engine, healed: str = "") -> None:
    """Add the ids of the output that a request expects behind `healed`, if it expects one. May take a while.

    Raises InvalidInputError, TokenizerError.
    """
    if text is not None:
        hints["prediction"] = engine.encode_text(healed + text)


def check_token_ids(bias: Mapping[str, float]) -> None:
    """Raises ApiError (400) for keys of `logit_bias` that are no token ids, which OpenAI's routes take alone."""
    if texts := [key for key in bias if not re.fullmatch("-?[0-9]+", key)]:
        shown = ", ".join(repr(text[:MAX_BIAS_CHARS]) for text in texts[:SHOWN_TEXTS]) + (", …" if len(texts) > SHOWN_TEXTS else "")
        why = f"its keys must be token ids, got {shown}; /completion takes texts, and /tokenize tells their ids"
        raise make_field_error("logit_bias", why)


def read_bias(given: Iterable[tuple[int | str, float | bool]], engine: Engine, most: int) -> dict[int, float]:
    """Return `logit_bias` by token id, of up to `most` pairs (a token id, or a text, whose tokens are meant; the bias, or false: never).

    Raises ApiError (400).
    """
    bias: dict[int, float] = {}
    for n, (token, value) in enumerate(given):
        if n >= most:
            raise make_field_error("logit_bias", f"at most {most} entries of logit_bias")
        if value is True:
            raise ApiError(400, "logit_bias must be numbers, or false for a token that is banned, got true", param="logit_bias")
        if isinstance(token, str) and not re.fullmatch("-?[0-9]+", token):
            if not 0 < len(token) <= MAX_BIAS_CHARS:
                raise make_field_error("logit_bias", f"texts of 1 to {MAX_BIAS_CHARS} characters, got {len(token)}")
            try:
                ids = engine.encode_text(token)
            except (InvalidInputError, TokenizerError) as error:
                raise make_field_error("logit_bias", str(error)) from None
        else:
            ids = [int(token) if len(str(token)) <= 10 else MAX_INT]
            if not 0 <= ids[0] < engine.vocab_size:
                why = f"logit_bias must be for token ids 0 to {engine.vocab_size - 1} of {engine.vocab_size}, got {ids[0]}"
                raise ApiError(400, why, param="logit_bias")
        bias |= dict.fromkeys(ids, -100.0 if value is False else float(value))
    return bias


def cut_prompt(ids: list[int], n: int | None, *, room: int, side: str | None) -> list[int]:
    """Return the last `n` ids of a prompt (`side` "right": the first); with a negative `n` as many as have `room`, with None all."""
    if n is None:
        return ids
    n = max(room, 1) if n < 0 else n
    return ids[:n] if side == "right" else ids[max(len(ids) - n, 0) :]


class RequestLimits:
    """The most that a request may ask the engine for."""

    def __init__(self, limits: Limits, max_model_len: int, vocab_size: int, fewest_tokens: Callable[[str], int]) -> None:
        """Take the limits of a server and of its model. `fewest_tokens(text)`: a number of tokens that the text has at least."""
        self.limits, self.max_model_len, self.vocab_size = limits, max_model_len, vocab_size
        self.max_prompt = min(max_model_len - 1, max_model_len if limits.prompt_tokens is None else limits.prompt_tokens)
        """Tokens."""
        self._fewest_tokens = fewest_tokens

    def count_room(self, n_tokens: int) -> int:
        """Return how many tokens the context has room for after a prompt of `n_tokens`; one at least."""
        return max(self.max_model_len - n_tokens, 1)

    def check_prompt(self, n_tokens: int, param: str = "prompt", *, at_least: bool = False) -> None:
        """Raises ApiError 400 for a prompt of too many tokens. `at_least`: it may have more than `n_tokens`."""
        if n_tokens > self.max_prompt:
            n_ctx = self.max_model_len if self.limits.prompt_tokens is None else self.max_prompt
            raise make_context_error(n_tokens, n_ctx, param, at_least=at_least)

    def check_text(self, text: str, param: str = "prompt") -> None:
        """Raises ApiError 400 for a prompt of this text if it is too long however it is tokenized. Takes milliseconds."""
        if 4 * len(text) > self.max_prompt:  # a character has up to 4 bytes, and a byte is at most a token
            self.check_prompt(self._fewest_tokens(text), param, at_least=True)

    def check_params(self, params: SamplingParams, n_prompts: int = 1) -> None:
        """Raises ApiError 400 for parameters that are valid but ask for too much."""
        limits = self.limits
        each = min(params.max_tokens, self.max_model_len)
        self._check_most("max_tokens", params.n * n_prompts * each, limits.output_tokens, "tokens of all texts together")
        if limits.logprobs >= 0:
            for name, asked in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
                asked = self.vocab_size if asked == ALL else asked or 0
                self._check_most(name, asked, limits.logprobs, "log-probabilities of each token")
        self._check_most("stop", len(params.stop), limits.stops, "stop strings")
        self._check_most("stop", max(map(len, params.stop), default=0), limits.stop_chars, "characters of a stop string")
        self._check_most("stop_token_ids", len(params.stop_token_ids), limits.bias, "stop_token_ids")
        self._check_most("logprob_token_ids", len(params.logprob_token_ids), limits.bias, "logprob_token_ids")
        self._check_most("allowed_token_ids", len(params.allowed_token_ids or ()), self.vocab_size, "allowed_token_ids")
        self._check_most("logit_bias", len(params.logit_bias), limits.bias, "entries of logit_bias")

    def check_vocabulary(self, params: SamplingParams, n_prompt: int) -> None:
        """Raises ApiError 400 if prompts of `n_prompt` tokens together ask for the whole vocabulary at too many positions."""
        for name, asked, n in (
            ("logprobs", params.logprobs, params.n * params.max_tokens),
            ("prompt_logprobs", params.prompt_logprobs, n_prompt),
        ):
            if asked == ALL:
                self._check_most(name, n * self.vocab_size, MAX_VOCABULARY, "log-probabilities of all tokens together")

    def _check_most(self, param: str, asked: int, most: int, what: str) -> None:
        if asked > most:
            raise make_field_error(param, f"at most {most} {what}, got {asked}")
