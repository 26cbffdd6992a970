"""What tools found that ran at a vendor, such as a web search, in conversations that were begun there: as text for prompts.

JSON that was parsed enters, texts leave. Knows neither routes nor which tools there are.
"""

from __future__ import annotations

import json
from typing import Any

_OMITTED = "[omitted: this model reads text only]"


def describe_found(found: Any) -> str:
    """Return a result: a text, the text of text blocks, or JSON without what is encrypted or encoded."""
    if found is None:
        return ""
    if isinstance(found, str):
        return str(_drop_unreadable(found))
    if isinstance(found, list) and found and all(_is_text(each) for each in found):
        return "\n".join(each["text"] for each in found)
    return json.dumps(_drop_unreadable(found), ensure_ascii=False)


def find_references(found: Any) -> list[str]:
    """Return the names of the tools that a search has found."""
    if isinstance(found, dict) and found.get("type") == "tool_reference":
        return [found["tool_name"]] if isinstance(found.get("tool_name"), str) else []
    inner = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return [name for each in inner for name in find_references(each)]


def _is_text(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str)


def _drop_unreadable(given: Any) -> Any:
    if isinstance(given, dict):
        kept = {name: _drop_unreadable(value) for name, value in given.items() if not name.startswith("encrypted_")}
        return kept | {"data": _OMITTED} if given.get("type") == "base64" else kept
    if isinstance(given, list):
        return [_drop_unreadable(each) for each in given]
    is_encoded = isinstance(given, str) and given.startswith("data:") and ";base64," in given[:100]
    return _OMITTED if is_encoded else given
