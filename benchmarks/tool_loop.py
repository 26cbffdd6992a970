"""Does an agent get a call that it can make, turn after turn, and is its prompt computed only where it is new?

    python -m benchmarks.tool_loop --model M [--turns N] [--temperature T --seed S]

An agent of twenty lines with two tools talks to `ngramspec serve` through the `openai` client; every turn must call one of them
(`tool_choice="required"`), whose result is the next turn's news. `parsed`: answers with one call of a tool that there is, whose arguments
are JSON; `valid`: those that fit their schema, by jsonschema_rs; `cached`: of the tokens of all prompts but the first, how many the prefix
cache had; `grows`: that no turn had fewer than the one before. Progress goes to standard error, a table and a last line of JSON to
standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from benchmarks import common
from benchmarks.common import say
from benchmarks.load_server import serve


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    with serve(args.model) as server:
        document = measure(f"http://{server.target.host}:{server.target.port}", args)
    of = ["turns", "parsed", "valid", "cached", "grows", "seconds_a_turn", "acceptance_length"]
    common.print_table(["", *of], [["required", *(document[name] for name in of)]])
    common.print_document(document)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.new_parser("tool_loop", __doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="M", help="what `ngramspec serve` takes")
    add("--turns", type=common.positive, default=50, metavar="N", help="default 50")
    add("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    add("--seed", type=int, default=0, metavar="S", help="of sampling")
    return parser.parse_args(argv)


def tool(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


NUMBER = {"type": "integer", "minimum": 0, "maximum": 9999}
TOOLS = [
    tool("calculate", "Compute with two numbers.", operation={"enum": ["add", "multiply"]}, a=NUMBER, b=NUMBER),
    tool("look_up", "Look a word up in the dictionary.", word={"type": "string", "pattern": "^[a-z]{1,20}$"}),
]
RUN: dict[str, Callable[..., Any]] = {
    "calculate": lambda operation, a, b: a + b if operation == "add" else a * b,
    "look_up": lambda word: f"{word}: a word of {len(word)} letters",
}
TASK = "Use the tools, one at a time: add numbers, multiply them, and look words up. Never do the same thing twice."


def measure(url: str, args: argparse.Namespace) -> dict[str, Any]:
    """The JSON document of a loop against the server at this address."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
    model = client.models.list().data[0].id
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    asked |= {"temperature": args.temperature, "seed": args.seed, "extra_body": {"speculative_metrics": "summary"}}
    messages: list[Any] = [{"role": "user", "content": TASK}]
    parsed = valid = 0
    usages, lengths, started = [], [], time.perf_counter()
    for turn in range(args.turns):
        made: Any = client.chat.completions.create(model=model, messages=messages, **asked)
        message = made.choices[0].message
        parsed += (fits := check(message.tool_calls)) is not None
        valid += bool(fits)
        usages.append(made.usage)
        lengths.append(made.metrics["speculative_decoding"]["mean_acceptance_length"])
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            result = RUN[call.function.name](**json.loads(call.function.arguments)) if fits else "no such call"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
            say(f"{turn + 1}: {call.function.name}({call.function.arguments}) -> {result}")
    seconds = time.perf_counter() - started
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]
    prompts = [usage.prompt_tokens for usage in usages]
    return {
        "model": args.model,
        "turns": args.turns,
        "parsed": parsed,
        "valid": valid,
        "cached": round(sum(cached[1:]) / max(sum(prompts[1:]), 1), 3),
        "grows": all(before <= after for before, after in pairwise(cached)),
        "cached_tokens": [cached[0], cached[len(cached) // 2], cached[-1]],
        "prompt_tokens": [prompts[0], prompts[len(prompts) // 2], prompts[-1]],
        "seconds_a_turn": round(seconds / args.turns, 3),
        "acceptance_length": round(sum(lengths) / len(lengths), 2),
        "settings": {"temperature": args.temperature, "seed": args.seed},
        **common.environment("cpu", os.cpu_count() or 1),
    }


def check(calls: Any) -> bool | None:
    """Whether the call fits its schema; None: there is no such call."""
    import jsonschema_rs

    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
    if not calls or len(calls) != 1 or calls[0].function.name not in schemas:
        return None
    try:
        arguments = json.loads(calls[0].function.arguments)
    except ValueError:
        return None
    return bool(jsonschema_rs.is_valid(schemas[calls[0].function.name], arguments))


if __name__ == "__main__":
    main()
