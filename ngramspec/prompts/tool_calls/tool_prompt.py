"""Chats with tools for templates that know none: the system message describes the tools, calls and results are text of turns.

Turns and tools enter, turns of plain text leave, worded as Hermes and Qwen were trained on it. Knows neither templates nor tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from ngramspec.prompts.tool_calls.call_formats import HERMES, CallFormat

ASSISTANT, SYSTEM, TOOL, USER = "assistant", "system", "tool", "user"
_TOOLS_TEXT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class Call(NamedTuple):
    """A call that the assistant made."""

    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""


class Turn(NamedTuple):
    """One message of a chat: its role as templates know it, and its text."""

    role: str
    content: str
    calls: tuple[Call, ...] = ()
    """The assistant's calls."""
    call_id: str | None = None
    """The id of the call that a tool's turn answers."""
    name: str | None = None
    """The name of the tool whose turn this is."""
    thoughts: str = ""
    """What the assistant thought before, which some templates show."""


def write_calls_as_text(turns: Sequence[Turn], form: CallFormat) -> list[Turn]:
    """Return the same chat with the assistant's calls in its text."""
    return [
        turn._replace(content=f"{turn.content}{form.write([(call.name, call.arguments) for call in turn.calls])}", calls=())
        if turn.calls
        else turn
        for turn in turns
    ]


def separate_calls(turns: Sequence[Turn]) -> list[Turn]:
    """Return the same chat with one call in a turn, and its result after it, for templates that show no more."""
    separate: list[Turn] = []
    waiting: list[Turn] = []  # calls whose results follow
    for turn in turns:
        if turn.role == TOOL and waiting:
            answered = next((call for call in waiting if call.calls[0].id == turn.call_id), waiting[0])
            separate += [answered, turn]
            waiting.remove(answered)
            continue
        separate += waiting
        waiting = [turn._replace(calls=(call,)) if not i else Turn(ASSISTANT, "", (call,)) for i, call in enumerate(turn.calls)]
        separate += [] if waiting else [turn]
    return separate + waiting


def write_tools_as_text(turns: Sequence[Turn], tools: Sequence[dict[str, Any]], *, takes_system: bool) -> list[Turn]:
    """Return the same chat in plain text. `takes_system`: the template has system messages; otherwise the tools begin the first message."""
    plain: list[Turn] = []
    for turn, before in zip(turns, [None, *turns[:-1]], strict=True):
        if turn.calls:
            calls = HERMES.write([(call.name, call.arguments) for call in turn.calls])
            plain.append(Turn(ASSISTANT, f"{turn.content}\n{calls}" if turn.content else calls, thoughts=turn.thoughts))
        elif turn.role != TOOL:
            plain.append(turn)
        else:
            result = f"<tool_response>\n{turn.content}\n</tool_response>"
            if before is not None and before.role == TOOL:
                result = f"{plain.pop().content}\n{result}"
            plain.append(Turn(USER, result))
    if not tools:
        return plain
    text = _TOOLS_TEXT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    role = SYSTEM if takes_system else USER
    if plain[0].role == role:
        first = plain.pop(0)
        text = f"{first.content}\n\n{text}" if takes_system else f"{text}\n\n{first.content}"
    return [Turn(role, text), *plain]
