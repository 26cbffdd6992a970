"""The events of a response's items, as they are made or once more, and a stored response's input, page by page.

Items of the output or a `StoredResponse` enter, JSON leaves. Knows nothing of routes, the engine or the store.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from ngramspec.server.error_responses import make_field_error
from ngramspec.server.openai.response_store import StoredResponse

Event = dict[str, Any]


def list_input_items(stored: StoredResponse, *, after: str | None, limit: int, order: Literal["asc", "desc"]) -> dict[str, Any]:
    """Return a page of the items of the input, with those of the responses before. Raises ApiError (400) if `after` is none of them."""
    number = stored.response["id"].removeprefix("resp_")
    n_items = len(stored.items) - len(stored.response["output"])
    items = [_describe_item(item, f"{number}_{i}") for i, item in enumerate(stored.items[:n_items])]
    if order == "desc":
        items.reverse()
    start = 0
    if after is not None:
        start = next((i + 1 for i, item in enumerate(items) if item["id"] == after), 0)
        if not start:
            raise make_field_error("after", f"there is no item {after[:100]!r} in the input of this response")
    page = items[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(items),
    }


def _describe_item(item: dict[str, Any], number: str) -> dict[str, Any]:
    """Return an item as OpenAI lists it: with an id, and a text as a part."""
    kind = item.get("type") or "message"
    prefix = {"message": "msg", "reasoning": "rs"}.get(kind, "fc")
    told = {"id": f"{prefix}_{number}", "status": "completed"} | item | {"type": kind}
    if kind == "reasoning":
        return {"summary": []} | told
    if kind == "message":
        is_answer = item.get("role") == "assistant"
        content = item["content"]
        parts = [{"type": "output_text" if is_answer else "input_text", "text": content}] if isinstance(content, str) else content
        told["content"] = [{"annotations": []} | part for part in parts] if is_answer else parts
    return told


def replay_response(response: dict[str, Any]) -> Iterator[Event]:
    """Yield the events of a stream that ends with this response. Each text or call comes in one piece."""
    for number, event in enumerate(_list_events(response)):
        yield event | {"sequence_number": number}


def _list_events(response: dict[str, Any]) -> Iterator[Event]:
    begun = response | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(response["output"]):
        yield from begin_item(item, index)
        part = item if item["type"] == "function_call" else item["content"][0]
        yield extend_item(item, index, part["arguments"] if part is item else part["text"], part.get("logprobs"))
        yield from end_item(item, index)
    yield {"type": f"response.{response['status']}", "response": response}


def begin_item(item: dict[str, Any], index: int) -> Iterator[Event]:
    """Yield that an item of the output begins, with the one part that a text has; both still empty."""
    empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    yield {"type": "response.output_item.added", "output_index": index, "item": item | {"status": "in_progress"} | empty}
    for part in item.get("content", ()):
        empty = {"text": "", "logprobs": []} if "logprobs" in part else {"text": ""}
        yield {"type": "response.content_part.added", "part": part | empty} | _locate(item, index)


def extend_item(item: dict[str, Any], index: int, text: str, logprobs: list[dict[str, Any]] | None = None) -> Event:
    """Return the event of what is added to the text or the arguments of an item."""
    kind = "function_call_arguments" if item["type"] == "function_call" else item["content"][0]["type"]
    told = {} if logprobs is None else {"logprobs": logprobs}
    return {"type": f"response.{kind}.delta", "delta": text} | told | _locate(item, index)


def end_item(item: dict[str, Any], index: int) -> Iterator[Event]:
    """Yield that an item has ended, with all its text."""
    where = _locate(item, index)
    if item["type"] == "function_call":
        yield {"type": "response.function_call_arguments.done", "arguments": item["arguments"], "name": item["name"]} | where
    for part in item.get("content", ()):
        told = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        yield {"type": f"response.{part['type']}.done", "text": part["text"]} | told | where
        yield {"type": "response.content_part.done", "part": dict(part)} | where
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _locate(item: dict[str, Any], index: int) -> dict[str, Any]:
    return {"item_id": item["id"], "output_index": index} | ({} if item["type"] == "function_call" else {"content_index": 0})
