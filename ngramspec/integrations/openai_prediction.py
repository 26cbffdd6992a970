"""ASGI middleware for vLLM's server: OpenAI's `prediction` field becomes the hint that `integrations.vllm` reads.

`vllm serve … --middleware ngramspec.integrations.openai_prediction.PredictionMiddleware`. Bodies of completions enter and leave; one
without the field, or that is no JSON object, leaves as it came. Knows no host.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

PATHS = ("/v1/chat/completions", "/v1/completions")
# Bytes of the largest body that is read whole; a larger one is forwarded as it comes.
LARGEST = 64 << 20

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]


class PredictionMiddleware:
    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
            return await self.app(scope, receive, send)
        messages: list[Message] = []
        body, size = bytearray(), 0
        while True:
            message = await receive()
            messages.append(message)
            body += message.get("body", b"")
            size = len(body)
            if message["type"] != "http.request" or not message.get("more_body") or size > LARGEST:
                break
        whole = messages[-1]["type"] == "http.request" and not messages[-1].get("more_body")
        if whole and (changed := with_hint(bytes(body))) is not None:
            headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
            scope = scope | {"headers": [*headers, (b"content-length", str(len(changed)).encode())]}
            messages = [{"type": "http.request", "body": changed, "more_body": False}]
        waiting = iter(messages)

        async def receive_again() -> Message:
            return next(waiting, None) or await receive()

        return await self.app(scope, receive_again, send)


def with_hint(body: bytes) -> bytes | None:
    """Return the body with its prediction moved to `vllm_xargs`, None if it has none. Other forms than OpenAI's are left to the server."""
    if b'"prediction"' not in body:
        return None
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return None
    text = _read_text(request.get("prediction")) if isinstance(request, dict) else None
    if text is None:
        return None
    del request["prediction"]
    hints = request.get("vllm_xargs")
    request["vllm_xargs"] = {"prediction": text} | (hints if isinstance(hints, dict) else {})
    return json.dumps(request).encode()


def _read_text(prediction: Any) -> str | None:
    """Return the text of {"type": "content", "content": text, or parts with text}, None for anything else."""
    content = prediction.get("content") if isinstance(prediction, dict) and prediction.get("type") == "content" else None
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = "".join(part for part in parts if isinstance(part, str)) if all(isinstance(part, str) for part in parts) else None
    return content if isinstance(content, str) else None
