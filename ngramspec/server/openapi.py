"""The OpenAPI document of an application, with our errors instead of FastAPI's own.

An application enters, its document leaves. Knows no route in particular.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ngramspec.server.auth import OPEN
from ngramspec.server.error_responses import ErrorBody

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


def document(app: FastAPI, *, locked: bool) -> dict[str, Any]:
    """Made once per application. `locked`: its routes need keys."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        parts = schema.setdefault("components", {}).setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            parts.pop(name, None)
        envelope = ErrorBody.model_json_schema(ref_template="#/components/schemas/{model}")
        parts |= envelope.pop("$defs") | {"ErrorBody": envelope}
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
