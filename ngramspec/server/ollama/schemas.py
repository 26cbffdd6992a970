"""Requests and answers of Ollama's routes, as pydantic models, and what requests say in the words of chats.

JSON that was parsed enters, turns and an `OpenAIRequest` leave. Knows nothing of routes, tokenizers or templates.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from ngramspec.options import MAX_INT
from ngramspec.prompts.chat_template import ANSWER, Style
from ngramspec.prompts.messages import PARTS, name_omitted, read_role
from ngramspec.prompts.tool_calls.tool_prompt import ASSISTANT, TOOL, Call, Turn
from ngramspec.sampling_params import MAX_SEED, MAX_STOPS
from ngramspec.server.error_responses import make_field_error
from ngramspec.server.openai.schemas import OpenAIRequest, StopString
from ngramspec.server.request_fields import Items, NullIsDefault, StrictModel, TokenId, Whole, add_sampling_fields
from ngramspec.server.tool_fields import MAX_TOOLS, ToolDeclared

# The role of messages of their own in which Continue sends back what the assistant thought. Ollama's templates skip them.
THOUGHTS = "thinking"
# Ollama's names of sampling parameters, and those of `SamplingParams`.
SAMPLING = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")}
SAMPLING["repeat_penalty"] = "repetition_penalty"


@add_sampling_fields(SAMPLING)
class Options(StrictModel):
    """Ollama's options. Those that are not here say how a model is run, such as `num_ctx`, and are ignored."""

    defaults: ClassVar[dict[str, Any]] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
    """Ollama's defaults, if they are not those of `SamplingParams`."""

    num_predict: Annotated[int, Field(ge=-2, le=MAX_INT), Whole] | None = None
    """-2, -1, 0: as many as fit."""
    seed: Annotated[int, Field(ge=-1, le=MAX_SEED), Whole] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    mirostat: Annotated[int, Field(ge=0, le=2), Whole] | None = None
    typical_p: Annotated[float, Field(ge=0, le=1)] | None = None


KeepAlive = str | Annotated[float, Field(ge=-MAX_INT, le=MAX_INT)]  # "5m", or seconds


