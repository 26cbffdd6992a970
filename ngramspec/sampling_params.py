"""How tokens are picked: the sampling parameters of a request, each declared once with its bounds and meaning.

What a user gives enters, checked parameters leave. The command line and both HTTP dialects read the same declarations, so that a
parameter that is added here and in `sampling.sampler` is there everywhere. Knows no model and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from ngramspec.errors import InvalidInputError
from ngramspec.field_docs import document_fields
from ngramspec.grammar.constraint import Grammar, GrammarKind
from ngramspec.options import MAX_INT, Flag, Integer, Number, TextKind, TextList, TokenIds, TokenNumbers, check, option

MAX_SEED, MAX_NEGATIVE_SEED = 2**64 - 1, 2**63
MAX_STOPS = 64
MAX_BAD_WORDS = 256
MAX_LOGPROBS = 100
# Divisors of logits; with smaller ones what they divide would leave float32.
LEAST_TEMPERATURE, LEAST_PENALTY = 1e-6, 1e-3


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are picked. The tokens depend on these, the prompt and the seed, and on nothing else.

    Raises InvalidInputError (a ValueError), naming the accepted range, for any value outside it.
    """

    max_tokens: int = option(128, Integer(1), "Most tokens to write; fewer if `max_model_len` is reached first.")
    min_tokens: int = option(0, Integer(0), "Fewest tokens before a stop token or stop string may end the text.")
    temperature: float = option(
        0.0,
        Number(0, 100),
        "0, or below 1e-6: take the most likely token (of equals the lowest id). Above: sample; higher values vary more.",
        flags=("--temperature", "-t"),
    )
    top_k: int = option(0, Integer(-MAX_INT), "Sample among the k most likely tokens; 0 or less: among all.")
    top_p: float = option(
        1.0,
        Number(0, 1),
        "Sample among the fewest tokens whose probabilities add up to this share; 0: take the most likely token.",
    )
    min_p: float = option(0.0, Number(0, 1), "Drop tokens whose probability is below this share of the most likely token's.")
    repetition_penalty: float = option(
        1.0,
        Number(LEAST_PENALTY, 100),
        "Above 1, tokens that occur in prompt or output become less likely: positive logits are divided by it, negative ones multiplied.",
    )
    presence_penalty: float = option(0.0, Number(-2, 2), "Subtracted once from the logit of every token that occurs in the output.")
    frequency_penalty: float = option(0.0, Number(-2, 2), "Subtracted from a token's logit for every occurrence in the output.")
    logit_bias: dict[int, float] = option(
        dict, TokenNumbers(-100, 100), "Token id to a number added to its logit; -100 bans the token.", flags=None
    )
    seed: int | None = option(
        None,
        Integer(-MAX_NEGATIVE_SEED, MAX_SEED, optional=True),
        "The same seed gives the same text. Default, or -1: a random one, which is reported. Below -1: counted down from 2**64.",
    )
    n: int = option(1, Integer(1, 128), "How many samples to write; sample i uses its own stream of the seed.", flags=("--n",))
    stop: Sequence[str] = option(
        (),
        TextList(MAX_STOPS),
        "Text, or a control token's name, that ends the output and is not part of it. May be repeated.",
        flags=("--stop", "-s"),
    )
    stop_token_ids: Sequence[int] = option((), TokenIds(), "Ids that end the text, beside the model's own.", flags=None)
    include_stop_str_in_output: bool = option(False, Flag(), "The stop string that ends the text is part of it.", flags=None)
    allowed_token_ids: Sequence[int] | None = option(
        None,
        TokenIds(optional=True),
        "Only these tokens may be written; without the model's own end token the output has no other end than a limit.",
        flags=None,
    )
    bad_words: Sequence[str] = option(
        (),
        TextList(MAX_BAD_WORDS),
        "Words that are not written: the last token of each is banned after the others, with or without a blank before the word.",
        flags=None,
    )
    ignore_eos: bool = option(False, Flag(), "Go on past the model's own end of text.")
    skip_special_tokens: bool = option(True, Flag(), "Special tokens are no part of the text; the one that ends it never is.", flags=None)
    spaces_between_special_tokens: bool = option(
        True, Flag(), "False: special tokens side by side have no blank between them, where their decoder puts one.", flags=None
    )
    grammar: Grammar | None = option(
        None, GrammarKind(), "What the text must look like: a JSON schema, a regular expression, choices or a grammar.", flags=None
    )
    healed: str = option(
        "",
        TextKind(),
        "The end of the prompt's text, if its token ids leave it out: the first tokens spell it, and it is no part of the output's text. "
        "Tokens that only spell it do not count for `min_tokens` and `max_tokens`.",
        flags=None,
    )
    logprobs: int | None = option(
        None,
        Integer(-1, MAX_LOGPROBS, optional=True),
        "Report log-probabilities of each token and of this many others; -1: of the whole vocabulary.",
        panel="Output",
    )
    logprob_token_ids: Sequence[int] = option(
        (), TokenIds(), "Report log-probabilities of these tokens in place of the most likely ones; with `logprobs`.", flags=None
    )
    post_sampling_probs: bool = option(
        False,
        Flag(),
        "Log-probabilities are those of the distribution that the token is drawn from; tokens that cannot be drawn have none.",
        flags=None,
    )
    prompt_logprobs: int | None = option(
        None,
        Integer(-1, MAX_LOGPROBS, optional=True),
        "The same for the prompt's tokens, all of which are then computed: no prefix cache.",
        flags=None,
    )

    def __post_init__(self) -> None:
        put = object.__setattr__
        if isinstance(self.stop, str):
            put(self, "stop", (self.stop,))
        check(self)
        if self.min_tokens > self.max_tokens:
            raise InvalidInputError(f"min_tokens must be an integer from 0 to max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if self.healed and (self.grammar is not None or self.allowed_token_ids is not None):
            raise InvalidInputError("healed must be empty with a grammar or allowed_token_ids: they say how the output begins")
        put(self, "stop", tuple(self.stop))
        put(self, "stop_token_ids", tuple(int(token) for token in self.stop_token_ids))
        put(self, "bad_words", tuple(self.bad_words))
        put(self, "logprob_token_ids", tuple(int(token) for token in self.logprob_token_ids))
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", tuple(int(token) for token in self.allowed_token_ids))
        put(self, "top_k", max(int(self.top_k), 0))
        if self.top_p == 0 or self.temperature < LEAST_TEMPERATURE:
            put(self, "temperature", 0.0)
        if self.seed is not None and self.seed < 0:
            put(self, "seed", None if self.seed == -1 else int(self.seed) % (MAX_SEED + 1))


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` as keywords, for type checkers."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]
    seed: int | None
    n: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str]
    ignore_eos: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    grammar: Grammar | None
    healed: str
    logprobs: int | None
    prompt_logprobs: int | None
    logprob_token_ids: Sequence[int]
    post_sampling_probs: bool


document_fields(__name__)
