"""Routes for whoever operates the server: /health, /metrics and the OpenAPI document.

The state enters, what it says of itself leaves. Knows nothing of completions.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi

from ngramspec.server.auth import OPEN, Identity, require_operator
from ngramspec.server.error_responses import AnthropicErrorBody, ApiError, ErrorBody, OllamaErrorBody, choose_error_format, retry_after
from ngramspec.server.state import ServerState

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


def make_router(state: ServerState) -> APIRouter:
    routes = APIRouter(tags=["operation"])

    @routes.get("/live")
    async def live() -> dict[str, str]:
        """Return 200 as long as the process answers, also while the model is loaded."""
        return {"status": "ok"}

    @routes.get("/v1/health", include_in_schema=False)
    @routes.get("/health")
    async def health() -> dict[str, str]:
        """Return 200 while the server takes work, 503 before and after, and if a text is being encoded for longer than any takes."""
        if state.admission.draining or state.engine.closed or state.encoders.stuck:
            what = "shutting down" if state.admission.draining else "the engine has stopped" if state.engine.closed else "encoding is stuck"
            raise ApiError(503, what, code="unavailable", headers=retry_after(10))
        return {"status": "ok"}

    @routes.get("/metrics", response_class=Response)
    def metrics(request: Request, identity: Annotated[Identity, Depends(require_operator)]) -> Response:
        """Return the metrics in Prometheus' text format. If there are keys, for administrators: the counts are of all keys together."""
        if not state.settings.metrics:
            raise ApiError(501, "the server was started without /metrics")
        body, content_type = state.metrics.expose(request.headers.get("accept", ""))
        return Response(body, media_type=content_type, headers={"Process-Start-Time-Unix": str(state.metrics.started)})

    @routes.get("/openapi.json", include_in_schema=False)
    async def serve_openapi(request: Request) -> dict[str, Any]:
        document: dict[str, Any] = request.app.openapi()
        return document

    return routes


def describe_api(app: FastAPI, *, locked: bool) -> dict[str, Any]:
    """Return the OpenAPI document of an application, with our errors instead of FastAPI's own. `locked`: its routes need keys."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        parts = schema.setdefault("components", {}).setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            parts.pop(name, None)
        for model in (ErrorBody, AnthropicErrorBody, OllamaErrorBody):
            envelope = model.model_json_schema(ref_template="#/components/schemas/{model}")
            parts |= envelope.pop("$defs", {}) | {model.__name__: envelope}
        if not locked:
            schema["components"].pop("securitySchemes", None)
        for path, operations in schema["paths"].items():
            shape = choose_error_format(path)[1].__name__
            for method, operation in operations.items():
                if not locked or (method.upper(), path) in OPEN:
                    operation.pop("security", None)
                operation["responses"].pop("422", None)
                for status, text in _REFUSALS.items():
                    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape}"}}}
                    operation["responses"].setdefault(status, {"description": text, "content": content})
        app.openapi_schema = schema
    return app.openapi_schema