class OllamaRequest(NullIsDefault):
    """What /api/chat and /api/generate share."""

    model: str
    stream: bool | None = None
    """Absent: true."""
    options: Options | None = None
    format: str | dict[str, Any] | None = None
    """"json", or a JSON schema."""
    think: bool | str | None = None
    """Told to templates that read `enable_thinking`; "low", "medium" or "high" to those that read `reasoning_effort`. False: what the
    model thinks nevertheless is left out."""
    keep_alive: KeepAlive | None = None
    """Accepted: the model stays loaded."""
    logprobs: bool | None = None
    """Tell the log-probability of each token."""
    top_logprobs: Annotated[int, Field(ge=0, le=20), Whole] | None = None
    """Tell the most likely tokens in each one's place, too, with `logprobs`."""

    @property
    def n_logprobs(self) -> int | None:
        """How many of the most likely tokens to tell with each; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_tokens(self) -> int | None:
        """None: as many as fit."""
        n = None if self.options is None else self.options.num_predict
        return None if n is None or n < 1 else n

    @property
    def style(self) -> Style:
        """How the template is asked."""
        if self.think is None or self.think == "":
            return ANSWER
        effort = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return ANSWER._replace(variables={"enable_thinking": self.think is not False} | effort)

    def to_openai(self) -> OpenAIRequest:
        """Return what this says of sampling and the form of the answer. Raises ApiError (400)."""
        options = self.options or Options()
        for name, off in (("mirostat", 0), ("typical_p", 1)):
            if getattr(options, name) not in (None, off):
                raise make_field_error(f"options.{name}", "not among our samplers", "not_supported")
        given: dict[str, Any] = options.defaults | read_options(options)
        if options.seed is not None and options.seed >= 0:
            given["seed"] = options.seed
        if options.stop is not None:
            given["stop"] = options.stop
        if isinstance(self.format, dict):
            given["response_format"] = {"type": "json_schema", "json_schema": {"schema": self.format}}
        elif self.format:
            if self.format != "json":
                raise make_field_error("format", f'must be "json" or a JSON schema, got {self.format[:40]!r}')
            given["response_format"] = {"type": "json_object"}
        return OpenAIRequest.model_validate(given | {"model": self.model.removesuffix(":latest"), "stream": self.stream is not False})


def read_options(options: Options) -> dict[str, Any]:
    """Return the sampling parameters that are given, by their names in `SamplingParams`."""
    return {name: value for field, name in SAMPLING.items() if (value := getattr(options, field)) is not None}


class OllamaFunctionCalled(StrictModel):
    name: str
    arguments: dict[str, Any] | None = None


class OllamaCall(StrictModel):
    function: OllamaFunctionCalled
    id: str | None = None


class OllamaMessage(StrictModel):
    role: str
    content: str | None = None
    thinking: str | None = None
    """What the assistant thought before, for templates that show it."""
    images: list[Any] | None = None
    tool_calls: Annotated[Items[OllamaCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_name: str | None = None
    """The tool whose result this is."""
    tool_call_id: str | None = None


class OllamaChatRequest(OllamaRequest):
    messages: Items[OllamaMessage] = Field(default_factory=list)
    """None: only whether the model is there is asked."""
    tools: Annotated[Items[ToolDeclared], Field(max_length=MAX_TOOLS)] | None = None

    def make_turns(self) -> list[Turn]:
        """Return the messages of a chat. A result without an id is that of the next call. Raises ApiError (400)."""
        turns: list[Turn] = []
        waiting: list[Call] = []
        thoughts = ""
        for i, message in enumerate(self.messages):
            where = f"messages[{i}]"
            role = read_role(message.role, f"{where}.role")
            if message.images and role != TOOL:
                raise make_field_error(f"{where}.images", "this model reads text only", "not_supported")
            content = message.content or ""
            if role == THOUGHTS:
                thoughts = content
                continue
            if role == TOOL:
                content = PARTS.join(filter(None, (content, *(name_omitted("image") for _ in message.images or ()))))
                call_id, name = message.tool_call_id, message.tool_name
                call = next((call for call in waiting if call_id in (None, call.id) and name in (None, call.name)), None)
                if call is not None:
                    waiting.remove(call)
                turns.append(Turn(TOOL, content, call_id=call_id or (call and call.id) or f"call_{i}", name=name or (call and call.name)))
                continue
            calls = tuple(
                Call(call.id or f"call_{i}_{j}", call.function.name, json.dumps(call.function.arguments or {}, ensure_ascii=False))
                for j, call in enumerate(message.tool_calls or ())
            )
            if calls and role != ASSISTANT:
                raise make_field_error(f"{where}.tool_calls", "only the assistant calls tools")
            waiting = list(calls) if calls else waiting
            turns.append(Turn(role, content, calls, thoughts=(message.thinking or thoughts) if role == ASSISTANT else ""))
            thoughts = ""
        return turns


class GenerateRequest(OllamaRequest):
    prompt: str = ""
    """"": only whether the model is there is asked."""
    suffix: str | None = None
    """What follows the text that is asked for."""
    system: str | None = None
    template: str | None = None
    raw: bool | None = None
    """The prompt is no message of a chat, but the text to continue."""
    images: list[Any] | None = None
    context: Items[TokenId] | None = None
    """That of an earlier answer, which this one goes on from."""

    def check(self) -> None:
        """Raises ApiError (400) for what this server does not do."""
        for name, asked, why in (
            ("template", self.template, "no template comes from a request; `raw` has none"),
            ("images", self.images, "this model reads text only"),
            ("context", self.context and self.suffix, "not with suffix"),
        ):
            if asked:
                raise make_field_error(name, why, "not_supported")


class ShowRequest(StrictModel):
    model: str | None = None
    name: str | None = None
    """`model` by its older name."""


# ------------------------------------------------------------------ answers


class ModelDetails(BaseModel):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(BaseModel):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class RunningModel(ListedModel):
    expires_at: str
    size_vram: int
    context_length: int


class TagsResponse(BaseModel):
    models: list[ListedModel]


class RunningModels(BaseModel):
    models: list[RunningModel]


class VersionResponse(BaseModel):
    version: str


class ShowResponse(BaseModel):
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str


class _OllamaAnswer(BaseModel):
    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"]
    total_duration: int | None = None
    """Nanoseconds, as all durations."""
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[dict[str, Any]] | None = None


class OllamaChatResponse(_OllamaAnswer):
    message: dict[str, Any]


class GenerateResponse(_OllamaAnswer):
    response: str
    thinking: str | None = None
    context: list[int] | None = None
