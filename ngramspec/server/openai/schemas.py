"""Requests and answers of OpenAI's routes, as pydantic models.

JSON that was parsed enters, checked requests leave; answers are checked on their way out. null means the default. Fields that all
dialects share come from `request_fields`. Plain declarations: what becomes of a request is decided in `handler`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field

from ngramspec.options import MAX_INT
from ngramspec.prompts.messages import MEDIA, name_omitted
from ngramspec.sampling_params import MAX_LOGPROBS, MAX_NEGATIVE_SEED, MAX_SEED, MAX_STOPS
from ngramspec.server.field_support import CHAT, COMPLETIONS
from ngramspec.server.request_fields import OTHER_NAMES, Few, GenerationFields, Items, StrictModel, TokenId, Whole, add_sampling_fields
from ngramspec.server.tool_fields import MAX_TOOLS, ToolCalled, ToolChoice, ToolDeclared

# -1: as many as fit; 0: the prompt is computed, and nothing is written.
MaxTokens = Annotated[int, Field(ge=-1, le=MAX_INT), Whole]
StopString = Annotated[str, Field(min_length=1)]


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """The usage so far in every piece."""


@add_sampling_fields(OTHER_NAMES)
class OpenAIRequest(GenerationFields):
    """The fields that OpenAI's routes share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128), Whole] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Field(ge=-MAX_NEGATIVE_SEED, le=MAX_SEED), Whole] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]] | None, Few] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    """A stream says how much of the prompt is done."""
    timings_per_token: bool | None = None
    user: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_INT), Whole] | None = None
    truncation_side: Literal["left", "right"] | None = None


class ServerFields(StrictModel):
    """What llama.cpp and vLLM have beside OpenAI's fields."""

    n_predict: MaxTokens | None = None
    """`max_tokens` in llama.cpp's words."""
    n_cmpl: Annotated[int, Field(ge=1, le=128), Whole] | None = None
    """`n` in llama.cpp's words."""
    n_probs: Annotated[int, Field(ge=0, le=20), Whole] | None = None
    """Log-probabilities in llama.cpp's words: the number of tokens beside the one that was taken."""
    prompt_logprobs: Annotated[int, Field(ge=-1, le=MAX_LOGPROBS), Whole] | None = None
    """Log-probabilities of the prompt's tokens, and of this many others; -1: of the whole vocabulary."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Log-probabilities name tokens by their ids."""
    verbose: bool | None = None
    """The answer shows the prompt that the model got."""


class CompletionRequest(ServerFields, OpenAIRequest):
    route = COMPLETIONS

    prompt: str | Items[str] | Items[TokenId] | Items[Items[TokenId]] | None = None
    suffix: str | None = None
    max_tokens: MaxTokens | None = None
    best_of: Annotated[int, Field(ge=1, le=128), Whole] | None = None
    use_beam_search: bool | None = None
    """The `n` best texts that beam search finds."""
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    logprobs: Annotated[int, Field(ge=-1, le=MAX_LOGPROBS), Whole] | None = None
    echo: bool | None = None
    parse_special: bool | None = None
    """False: control tokens in the prompt's text are spelled out. Default: what the server's settings say."""
    prediction: str | None = None
    """The output that is expected, such as an edited file's old text."""


class Part(StrictModel):
    type: str
    text: str | None = None
    refusal: str | None = None
    """What the assistant said instead of an answer, in parts of type `refusal`."""

    def name_media(self) -> Self:
        """Return a part of a tool's result: a text that names it if no model can read it here."""
        return self.model_copy(update={"type": "text", "text": name_omitted(self.type)}) if self.type in MEDIA else self


def _read_plain_part(given: Any) -> Any:
    return {"type": "text", "text": given} if isinstance(given, str) else given


# A part of a message, or a text in its place, as in vLLM: LangChain's messages hold such.
TextOrPart = Annotated[Part, BeforeValidator(_read_plain_part)]


class Message(StrictModel):
    role: str
    content: str | Items[TextOrPart] | None = None
    """null: the assistant said nothing, or a tool returned nothing."""
    tool_calls: Annotated[Items[ToolCalled], Field(max_length=MAX_TOOLS)] | None = None
    """The assistant's calls; then there may be no content."""
    tool_call_id: str | None = None
    """The call that a tool's message is the result of."""
    name: str | None = None
    reasoning_content: str | None = None
    """What the assistant thought before, for templates that show it."""
    reasoning: str | None = None
    refusal: str | None = None
    """What the assistant said instead of an answer."""
    function_call: Any = None


class Prediction(StrictModel):
    type: Literal["content"]
    content: str | Items[TextOrPart]


class ChatPrompt(StrictModel):
    """A conversation, and what the answer may call."""

    messages: Annotated[Items[Message], Field(min_length=1)]
    tools: Annotated[Items[ToolDeclared], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    """`none`, `auto`, `required` or a function; those other than `none` and `auto` hold the answer to calls that fit their schemas."""
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    """False: the prompt ends after the last message."""
    continue_final_message: bool | None = None
    """The last message, the assistant's, goes on; only with `add_generation_prompt` false."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the model's chat template."""


class ApplyTemplateRequest(ChatPrompt):
    """llama.cpp's."""


class ApplyTemplateResponse(BaseModel):
    prompt: str


class InputTokens(BaseModel):
    input_tokens: int


class ChatRequest(ChatPrompt, ServerFields, OpenAIRequest):
    route = CHAT

    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    reasoning_effort: str | None = None
    reasoning_format: Literal["none", "auto", "deepseek"] | None = None
    """`none`: thoughts stay in the text. Default: what the server's settings say."""
    include_reasoning: bool | None = None
    """False: thoughts are left out."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=-1, le=20), Whole] | None = None
    echo: bool | None = None
    """The last message, if it is the assistant's, stands before the answer."""
    prediction: Prediction | None = None


# ------------------------------------------------------------------ answers


class PromptDetails(BaseModel):
    cached_tokens: int


class CompletionDetails(BaseModel):
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None
    reasoning_tokens: int | None = None


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
    """The head of every answer, and what llama.cpp's and vLLM's fields ask for."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    metrics: dict[str, Any] | None = None
    timings: dict[str, float] | None = None
    verbose: dict[str, Any] | None = Field(None, alias="__verbose")


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
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
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
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    ngramspec: Sources | None = None


class ChatResponse(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class ModelMeta(BaseModel):
    """What llama.cpp tells of a model; llama.vscode takes a server that has this for llama.cpp's, and asks `/props`."""

    n_ctx: int
    n_vocab: int


class Model(BaseModel):
    """The model, with the fields of vLLM, llama.cpp and Anthropic beside OpenAI's."""

    id: str
    root: str
    parent: None
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    max_input_tokens: int
    max_tokens: int
    aliases: list[str]
    tags: list[str]
    meta: ModelMeta
    type: Literal["model"]
    display_name: str
    created_at: str


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]
    first_id: str
    last_id: str
    has_more: bool
