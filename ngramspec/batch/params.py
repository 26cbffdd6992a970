"""How tokens are picked: the sampling parameters of a request, checked as they are made. Plain data; knows no model and no tokenizer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

MAX_SEED = 2**64 - 1
MAX_STOPS = 64
MAX_LOGPROBS = 100
LEAST_TEMPERATURE, LEAST_PENALTY = 1e-6, 1e-3
"""Divisors of logits; with smaller ones what they divide would leave float32."""


def _require(ok: bool, name: str, value: object, accepted: str) -> None:
    if not ok:
        raise ValueError(f"{name} must be {accepted}, got {value!r}")


def _number(value: object, lo: float, hi: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and lo <= value <= hi


def _integer(value: object, lo: int, hi: int) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(lo <= value <= hi)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are picked. The tokens depend on these, the prompt and the seed, and on nothing else.

    Raises ValueError, naming the accepted range, for any value outside it.
    """

    max_tokens: int = 128
    """Upper bound of generated tokens, 1 or more; less where `max_model_len` ends first."""
    min_tokens: int = 0
    """No stop token or stop string ends the text before this many tokens."""
    temperature: float = 0.0
    """0 picks the most likely token (ties: the lowest id); above, samples. 0, or 1e-6 to 100."""
    top_k: int = 0
    """Sample among the k most likely tokens; 0 or -1: all."""
    top_p: float = 1.0
    """Sample among the fewest tokens that hold this share of the probability, in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides positive (multiplies negative) logits of tokens in prompt and output, in [0.001, 100]."""
    presence_penalty: float = 0.0
    """Subtracted once from logits of tokens already in the output, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output, in [-2, 2]."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Token id to a number added to its logit, in [-100, 100]; -100 bans the token."""
    seed: int | None = None
    """0 to 2**64-1. None draws a fresh seed per request; it is reported in the completion."""
    n: int = 1
    """Independent samples of the same prompt, 1 to 128; sample i uses its own stream of the seed."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; none of them is part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the text, beside the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """The model's own end-of-sequence ids do not end the text."""
    logprobs: int | None = None
    """Report the log-probability of each token and of this many most likely ones, 0 to 100."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, all of which are then computed: no prefix cache."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        if isinstance(self.stop, str):
            put(self, "stop", (self.stop,))
        _require(
            isinstance(self.stop, (list, tuple)) and len(self.stop) <= MAX_STOPS and all(isinstance(s, str) and s for s in self.stop),
            "stop",
            self.stop,
            f"up to {MAX_STOPS} non-empty strings",
        )
        put(self, "stop", tuple(self.stop))
        _require(
            isinstance(self.stop_token_ids, (list, tuple)) and all(_integer(t, 0, 2**31 - 1) for t in self.stop_token_ids),
            "stop_token_ids",
            self.stop_token_ids,
            "token ids (integers from 0)",
        )
        put(self, "stop_token_ids", tuple(int(t) for t in self.stop_token_ids))
        _require(
            isinstance(self.logit_bias, dict)
            and all(_integer(t, 0, 2**31 - 1) and _number(b, -100, 100) for t, b in self.logit_bias.items()),
            "logit_bias",
            self.logit_bias,
            "a dict of token id to a number in [-100, 100]",
        )
        _require(_integer(self.max_tokens, 1, 2**31 - 1), "max_tokens", self.max_tokens, "an integer from 1 to 2147483647")
        _require(
            _integer(self.min_tokens, 0, self.max_tokens),
            "min_tokens",
            self.min_tokens,
            f"an integer from 0 to max_tokens ({self.max_tokens})",
        )
        _require(
            _number(self.temperature, LEAST_TEMPERATURE, 100) or _number(self.temperature, 0, 0),
            "temperature",
            self.temperature,
            f"0, or a number in [{LEAST_TEMPERATURE}, 100]",
        )
        _require(_integer(self.top_k, -1, 2**31 - 1), "top_k", self.top_k, "an integer from -1 (0 and -1: all)")
        put(self, "top_k", max(int(self.top_k), 0))
        _require(_number(self.top_p, 0, 1) and self.top_p > 0, "top_p", self.top_p, "a number in (0, 1]")
        _require(_number(self.min_p, 0, 1), "min_p", self.min_p, "a number in [0, 1]")
        _require(
            _number(self.repetition_penalty, LEAST_PENALTY, 100),
            "repetition_penalty",
            self.repetition_penalty,
            f"a number in [{LEAST_PENALTY}, 100]",
        )
        _require(_number(self.presence_penalty, -2, 2), "presence_penalty", self.presence_penalty, "a number in [-2, 2]")
        _require(_number(self.frequency_penalty, -2, 2), "frequency_penalty", self.frequency_penalty, "a number in [-2, 2]")
        _require(self.seed is None or _integer(self.seed, 0, MAX_SEED), "seed", self.seed, f"None or an integer from 0 to {MAX_SEED}")
        _require(_integer(self.n, 1, 128), "n", self.n, "an integer from 1 to 128")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or _integer(value, 0, MAX_LOGPROBS), name, value, f"None or an integer from 0 to {MAX_LOGPROBS}")
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")
