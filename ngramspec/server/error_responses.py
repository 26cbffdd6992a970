"""Errors as the server tells them, whatever went wrong: in OpenAI's envelope, or in that of the API whose path was asked for.

Exceptions enter, JSON responses `{"error": {"message", "type", "param", "code"}}` leave. What the caller did wrong is told in full;
what the server did wrong goes to the log and leaves as a plain sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Literal, TypeAlias

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.routing import Match

from ngramspec.errors import EngineClosedError, InvalidInputError, NgramspecError, OutOfMemoryError, PromptTooLongError
from ngramspec.server.field_errors import describe_field_error

INVALID = "invalid_request_error"
# nginx's status for a client that went away; nobody reads it but the log.
CLIENT_GONE = 499

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error", 503: "overloaded_error"}
_ANTHROPIC_TYPES = {413: "request_too_large"}  # where Anthropic's differ from those above
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_SHOWN = 5  # validation errors that one message tells of


class ErrorDetail(BaseModel):
    """What went wrong."""

    model_config = ConfigDict(json_schema_extra={"required": ["message", "type", "param", "code"]})

    message: str
    type: str
    param: str | None = None
    code: str | None = None
    n_prompt_tokens: int | None = None
    """The tokens of a prompt that is too long, and `n_ctx`, the most that there may be."""
    n_ctx: int | None = None


class ErrorBody(BaseModel):
    """OpenAI's envelope."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """Anthropic's envelope."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class OllamaErrorBody(BaseModel):
    """Ollama's envelope."""

    error: str


class ApiError(Exception):
    """An answer to the client, not a defect. `type` follows from the status where it is not given."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,  # noqa: A002 - the envelope's own name
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Make an error. `more`: what else the envelope says."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.type = type or _TYPES.get(status, INVALID if status < 500 else "server_error")
        self.headers, self.more = dict(headers or {}), dict(more or {})

    def make_response(self, scope: Mapping[str, Any]) -> JSONResponse:
        """Return the response to the request with this ASGI scope."""
        names = {name for name, _ in scope.get("headers", ())}
        path = "/v1/messages" if b"anthropic-version" in names else scope["path"]  # its clients ask for models, too
        return JSONResponse(choose_error_format(path)[0](self), self.status, self.headers)


def format_openai_error(error: ApiError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code} | error.more}


def format_anthropic_error(error: ApiError) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(error.status) or _TYPES.get(error.status, INVALID if error.status < 500 else "api_error")
    said = ""
    if error.code == "context_length_exceeded":  # agents know by these words that they have to shorten the prompt, and by how much
        most = "{n_prompt_tokens} tokens > {n_ctx} maximum: ".format_map(error.more) if error.more else ""
        said = f"prompt is too long: {most}"
    return {"type": "error", "error": {"type": kind, "message": said + error.message}}


def format_ollama_error(error: ApiError) -> dict[str, Any]:
    return {"error": error.message}


ErrorFormat: TypeAlias = Callable[[ApiError], dict[str, Any]]


def choose_error_format(path: str) -> tuple[ErrorFormat, type[BaseModel]]:
    """Return how errors are told at this path, and the model of that."""
    if path.startswith("/v1/messages"):
        return format_anthropic_error, AnthropicErrorBody
    if path.startswith("/api/"):
        return format_ollama_error, OllamaErrorBody
    return format_openai_error, ErrorBody


@contextmanager
def rename_params(*names: tuple[str, str]) -> Iterator[None]:
    """Rename fields in ApiErrors and InvalidInputErrors raised inside it; they leave as ApiErrors.

    names: (what the chat routes call it, what this route does), applied in order.
    """
    try:
        yield
    except (ApiError, InvalidInputError) as raised:
        error = translate_error(raised)
        if error.param is None:
            raise error from None
        param = error.param
        for theirs, ours in names:
            param = param.replace(theirs, ours)
        message = error.message.replace(error.param, param)
        raise ApiError(
            error.status, message, type=error.type, param=param, code=error.code, headers=error.headers, more=error.more
        ) from None


def make_field_error(param: str, why: str, code: str | None = None) -> ApiError:
    """Return a 400 that names a field of the request."""
    return ApiError(400, f"{param}: {why}", param=param, code=code)


def require(value: Any, param: str) -> Any:
    """Return the value of a field. Raises ApiError (400) if there is none."""
    if value is None:
        raise make_field_error(param, "is missing")
    return value


class ClientGone(Exception):  # noqa: N818 - not an error of anybody
    """The client went away; what ran for it has been cancelled."""


def make_internal_error() -> ApiError:
    """Return what a client learns of a defect."""
    return ApiError(500, "the server failed to answer this request; its log says why", code="internal_error")


def make_context_error(n_tokens: int, n_ctx: int, param: str, *, at_least: bool = False) -> ApiError:
    """Return a 400 for a prompt of more tokens than `n_ctx`, in the words by which clients of OpenAI and of llama.cpp know it."""
    why = f"the prompt has {'at least ' if at_least else ''}{n_tokens} tokens, which exceeds the available context size; "
    why += f"this server's maximum context length is {n_ctx} tokens, of prompt and answer together"
    more = {"n_prompt_tokens": n_tokens, "n_ctx": n_ctx}
    return ApiError(400, why, type="exceed_context_size_error", param=param, code="context_length_exceeded", more=more)


def translate_error(error: Exception, *, is_clients: bool = False) -> ApiError:
    """Return what an engine's error means to the client. With `is_clients`, a ValueError is about what the request asks for."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLongError):
        return ApiError(400, str(error), param="prompt", code="context_length_exceeded")
    if isinstance(error, OutOfMemoryError):
        return ApiError(503, "the server is out of memory for this request; try again later", code="out_of_memory", headers=retry_after(5))
    if isinstance(error, EngineClosedError):
        return ApiError(503, "the engine has stopped", code="engine_stopped", headers=retry_after(30))
    if isinstance(error, InvalidInputError) or (is_clients and isinstance(error, (ValueError, NgramspecError))):
        return make_bad_request(error)
    return make_internal_error()


