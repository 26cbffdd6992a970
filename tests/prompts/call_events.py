"""What a reader of tool calls has found, put together."""

from __future__ import annotations

from collections.abc import Iterable

from ngramspec.prompts.tool_calls.call_scanner import StreamDelta, TextDelta, ToolCallArguments, ToolCallStart


def collect_calls(events: Iterable[StreamDelta]) -> tuple[str, list[tuple[str, str]]]:
    """Return the text, and the calls' names and arguments. No text is empty."""
    said, calls = "", list[tuple[str, str]]()
    for event in events:
        match event:
            case TextDelta(text):
                assert text
                said += text
            case ToolCallStart(name):
                calls.append((name, ""))
            case ToolCallArguments(text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return said, calls
