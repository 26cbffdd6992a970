"""An agent's calls, turn after turn: do they fit their schemas, and is a prompt computed only where it is new?

An agent of a few lines talks to `ngramspec serve` through the `openai` client. By default every turn must call one of two tools
(`tool_choice="required"`). With `--auto` the model chooses: it has five tools for the files of a small project, gets one task after the
other, and a turn may be a call or a text, which ends its task. Figures of the JSON document:

parsed  answers with calls of tools that there are, whose arguments are JSON
valid   those that fit their schemas, by jsonschema_rs
text    answers without a call
leaked  texts that hold a call, or a part of one, that was not recognised
cached  share of the tokens of all prompts but the first that the prefix cache had; `grows`: no turn had fewer than the one before
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import Any

from benchmarks import common
from benchmarks.common import print_progress
from benchmarks.server_process import serve
from ngramspec.backends.cpu.cores import count_cores


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=common.parse_positive, default=50, metavar="N", help="tools: turns (50)")
    parser.add_argument("--auto", action="store_true", help="tools: let the model choose whether to call: tasks on a small project's files")
    parser.add_argument("--temperature", type=common.parse_number, default=0.0, metavar="T", help="tools: 0, the default, is greedy")


def run_tools(args: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON document. Raises SystemExit without a model."""
    if args.model is None:
        raise SystemExit("tools: --model is needed")
    with serve(args.model) as process:
        document = measure_turns(process.address.url, args)
    names = ["turns", "parsed", "valid", "text", "leaked", "cached", "grows", "seconds_a_turn", "acceptance_length"]
    common.print_table(["", *names], [[document["tool_choice"], *(document[name] for name in names)]])
    return document


def make_tool(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


NUMBER = {"type": "integer", "minimum": 0, "maximum": 9999}
TOOLS = [
    make_tool("calculate", "Compute with two numbers.", operation={"enum": ["add", "multiply"]}, a=NUMBER, b=NUMBER),
    make_tool("look_up", "Look a word up in the dictionary.", word={"type": "string", "pattern": "^[a-z]{1,20}$"}),
]
RUN: dict[str, Callable[..., Any]] = {
    "calculate": lambda operation, a, b: a + b if operation == "add" else a * b,
    "look_up": lambda word: f"{word}: a word of {len(word)} letters",
}
TASK = "Use the tools, one at a time: add numbers, multiply them, and look words up. Never do the same thing twice."

TEXT = {"type": "string"}
FILE_TOOLS = [
    make_tool("list_files", "List the names of all files of the project."),
    make_tool("read_file", "Read a file of the project.", path=TEXT),
    make_tool("write_file", "Write a file of the project, the whole of it.", path=TEXT, content=TEXT),
    make_tool("find_text", "Find the lines of all files that contain a text.", text=TEXT),
    make_tool("count_lines", "Count the lines of a file.", path=TEXT),
]
RULES = "You are a coding assistant. Use the provided functions to work on the project's files."
TASKS = [
    "What files does the project have?",
    "Read main.py and tell me what it does.",
    "How many lines has README.md?",
    "Where is the function add used?",
    "Read calc.py.",
    "Write a file greet.py with a function greet(name) that returns a greeting.",
    "Is there a TODO in the project?",
    "Read settings.json.",
    "How many lines has calc.py?",
    "Write a file test_calc.py with a test of the function add.",
]


class Project:
    """Files in memory, and what tools do with them."""

    def __init__(self) -> None:
        self.files = {
            "main.py": "from calc import add\n\n\ndef main():\n    print(add(1, 2))  # TODO: read numbers\n\n\nmain()\n",
            "calc.py": "def add(a, b):\n    return a + b\n\n\ndef multiply(a, b):\n    return a * b\n",
            "README.md": "# Calculator\n\nAdds two numbers.\n\nTODO: describe how to run it.\n",
            "settings.json": '{"debug": false, "level": 3}\n',
        }

    def run(self, name: str, arguments: dict[str, Any]) -> str:
        path = arguments.get("path", "")
        if name in ("read_file", "count_lines") and path not in self.files:
            return f"error: there is no file {path!r}; there are {', '.join(self.files)}"
        match name:
            case "list_files":
                return "\n".join(self.files)
            case "read_file":
                return self.files[path]
            case "count_lines":
                return str(len(self.files[path].splitlines()))
            case "write_file":
                self.files[path] = arguments["content"]
                return f"wrote {len(arguments['content'])} characters to {path}"
        found = [f"{path}: {line}" for path, text in self.files.items() for line in text.splitlines() if arguments["text"] in line]
        return "\n".join(found) or "nothing found"


LEAKS = re.compile(
    r'</?tool_call|</?tools>|<function=|\[TOOL_CALLS\]|"(?:arguments|parameters)"\s*:\s*\{|"name"\s*:\s*"(?:'
    + "|".join(each["function"]["name"] for each in FILE_TOOLS)
    + '")'
)


@dataclass(slots=True)
class TurnCounts:
    """What came of the turns."""

    parsed: int = 0
    valid: int = 0
    text: int = 0
    leaked: int = 0
    usages: list[Any] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)

    def add(self, made: Any, fits: bool | None) -> None:
        message = made.choices[0].message
        self.parsed += fits is not None
        self.valid += bool(fits)
        self.text += not message.tool_calls
        self.leaked += bool(LEAKS.search(message.content or ""))
        self.usages.append(made.usage)
        self.lengths.append(made.metrics["speculative_decoding"]["mean_acceptance_length"])


