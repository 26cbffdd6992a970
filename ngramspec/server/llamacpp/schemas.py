"""The shape of llama.cpp's requests: what is accepted where, in its words, with the extras that all our routes take.

JSON that was parsed enters; checked requests, and `SamplingParams` made of them, leave. Knows nothing of routes or tokenizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, Field, PrivateAttr, Strict, field_validator, model_validator

from ngramspec.options import MAX_INT
from ngramspec.sampling_params import MAX_LOGPROBS, MAX_NEGATIVE_SEED, MAX_SEED, MAX_STOPS, SamplingParams
from ngramspec.server import sampling_fields
from ngramspec.server.base_schemas import Few, Items, StrictModel, TokenId
from ngramspec.server.field_support import INFILL, LLAMA
from ngramspec.server.structured_output import Structured

TextOrTokens = str | Items[TokenId | str]
"""A text, or texts and token ids that are put end to end."""

OTHER_NAMES = {"repeat_penalty": "repetition_penalty"}
"""llama.cpp's, and those of `SamplingParams`; both are taken."""


@sampling_fields.takes_sampling(OTHER_NAMES)
class Generation(Structured):
    """What /infill and /completion share."""

    defaults: ClassVar[dict[str, Any]] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    """llama.cpp's, where they are not those of `SamplingParams`."""

    n_predict: Annotated[int, Field(ge=-1, le=MAX_INT)] = -1
    """-1: until the context is full; 0: the prompt is computed, and nothing written."""
    max_tokens: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    """`n_predict` by its other name, where that is not given."""
    n_cmpl: Annotated[int, Field(ge=1, le=128)] = 1
    logit_bias: Annotated[Items[Annotated[tuple[TokenId, float | bool], Strict(False)]] | dict[str, float], Few] = Field(
        default_factory=list
    )
    """[[id, bias], …] or {"id": bias, …}; false instead of a number bans the token."""
    seed: Annotated[int, Field(ge=-MAX_NEGATIVE_SEED, le=MAX_SEED)] = -1
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] = ""
    n_probs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    n_indent: Annotated[int, Field(ge=0, le=MAX_INT)] = 0
    """A line with less indentation than so many blanks and tabs ends the text."""
    t_max_predict_ms: Annotated[int, Field(ge=-1, le=MAX_INT)] = 0
    """After so long, the next line end ends the text. 0, -1: never."""
    cache_prompt: bool = True
    return_tokens: bool = False
    response_fields: Items[str] = Field(default_factory=list)
    """What to answer: field b of a is "a/b". None: everything."""
    stream: bool = False
    prediction: str | None = None
    """The output that is expected."""
    _predicted: list[int] | None = PrivateAttr(None)

    @property
    def predicted(self) -> list[int] | None:
        """The prediction's ids, once it is encoded."""
        return self._predicted

    @predicted.setter
    def predicted(self, ids: list[int]) -> None:
        self._predicted = ids

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        """null means the default, as it does to llama.cpp."""
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _by_its_other_name(self) -> Self:
        if "n_predict" not in self.model_fields_set and self.max_tokens is not None:
            self.n_predict = self.max_tokens
        return self

    @field_validator("seed")
    @classmethod
    def _random(cls, seed: int) -> int:
        return -1 if seed == 2**32 - 1 else seed  # llama.cpp's own word for any seed

    def params(self, i: int, *, room: int, stop_ids: Sequence[int] = ()) -> SamplingParams:
        """How the i-th text of a prompt is written, in up to `room` tokens. `stop_ids` end it, too. Raises ValueError."""
        given = self.defaults | sampling_fields.given(self, OTHER_NAMES)
        if not given.get("ignore_eos"):
            given["stop_token_ids"] = [*stop_ids, *given.get("stop_token_ids", ())]
        return SamplingParams(
            max_tokens=max(self.n_predict, 1) if self.n_predict >= 0 else room,
            seed=None if self.seed == -1 else (self.seed + i) % (MAX_SEED + 1),
            stop=tuple(word for word in ([self.stop] if isinstance(self.stop, str) else self.stop) if word),
            logit_bias=self.bias(),
            logprobs=self.n_probs or None,
            grammar=self.form,
            **given,
        )

    def settings(self, params: SamplingParams) -> dict[str, Any]:
        """llama.cpp's `generation_settings`, without what the model says."""
        theirs = {name: other for other, name in OTHER_NAMES.items()}
        return {theirs.get(name, name): getattr(params, name) for name in sampling_fields.SHARED} | {
            "n_predict": self.n_predict,
            "max_tokens": params.max_tokens,
            "seed": -1 if params.seed is None else params.seed,
            "stop": list(params.stop),
            "grammar": "" if params.grammar is None else params.grammar.text,
            "n_probs": self.n_probs,
            "n_indent": self.n_indent,
            "t_max_predict_ms": self.t_max_predict_ms,
            "stream": self.stream,
            "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
        }

    def bias(self) -> dict[int, float]:
        """Raises ValueError."""
        pairs = self.logit_bias.items() if isinstance(self.logit_bias, dict) else self.logit_bias
        bias: dict[int, float] = {}
        for token, value in pairs:
            if isinstance(token, str) and not (token.isascii() and token.isdigit() and len(token) <= 10):
                raise ValueError(f"logit_bias must be for token ids, got {token[:40]!r}")
            if value is True:
                raise ValueError("logit_bias must be numbers, or false for a token that is banned, got true")
            bias[int(token)] = -100.0 if value is False else float(value)
        return bias


class LlamaCompletionBody(Generation):
    route = LLAMA

    prompt: TextOrTokens | Items[TextOrTokens]
    parse_special: bool | None = None
    """False: control tokens in the prompt's text are spelled out. Default: what the server's settings say."""

    @property
    def has_several(self) -> bool:
        """A list that holds no ids is a list of prompts."""
        return isinstance(self.prompt, list) and bool(self.prompt) and not any(isinstance(part, int) for part in self.prompt)

    def prompts(self) -> Iterator[TextOrTokens]:
        if self.has_several:
            yield from self.prompt  # type: ignore[misc]
        else:
            yield self.prompt  # type: ignore[misc]


class Chunk(StrictModel):
    """A part of another file."""

    text: str
    filename: str = "tmp"


class InfillBody(Generation):
    route = INFILL
    defaults: ClassVar[dict[str, Any]] = Generation.defaults | {"temperature": 0.0}

    input_prefix: str
    input_suffix: str
    input_extra: Items[Chunk] = Field(default_factory=list)
    prompt: str = ""
    """What stands before the cursor in its line: goes on behind the prefix."""


class TokenizeBody(StrictModel):
    content: TextOrTokens
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class Piece(BaseModel):
    id: int
    piece: str | list[int]


class TokenizeResponse(BaseModel):
    tokens: list[int] | list[Piece]


class DetokenizeBody(StrictModel):
    tokens: Items[TokenId]


class DetokenizeResponse(BaseModel):
    content: str