def make_bad_request(error: Exception) -> ApiError:
    """Return a 400 with the parameter that the error knows, or that its message names first, as those of `SamplingParams` do."""
    named = re.match(r"(\w+) must be ", str(error))
    param = getattr(error, "param", None) or (named[1] if named else None)
    return ApiError(400, str(error), param=param, code=getattr(error, "code", None))


def note_refusal(scope: Mapping[str, Any], error: ApiError) -> None:
    """Add to the request's line in the log why it was refused, without the message, which may repeat what the request says."""
    facts = scope.get("state", {}).get("facts")
    if facts is not None:
        facts |= {"error": error.code or error.type} | ({"param": error.param} if error.param else {})


def retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, round(seconds)))}


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of an application leave in the envelope. A defect's traceback is left to the outermost middleware."""

    async def answer_api_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        note_refusal(request.scope, error)
        if error.status == 400:
            request.app.state.server.metrics.count_refused("invalid")
        return error.make_response(request.scope)

    async def answer_input_error(request: Request, error: Exception) -> JSONResponse:
        return await answer_api_error(request, translate_error(error))

    async def answer_validation_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return await answer_api_error(request, make_validation_error(error.errors()))

    async def answer_http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return translate_http_error(error, request).make_response(request.scope)

    async def answer_client_gone(request: Request, error: Exception) -> JSONResponse:
        return ApiError(CLIENT_GONE, "the client went away").make_response(request.scope)

    app.add_exception_handler(ApiError, answer_api_error)
    app.add_exception_handler(InvalidInputError, answer_input_error)
    app.add_exception_handler(RequestValidationError, answer_validation_error)
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_exception_handler(ClientGone, answer_client_gone)


# What clients ask other servers for: the ends of paths, and what to tell.
_ABSENT = (
    (re.compile(r"/(embed|embeddings?)$"), "this server completes text; it has no embeddings"),
    (re.compile(r"/(rerank|reranking|score|classify|pooling)$"), "this server completes text; it ranks and classifies none"),
    (re.compile(r"/api/(pull|push|create|copy|delete)$"), "this server serves the model that it was started with, and no other"),
)


def translate_http_error(error: HTTPException, request: Request) -> ApiError:
    """Return Starlette's own refusals as ours: no such route, another method."""
    status, headers = error.status_code, dict(error.headers or {})
    if status == 404 and (told := next((text for path, text in _ABSENT if path.search(request.url.path)), None)):
        return ApiError(400, told, code="not_supported", headers=headers)
    if status == 405:
        headers["Allow"] = _list_allowed_methods(request)
    messages = {
        404: f"there is no {request.method} {request.url.path[:200]}; GET /openapi.json lists what there is",
        405: f"{request.method} is not allowed here; allowed: {headers.get('Allow')}",
    }
    message = messages.get(status) or (str(error.detail) if status < 500 else HTTPStatus(status).phrase)
    return ApiError(status, message, headers=headers)


def _list_allowed_methods(request: Request) -> str:
    """Return the methods of every route with this path; Starlette names those of the first one."""

    def is_there(method: str) -> bool:
        inner = "GET" if method == "HEAD" else method  # it is answered as a GET is
        return any(route.matches({**request.scope, "method": inner})[0] is Match.FULL for route in request.app.routes)

    return ", ".join(method for method in _METHODS if is_there(method))


def make_validation_error(errors: Sequence[Any]) -> ApiError:
    """Return a 400 that names what is wrong, the first parameter that is, and as `code` in which way.

    Values of the request are not repeated: they may be long, or secret.
    """
    wrong: dict[str, list[str]] = {}  # by name; if several types are taken, each says why it was none
    for error in errors:
        reasons = wrong.setdefault(_name_location(error.get("loc", ())), [])
        if (reason := describe_field_error(error)) not in reasons:
            reasons.append(reason)
    # A field in which something is wrong has the type in which that is.
    named = {name: reasons for name, reasons in wrong.items() if not any(each.startswith((f"{name}.", f"{name}[")) for each in wrong)}
    told = [f"{name or 'the body'}: {' or '.join(reasons).replace(' or must be ', ' or ')}" for name, reasons in named.items()]
    if len(told) > _SHOWN:
        told[_SHOWN:] = [f"and {len(told) - _SHOWN} more"]
    first = next(iter(named), "")
    kinds = (error.get("type") for error in errors if _name_location(error.get("loc", ())) == first)
    code = next(kinds, None)  # pydantic's, such as missing or less_than_equal, as vLLM has it in its messages
    return ApiError(400, "; ".join(told) or "the request is not valid", param=first or None, code=code)


def _name_location(location: Sequence[str | int]) -> str:
    """Return `messages[0].content` for ("body", "messages", 0, "content", "str"): branches of a union are pydantic's own affair."""
    name = ""
    for part in location[1:]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif re.fullmatch(r"[a-z][a-z0-9_]*", part) and part not in _BRANCHES:
            name += f".{part}" if name else part
    return name


_BRANCHES = {"str", "int", "float", "bool", "dict", "list", "none"}
