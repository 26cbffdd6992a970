"""OpenAI's `prediction` on its way to vLLM's `vllm_xargs`."""

import asyncio
import json

import pytest

from ngramspec.integrations.openai_prediction import PredictionMiddleware, with_hint


def through(body: bytes, path="/v1/chat/completions", pieces=1):
    """What the application behind the middleware is sent."""
    size = -(-len(body) // pieces)
    parts = [body[i * size : (i + 1) * size] for i in range(pieces)]
    sent = iter([{"type": "http.request", "body": part, "more_body": i + 1 < pieces} for i, part in enumerate(parts)])
    seen = {}

    async def receive():
        return next(sent)

    async def app(scope, receive, send):
        got = b""
        while True:
            message = await receive()
            got += message["body"]
            if not message.get("more_body"):
                break
        seen.update(body=got, headers=dict(scope["headers"]))

    scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"content-length", str(len(body)).encode()), (b"a", b"b")]}
    asyncio.run(PredictionMiddleware(app)(scope, receive, None))
    assert int(seen["headers"][b"content-length"]) == len(seen["body"])
    assert seen["headers"][b"a"] == b"b"
    return seen["body"]


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize(
    "content", ["old text é", [{"type": "text", "text": "old "}, {"type": "text", "text": "text é"}]], ids=["text", "parts"]
)
def test_a_prediction_becomes_a_hint(content, pieces):
    request = {"model": "m", "messages": [], "prediction": {"type": "content", "content": content}, "vllm_xargs": {"tenant": "a"}}
    got = json.loads(through(json.dumps(request).encode(), pieces=pieces))
    assert got == {"model": "m", "messages": [], "vllm_xargs": {"prediction": "old text é", "tenant": "a"}}


@pytest.mark.parametrize(
    "body",
    [
        b'{"prediction": ' + b"[" * 100_000,
        b"",
        b"[1]",
        b'{"prediction"',
        b'{"prompt": "a"}',
        b'{"prediction": 3}',
        b'{"prediction": {"type": "content", "content": [3]}}',
    ],
    ids=range(7),
)
def test_everything_else_goes_on_as_it_came(body):
    assert through(body) == body
    assert with_hint(body) is None


def test_other_routes_are_left_alone():
    body = b'{"prediction": {"type": "content", "content": "x"}}'
    assert through(body, path="/v1/embeddings") == body
