"""The shape of OpenAI's requests and answers: what is accepted where, and how a request's fields become `SamplingParams`.

JSON that was parsed enters, checked requests leave; answers are checked on their way out. null means the default. Sampling parameters
that are no different here than elsewhere come from `sampling`. Knows nothing of routes, tokenizers or the engine's state.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from ngramspec.options import MAX_INT
from ngramspec.sampling_params import MAX_LOGPROBS, MAX_NEGATIVE_SEED, MAX_SEED, MAX_STOPS, SamplingParams
from ngramspec.server import sampling_fields
from ngramspec.server.base_schemas import Few, Items, StrictModel, TokenId
from ngramspec.server.chat_template import Style
from ngramspec.server.error_responses import ApiError, bad_request
from ngramspec.server.field_support import CHAT, COMPLETIONS
from ngramspec.server.structured_output import Structured
from ngramspec.server.tool_calls.stream_parser import MAX_TOOLS, ToolCalled, ToolChoice, ToolDeclared

TEMPERATURE = 1.0
"""Where a request does not say, as OpenAI has it."""
MaxTokens = Annotated[int, Field(ge=-1, le=MAX_INT)]
"""-1: as many as fit; 0: the prompt is computed, and nothing is written."""
StopString = Annotated[str, Field(min_length=1)]


class StreamOptions(StrictModel):
    include_usage: bool | None = None


@sampling_fields.takes_sampling()
class Sampled(Structured):
    """The fields that both of OpenAI's routes share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Field(ge=-MAX_NEGATIVE_SEED, le=MAX_SEED)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]] | None, Few] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_prompt: bool | None = None
    """False: the prompt is computed, whatever is cached of it."""

    def cut(self, ids: list[int], room: int) -> list[int]:
        """What is left of a prompt where it is to be truncated, of a context that has room for so many tokens beside the answer."""
        if self.truncate_prompt_tokens is None:
            return ids
        n = max(room, 1) if self.truncate_prompt_tokens < 0 else self.truncate_prompt_tokens
        return ids[:n] if self.truncation_side == "right" else ids[max(len(ids) - n, 0) :]

    def params(self, *, max_tokens: int, n: int, logprobs: int | None, prompt_logprobs: int | None = None) -> SamplingParams:
        """Raises ApiError (400) that names the field."""
        try:
            return SamplingParams(
                max_tokens=max_tokens,
                n=n,
                seed=self.seed,
                stop=self.stop or (),
                logit_bias=_bias(self.logit_bias or {}),
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                grammar=self.form,
                **{"temperature": TEMPERATURE} | sampling_fields.given(self),
            )
        except ValueError as error:
            raise bad_request(error) from None


def _bias(given: dict[str, float]) -> dict[int, float]:
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_INT):
            raise ApiError(400, f"logit_bias: keys must be token ids, got {key[:40]!r}", param="logit_bias")
    return {int(key): bias for key, bias in given.items()}


class CompletionRequest(Sampled):
    route = COMPLETIONS

    prompt: str | Items[str] | Items[TokenId] | Items[Items[TokenId]] | None = None
    suffix: str | None = None
    max_tokens: MaxTokens | None = None
    n_predict: MaxTokens | None = None
    """`max_tokens` in llama.cpp's words."""
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    parse_special: bool | None = None
    """False: control tokens in the prompt's text are spelled out. Default: what the server's settings say."""
    prediction: str | None = None
    """The output that is expected, such as an edited file's old text."""


class Part(StrictModel):
    type: str
    text: str | None = None


class Message(StrictModel):
    role: str
    content: str | Items[Part] | None = None
    tool_calls: Annotated[Items[ToolCalled], Field(max_length=MAX_TOOLS)] | None = None
    """Of the assistant; then there may be no content."""
    tool_call_id: str | None = None
    """Of a tool: which call this is the result of."""
    name: str | None = None
    function_call: Any = None


class Prediction(StrictModel):
    type: Literal["content"]
    content: str | Items[Part]


class Tooled(StrictModel):
    """What a chat may call."""

    messages: Annotated[Items[Message], Field(min_length=1)]
    tools: Annotated[Items[ToolDeclared], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    """`none`, `auto`, `required` or a function; those other than `none` and `auto` hold the answer to calls that fit their schemas."""
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    """False: the prompt ends behind the last message."""
    continue_final_message: bool | None = None
    """The last message, the assistant's, goes on; only with `add_generation_prompt` false."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the model's chat template."""

    def style(self) -> Style:
        """Raises ApiError (400)."""
        answer_follows, goes_on = self.add_generation_prompt is not False, bool(self.continue_final_message)
        if goes_on and answer_follows:
            why = "continue_final_message: only with add_generation_prompt false: a message goes on, or another begins"
            raise ApiError(400, why, param="continue_final_message")
        return Style(answer_follows, goes_on, self.variables())

    def variables(self) -> dict[str, Any]:
        return self.chat_template_kwargs or {}


class ApplyTemplateRequest(Tooled):
    """llama.cpp's."""


class ApplyTemplateResponse(BaseModel):
    prompt: str


class ChatRequest(Tooled, Sampled):
    route = CHAT

    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    n_predict: MaxTokens | None = None
    """`max_tokens` in llama.cpp's words."""
    reasoning_effort: str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prediction: Prediction | None = None

    def variables(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | super().variables()

    @property
    def most_tokens(self) -> int | None:
        """None: as many as fit."""
        asked = next((n for n in (self.max_completion_tokens, self.max_tokens, self.n_predict) if n is not None), -1)
        return None if asked < 0 else asked


# ------------------------------------------------------------------ answers


class PromptDetails(BaseModel):
    cached_tokens: int


class CompletionDetails(BaseModel):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | None = None


class SourcedToken(BaseModel):
    text: str
    source: str | None
    """Who drafted the token, with file and line where a datastore did; null: the model wrote it unaided."""


class Sources(BaseModel):
    tokens: list[SourcedToken]


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    metrics: dict[str, Any] | None = None
    timings: dict[str, float] | None = None


class LegacyLogprobs(BaseModel):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: str
    stop_reason: int | str | None = None
    ngramspec: Sources | None = None


class CompletionResponse(_Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]
    refusal: None = None


class FunctionCall(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None = None
    ngramspec: Sources | None = None


class ChatResponse(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]
