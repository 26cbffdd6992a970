"""Requests and answers of llama.cpp's routes, as pydantic models.

JSON that was parsed enters, checked requests leave. Plain declarations: what becomes of a request is decided in `routes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, Strict, field_validator, model_validator

from ngramspec.options import MAX_INT
from ngramspec.sampling_params import MAX_LOGPROBS, MAX_NEGATIVE_SEED, MAX_SEED, MAX_STOPS
from ngramspec.server.field_support import INFILL, LLAMA
from ngramspec.server.request_fields import (
    OTHER_NAMES,
    Few,
    GenerationFields,
    Items,
    NullIsDefault,
    StrictModel,
    TokenId,
    Whole,
    add_sampling_fields,
)


class PromptObject(StrictModel):
    """llama.cpp's way to send a text with images; without any it is the text."""

    prompt_string: str
    multimodal_data: Annotated[Items[Any], Field(max_length=0)] | None = None


# A text, or texts and token ids that are put end to end.
TextOrTokens = str | Items[TokenId | str]


@add_sampling_fields(OTHER_NAMES)
class LlamaRequest(NullIsDefault, GenerationFields):
    """What /infill and /completion share."""

    defaults: ClassVar[dict[str, Any]] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    """llama.cpp's defaults, if they are not those of `SamplingParams`."""

    n_predict: Annotated[int, Field(ge=-1, le=MAX_INT), Whole] = -1
    """-1: until the context is full; 0: the prompt is computed, and nothing written."""
    max_tokens: Annotated[int, Field(ge=-1, le=MAX_INT), Whole] | None = None
    """`n_predict` by its other name, used if that is not given."""
    n_cmpl: Annotated[int, Field(ge=1, le=128), Whole] = 1
    n: Annotated[int, Field(ge=1, le=128), Whole] | None = None
    """`n_cmpl` in OpenAI's words."""
    logit_bias: Annotated[Items[Annotated[tuple[TokenId | str, float | bool], Strict(False)]] | dict[str, float | bool], Few] = Field(
        default_factory=list
    )
    """[[token, bias], …] or {token: bias, …}: ids, or texts, of which each token is meant; false instead of a number bans it."""
    seed: Annotated[int, Field(ge=-MAX_NEGATIVE_SEED, le=MAX_SEED), Whole] = -1
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] = ""
    n_probs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), Whole] = 0
    n_indent: Annotated[int, Field(ge=0, le=MAX_INT), Whole] = 0
    """A line with less indentation than this number of blanks and tabs ends the text."""
    t_max_predict_ms: Annotated[int, Field(ge=-1, le=MAX_INT), Whole] = 0
    """Milliseconds after which the next line end ends the text. 0, -1: never."""
    return_tokens: bool = False
    response_fields: Items[str] = Field(default_factory=list)
    """What to answer: field b of a is "a/b". None: everything."""
    return_progress: bool = False
    timings_per_token: bool = False
    stream: bool = False
    id_slot: Annotated[int, Field(ge=-1, le=MAX_INT), Whole] = -1
    """The slot whose tokens can be saved afterwards; -1: none."""
    prediction: str | None = None
    """The output that is expected."""

    @model_validator(mode="after")
    def _by_its_other_name(self) -> Self:
        if "n_predict" not in self.model_fields_set and self.max_tokens is not None:
            self.n_predict = self.max_tokens
        if "n_cmpl" not in self.model_fields_set and self.n is not None:
            self.n_cmpl = self.n
        return self

    @field_validator("seed")
    @classmethod
    def _read_random_seed(cls, seed: int) -> int:
        return -1 if seed == 2**32 - 1 else seed  # llama.cpp's own word for any seed


class LlamaCompletionBody(LlamaRequest):
    route = LLAMA

    prompt: TextOrTokens | PromptObject | Items[TextOrTokens | PromptObject]
    parse_special: bool | None = None
    """False: control tokens in the prompt's text are spelled out. Default: what the server's settings say."""

    @property
    def has_several(self) -> bool:
        """A list that holds no ids is a list of prompts."""
        return isinstance(self.prompt, list) and bool(self.prompt) and not any(isinstance(part, int) for part in self.prompt)

    def list_prompts(self) -> Iterator[TextOrTokens]:
        for prompt in self.prompt if self.has_several else [self.prompt]:
            yield prompt.prompt_string if isinstance(prompt, PromptObject) else prompt  # type: ignore[misc]


class SlotFile(NullIsDefault):
    """The file of a slot that is saved or restored."""

    filename: str = ""
    """Not read where a slot is erased."""


class Chunk(NullIsDefault):
    """A part of another file."""

    text: str
    filename: str = "tmp"


class InfillBody(LlamaRequest):
    route = INFILL
    defaults: ClassVar[dict[str, Any]] = LlamaRequest.defaults | {"temperature": 0.0}

    input_prefix: str
    input_suffix: str
    input_extra: Items[Chunk] = Field(default_factory=list)
    prompt: str = ""
    """What stands before the cursor in its line: follows the prefix."""
