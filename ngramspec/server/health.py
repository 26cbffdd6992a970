"""Routes for whoever operates the server: /health, /metrics and the OpenAPI document.

The state enters, what it says of itself leaves. Knows nothing of completions.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from ngramspec.server.auth import Identity, operator
from ngramspec.server.error_responses import ApiError, retry_after
from ngramspec.server.state import State


def router(state: State) -> APIRouter:
    routes = APIRouter(tags=["operation"])

    @routes.get("/v1/health", include_in_schema=False)
    @routes.get("/health")
    async def health() -> dict[str, str]:
        """200 while the server takes work, 503 before and after, and if a text is being encoded for longer than any takes."""
        if state.admission.draining or state.engine.closed or state.encoders.stuck:
            what = "shutting down" if state.admission.draining else "the engine has stopped" if state.engine.closed else "encoding is stuck"
            raise ApiError(503, what, code="unavailable", headers=retry_after(10))
        return {"status": "ok"}

    @routes.get("/metrics", response_class=Response)
    def metrics(request: Request, identity: Annotated[Identity, Depends(operator)]) -> Response:
        """Prometheus' text format. Where there are keys, for administrators: the counts are of all keys together."""
        body, content_type = state.metrics.expose(request.headers.get("accept", ""))
        return Response(body, media_type=content_type)

    @routes.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> dict[str, Any]:
        document: dict[str, Any] = request.app.openapi()
        return document

    return routes