def measure_turns(url: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON document of a loop against the server at this address."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
    asked: dict[str, Any] = {"model": client.models.list().data[0].id, "temperature": args.temperature, "seed": args.seed}
    asked |= {"extra_body": {"speculative_metrics": "summary"}}
    started = time.perf_counter()
    counts = (let_choose if args.auto else require_calls)(client, asked, args.turns)
    seconds = time.perf_counter() - started
    cached = [usage.prompt_tokens_details.cached_tokens for usage in counts.usages]
    prompts = [usage.prompt_tokens for usage in counts.usages]
    return {
        "model": args.model,
        "tool_choice": "auto" if args.auto else "required",
        "turns": args.turns,
        "parsed": counts.parsed,
        "valid": counts.valid,
        "text": counts.text,
        "leaked": counts.leaked,
        "cached": round(sum(cached[1:]) / max(sum(prompts[1:]), 1), 3),
        "grows": all(before <= after for before, after in pairwise(cached)),
        "cached_tokens": [cached[0], cached[len(cached) // 2], cached[-1]],
        "prompt_tokens": [prompts[0], prompts[len(prompts) // 2], prompts[-1]],
        "seconds_a_turn": round(seconds / args.turns, 3),
        "acceptance_length": round(sum(counts.lengths) / len(counts.lengths), 2),
        "settings": {"temperature": args.temperature, "seed": args.seed},
        **common.describe_machine("cpu", count_cores()),
    }


def require_calls(client: Any, asked: dict[str, Any], turns: int) -> TurnCounts:
    """Take turns each of which must call one tool."""
    counts = TurnCounts()
    messages: list[Any] = [{"role": "user", "content": TASK}]
    asked = asked | {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    for turn in range(turns):
        made = client.chat.completions.create(messages=messages, **asked)
        message = made.choices[0].message
        counts.add(made, fits := check_calls(message.tool_calls))
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            result = RUN[call.function.name](**json.loads(call.function.arguments)) if fits else "no such call"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
            print_progress(f"{turn + 1}: {call.function.name}({call.function.arguments}) -> {result}")
    return counts


def let_choose(client: Any, asked: dict[str, Any], turns: int) -> TurnCounts:
    """Take turns that call tools or say something, which ends a task; a task has four turns at most."""
    counts, project, tasks, left = TurnCounts(), Project(), cycle(TASKS), 4
    messages: list[Any] = [{"role": "system", "content": RULES}, {"role": "user", "content": next(tasks)}]
    asked = asked | {"tools": FILE_TOOLS, "tool_choice": "auto", "max_tokens": 400}
    for turn in range(turns):
        made = client.chat.completions.create(messages=messages, **asked)
        message = made.choices[0].message
        counts.add(made, fits := check_calls(message.tool_calls, FILE_TOOLS, several=True))
        messages.append({"role": "assistant", "content": message.content or ""})
        if message.tool_calls:
            messages[-1]["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
        for call in message.tool_calls or ():
            result = project.run(call.function.name, json.loads(call.function.arguments)) if fits else "error: the call does not fit"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            print_progress(f"{turn + 1}: {call.function.name}({call.function.arguments}) -> {result!r}")
        left -= 1
        if not message.tool_calls or not left:
            print_progress(f"{turn + 1}: {message.content!r}")
            messages.append({"role": "user", "content": next(tasks)})
            left = 4
    return counts


def check_calls(calls: Any, tools: Sequence[dict[str, Any]] = TOOLS, *, several: bool = False) -> bool | None:
    """Return whether the calls fit their schemas; None if none can be made, or if there are several and only one is allowed."""
    import jsonschema_rs

    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
    if not calls or (len(calls) != 1 and not several) or any(call.function.name not in schemas for call in calls):
        return None
    try:
        return all(jsonschema_rs.is_valid(schemas[call.function.name], json.loads(call.function.arguments)) for call in calls)
    except ValueError:
        return None
