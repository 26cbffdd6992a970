"""The application: one engine, its routes, and the border that every request passes.

An engine and settings enter, an ASGI application leaves. Knows what there is, and leaves what it does to the other modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi

from ngramspec import __version__
from ngramspec.engine import Engine
from ngramspec.server import admin, errors, playground
from ngramspec.server import metrics as exposition
from ngramspec.server.admission import Desk
from ngramspec.server.auth import OPEN, Keyring, identify
from ngramspec.server.errors import ApiError, ErrorBody
from ngramspec.server.fim import Fim
from ngramspec.server.limits import Bounds
from ngramspec.server.llamacpp import routes as llamacpp
from ngramspec.server.metrics import Metrics
from ngramspec.server.middleware import Border
from ngramspec.server.openai import chat, completions
from ngramspec.server.settings import ServerSettings


@dataclass(slots=True)
class State:
    """What routes work with."""

    engine: Engine
    settings: ServerSettings
    metrics: Metrics
    desk: Desk
    bounds: Bounds
    keyring: Keyring
    fim: Fim | None
    """The model's fill-in-the-middle format, None where it has none."""


def create_app(engine: Engine, settings: ServerSettings) -> FastAPI:
    """The application for an engine, which stays the caller's to close."""
    metrics = Metrics(engine)
    state = State(
        engine,
        settings,
        metrics,
        Desk(engine, settings, metrics),
        Bounds(settings.limits, engine.max_model_len, engine.vocab_size),
        Keyring(settings.api_keys),
        Fim.detect(engine.tokenizer),
    )
    app = FastAPI(
        title="ngramspec",
        version=__version__,
        summary="Language model completions sooner, token for token the same.",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        dependencies=[Depends(identify)],
        redirect_slashes=False,
    )
    app.state.server = state
    app.openapi = lambda: document(app)  # type: ignore[method-assign]
    errors.install(app)
    for routes in (completions, chat, llamacpp, admin, exposition, playground):
        app.include_router(routes.router(state))
    app.include_router(_own(state, app))
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Api-Key", "X-Request-Id"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(Border, settings=settings, metrics=metrics, desk=state.desk, keyring=state.keyring)
    return app


def _own(state: State, app: FastAPI) -> APIRouter:
    routes = APIRouter(tags=["operation"])

    @routes.get("/health")
    async def health() -> dict[str, str]:
        """200 while the server takes work, 503 before and after."""
        if state.desk.draining or state.engine.closed:
            what = "shutting down" if state.desk.draining else "the engine has stopped"
            raise ApiError(503, what, code="unavailable", headers=errors.retry_after(10))
        return {"status": "ok"}

    @routes.get("/openapi.json", include_in_schema=False)
    async def openapi() -> dict[str, Any]:
        return document(app)

    return routes


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, with our errors instead of FastAPI's own."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        parts = schema.setdefault("components", {}).setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            parts.pop(name, None)
        envelope = ErrorBody.model_json_schema(ref_template="#/components/schemas/{model}")
        parts |= envelope.pop("$defs") | {"ErrorBody": envelope}
        locked = len(app.state.server.keyring) > 0
        if not locked:
            schema["components"].pop("securitySchemes", None)
        for path, operations in schema["paths"].items():
            for method, operation in operations.items():
                if not locked or (method.upper(), path) in OPEN:
                    operation.pop("security", None)
                operation["responses"].pop("422", None)
                for status, text in _REFUSALS.items():
                    content = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
                    operation["responses"].setdefault(status, {"description": text, "content": content})
        app.openapi_schema = schema
    return app.openapi_schema


_REFUSALS = {
    "400": "The request is not valid.",
    "401": "No key, or an unknown one.",
    "403": "Not with this key, or not under this host name.",
    "404": "There is no such thing.",
    "413": "The body is too long.",
    "415": "The body is not sent as JSON.",
    "429": "The queue is full; Retry-After says when to try again.",
    "431": "The headers are too long.",
    "500": "A defect of the server.",
    "503": "The server is starting, shutting down or out of memory.",
}
