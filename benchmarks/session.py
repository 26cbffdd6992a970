"""How long does somebody who writes code wait for suggestions? An editing session is replayed against servers over HTTP.

    python -m benchmarks.session --model M.gguf --old DIR --new DIR [--functions N] [--requests N] [--typed N] [--edits N]
        [--contenders on,off,store,prefix-first,suffix-first,as-sent,not-ahead,predicted,llama-none,llama-ngram-simple,llama-ngram-mod]
        [--datastore STORE] [--llama-server-python PATH] [--after-line N] [--ring N] [--pauses] [--cancel]

DIR are two releases of a library. Functions of the new one whose body is nowhere in the old one are written into their file, one after
the other, as llama.vim has them completed: /infill with the 256 lines before the cursor and the 64 after it, greedy, up to `--max-tokens`
tokens. Each server has the same file and threads; functions are done by all servers in turns.

    cold        the first request of a function: the file's head has not been seen
    requests    at the beginnings of words of the body, in their order, each waited for: milliseconds to the first and the last token;
                `prompt_tokens`: how many of the prompt's were computed, in the mean, at cold and at these requests. With `--pauses`
                what is between two of them is typed before the next one, in the mean time of a key and of a line
    typed       the bodies of as many other functions, which no server was asked for before, are typed for real. A suggestion is asked
                for as llama.vim does: one request at a time, of up to 128 tokens, that ends with its line after 250 ms; when it is shown,
                another one, of 1,000 ms, for what would follow. `visible` is the share of keys before which one was to be seen, `shown` of
                those before which one was `asked` for. One that is what comes next, or whose first line is, is accepted. What is around
                the cursor has been computed when typing begins. With `--cancel` each key cancels the request, and none has a limit
    ring        with `--ring 16`, llama.vim's default, requests carry parts of files that were visited before, and one without a text to
                write is sent once a second for each new part, in the `--reading` seconds before a function's first request
    edits       a name is to be changed in a file of the new release by chat, whose answer is the whole file: seconds to the end. The
                contender `predicted` sends the file as the expected output

Times between keys are log-normal with the mean of 239 ms and the deviation of 112 ms that Dhakal et al. found ("Observations on Typing from
136 Million Keystrokes", CHI 2018); before a line's first key there are `--think` seconds more, an assumption. A request that
a key cancelled has no time. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.editor import (
    CHUNK_LINES,
    KEY_MEAN_S,
    PREFIX_LINES,
    SUFFIX_LINES,
    Editor,
    NewFunction,
    Ring,
    TypedFigures,
    complete,
    make_body,
    type_text,
)
from benchmarks.http_client import ServerAddress, fetch, find_quantile
from benchmarks.server_process import read_cpu_s, serve
from ngramspec.backends.cpu.cores import count_cores

SCOPE_LINES = 1024  # llama.vim's ring_scope
BODY_CHARS = 120, 2000  # functions with bodies of so many characters are written
CONTEXT, RING_CONTEXT = 8192, 16384  # tokens; the latter with --ring
EDIT_LINES = 50, 500  # of a file that is edited as a whole
TEST_FOLDERS = {"tests", "_tests", "test"}
CONTENDERS = "on,off,llama-none,llama-ngram-simple,llama-ngram-mod"
ORDERS = ("prefix-first", "suffix-first")  # of prompts, whatever the model's format


@dataclass(slots=True)
class Figures:
    """What one server did for the writer."""

    cold_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    last_ms: list[float] = field(default_factory=list)
    cold_tokens: list[int] = field(default_factory=list)
    """Tokens of prompts that were computed: of each function's first request, and of the others."""
    first_tokens: list[int] = field(default_factory=list)
    typed: TypedFigures = field(default_factory=TypedFigures)
    edit_s: list[float] = field(default_factory=list)
    edit_tokens: list[int] = field(default_factory=list)


def read_modules(release: Path) -> Iterator[tuple[Path, str, ast.Module]]:
    """Yield the path within a release, the text and the syntax tree of every module but tests and what is not Python, in order."""
    for path in sorted(release.rglob("*.py")):
        within, text = path.relative_to(release), path.read_text(errors="ignore")
        if not TEST_FOLDERS.intersection(within.parts):
            with contextlib.suppress(SyntaxError):
                yield within, text, ast.parse(text)


def find_new_functions(old: Path, new: Path, limit: int, after_line: int = 0) -> list[NewFunction]:
    """Return functions of `new` whose body is not a part of `old`, evenly over its files. Raises SystemExit if there are none."""
    known = "\n".join(path.read_text(errors="ignore") for path in sorted(old.rglob("*.py")))
    found = []
    for path, text, tree in read_modules(new):
        lines = text.splitlines(keepends=True)
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            first, end = body[0].lineno - 1, node.end_lineno or 0
            written = "".join(lines[first:end])
            if first >= after_line and BODY_CHARS[0] <= len(written) <= BODY_CHARS[1] and written not in known:
                found.append(NewFunction(f"{path}:{node.name}", "".join(lines[:first]), written, "".join(lines[end:])))
    if not found:
        raise SystemExit("there is no new function between the two releases")
    return common.pick_evenly(found, limit)


def find_edits(new: Path, limit: int) -> list[tuple[str, str]]:
    """Return files of 50 to 500 lines, evenly over the release, each with the name that its functions' parameters bear most often."""
    found = []
    for _, text, tree in read_modules(new):
        if EDIT_LINES[0] <= text.count("\n") <= EDIT_LINES[1]:
            names = Counter(node.arg for node in ast.walk(tree) if isinstance(node, ast.arg) and node.arg != "self")
            found += [(text, name) for name, _ in names.most_common(1)]
    return common.pick_evenly(found, limit)


async def edit_file(server: ReplayedServer, text: str, name: str, predicted: bool) -> None:
    """Have a name changed in a whole file by chat."""
    asked = (
        f"Rename `{name}` to `{name}_` in this file. Reply with the whole file in one code block and nothing else.\n\n```python\n{text}```"
    )
    body = {"model": "m", "messages": [{"role": "user", "content": asked}], "temperature": 0, "max_tokens": len(text) // 3}
    if predicted:
        body["prediction"] = {"type": "content", "content": f"```python\n{text}```"}
    sent = time.perf_counter()
    status, answer = await fetch(server.address, "/v1/chat/completions", body)
    if status != 200:
        raise OSError(f"/v1/chat/completions answered {status}: {answer[:200]!r}")
    server.figures.edit_s.append(round(time.perf_counter() - sent, 2))
    server.figures.edit_tokens.append(int(json.loads(answer)["usage"]["completion_tokens"]))


async def warm_up(server: ReplayedServer) -> None:
    """Have the server compute the ring's chunks, as an editor does each time that they change."""
    body = {"id_slot": 0, "input_prefix": "", "input_suffix": "", "input_extra": server.ring.get_extra(), "prompt": "", "n_predict": 0}
    await fetch(server.address, "/infill", body)


async def read_on(server: ReplayedServer, function: NewFunction, seconds: float) -> None:
    """Open the function's file and read for some seconds, while new chunks are sent to the server; their answers are not waited for."""
    ring, after = server.ring, function.after.split("\n")
    ring.pick(function.path, function.before.split("\n")[-CHUNK_LINES // 2 :] + after[: CHUNK_LINES // 2], replaces=True)
    tasks = []
    for _ in range(round(seconds)):
        await asyncio.sleep(1)
        if ring.update():
            tasks.append(asyncio.create_task(warm_up(server)))
    lines = function.before.split("\n")
    ring.pick(function.path, lines[-SCOPE_LINES:-PREFIX_LINES], replaces=False)
    ring.pick(function.path, after[SUFFIX_LINES : SUFFIX_LINES + CHUNK_LINES], replaces=False)
    server.warm_ups += tasks


async def wait_for_each(server: ReplayedServer, function: NewFunction, n_requests: int, max_tokens: int, think_s: float | None) -> None:
    """Ask at the beginnings of `n_requests` words of the body and wait for each suggestion.

    `think_s`: seconds before a line that pass, as does the time of typing, from one request to the next; None: none passes.
    """
    starts = [i for i in range(1, len(function.body)) if function.body[i - 1].isspace() and not function.body[i].isspace()]
    places = [0, *common.pick_evenly(starts, n_requests)]
    for n, at in enumerate(places):
        if n and think_s is not None:
            typed = function.body[places[n - 1] : at]
            await asyncio.sleep(KEY_MEAN_S * len(typed) + think_s * typed.count("\n"))
        times: list[float] = []
        computed = server.figures.first_tokens if n else server.figures.cold_tokens
        await complete(server.address, make_body(function, function.body[:at], server.ring, max_tokens), times, computed)
        if n == 0:
            server.figures.cold_ms.append(times[-1] * 1e3)
        else:
            server.figures.first_ms.append(times[0] * 1e3)
            server.figures.last_ms.append(times[-1] * 1e3)


async def write(server: ReplayedServer, function: NewFunction, args: argparse.Namespace, rng: random.Random) -> None:
    """Write the beginning of a function's body as a typist would, with the suggestions of a server."""

    async def ask(written: str, limit_ms: int) -> str:
        body = make_body(function, written, server.ring, args.typed_tokens, limit_ms, cuts=True)
        return await complete(server.address, body, [])

    cpu_s = server.read_cpu_s()
    await type_text(Editor(ask, args.cancel), function.body[: args.typed], args.think, rng, server.figures.typed)
    server.figures.typed.cpu_s += server.read_cpu_s() - cpu_s


@dataclass(slots=True)
class ReplayedServer:
    """A server that takes part."""

    address: ServerAddress
    pid: int
    note: str = ""
    ring: Ring = field(default_factory=lambda: Ring(0, 0))
    warm_ups: list[asyncio.Task[Any]] = field(default_factory=list)
    """Requests whose answers are not waited for."""
    figures: Figures = field(default_factory=Figures)

    def read_cpu_s(self) -> float:
        return read_cpu_s(self.pid)


@contextlib.contextmanager
def open_server(name: str, args: argparse.Namespace) -> Iterator[ReplayedServer]:
    """Serve with the contender of this name. Raises SystemExit for a name that there is not, RuntimeError if it does not start."""
    if name.startswith("llama-"):
        with _open_llama_server(name.removeprefix("llama-"), args) as server:
            yield server
        return
    if name not in ("on", "off", "store", *ORDERS, "as-sent", "not-ahead", "predicted"):
        raise SystemExit(f"no contender named {name}")
    settings: dict[str, Any] = {"max_model_len": RING_CONTEXT if args.ring else CONTEXT} | ({"no_spec": True} if name == "off" else {})
    settings |= {"threads": args.threads} if args.threads else {}
    settings |= {"fim_order": name} if name in ORDERS else {}
    settings |= {"fim_window": 0} if name == "as-sent" else {}
    settings |= {"no_fim_ahead": True} if name == "not-ahead" else {}
    settings |= {"datastore": f"old={args.datastore}"} if name == "store" else {}
    with serve(args.model, **settings) as process:
        yield ReplayedServer(process.address, process.pid)


@contextlib.contextmanager
def _open_llama_server(spec_type: str, args: argparse.Namespace) -> Iterator[ReplayedServer]:
    command = [args.llama_server_python, str(Path(__file__).with_name("_llama_server.py")), args.model]
    command += [str(args.threads or count_cores()), str(RING_CONTEXT if args.ring else CONTEXT), spec_type]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("llama.cpp's server did not start")
        started = json.loads(line)
        yield ReplayedServer(ServerAddress(int(started["address"].rpartition(":")[2])), process.pid, started["instruction_sets"])
    finally:
        process.kill()
        process.wait()


def summarise(server: ReplayedServer) -> dict[str, Any]:
    """Return a server's figures."""
    f, typed = server.figures, server.figures.typed
    figures: dict[str, Any] = {
        "cold_s": round(statistics.median(f.cold_ms) / 1e3, 2) if f.cold_ms else None,
        "first_ms": [round(find_quantile(f.first_ms, q)) for q in (0.5, 0.95)] if f.first_ms else None,
        "prompt_tokens": [round(statistics.fmean(each)) for each in (f.cold_tokens, f.first_tokens) if each],
        "last_ms": [round(find_quantile(f.last_ms, q)) for q in (0.5, 0.95)] if f.last_ms else None,
        "shown": round(typed.shown / typed.asked, 3) if typed.asked else None,
        "asked": typed.asked,
        "visible": round(1 - (typed.asked - typed.shown) / typed.keys, 3) if typed.keys else None,
        "accepted_chars": typed.accepted_chars,
        "typed_chars": typed.typed_chars,
        "cpu_s_per_accepted_char": round(typed.cpu_s / typed.accepted_chars, 3) if typed.accepted_chars else None,
    }
    figures |= {"edit_s": f.edit_s, "edit_tokens": f.edit_tokens} if f.edit_s else {}
    return figures | ({"instruction_sets": server.note} if server.note else {})


async def replay(
    servers: dict[str, ReplayedServer], functions: list[NewFunction], typed: list[NewFunction], args: argparse.Namespace
) -> None:
    """Have every server serve the writing of every function, in turns: suggestions for one are waited for, then another is typed.

    A server that keeps its outputs would know what it is asked for while a function is typed for which it was asked before.
    """
    if args.ring:
        visited = find_new_functions(args.old, args.new, len(functions) + len(typed) + args.ring)
        for server in servers.values():
            server.ring.fill([each for each in visited if each not in functions + typed])
            await warm_up(server)
    for n, (function, order) in enumerate(zip(functions, common.order_turns(list(servers), len(functions)), strict=True)):
        for name in order:
            server = servers[name]
            if args.ring:
                await read_on(server, function, args.reading)
            await wait_for_each(server, function, args.requests, args.max_tokens, args.think if args.pauses else None)
            server.ring.pick_around(function)
            if n < len(typed):
                await fetch(server.address, "/infill", make_body(typed[n], "", server.ring, 0) | {"stream": False})
                await write(server, typed[n], args, random.Random(f"{args.seed} {n}"))
                server.ring.pick_around(typed[n])
            await asyncio.gather(*server.warm_ups)  # the next server has the machine for itself
            server.warm_ups.clear()
        common.print_progress(f"{n + 1}/{len(functions)} functions: {function.name}")
    edits = find_edits(args.new, args.edits) if args.edits else []
    for n, ((text, changed), order) in enumerate(zip(edits, common.order_turns(list(servers), len(edits)), strict=True)):
        for name in order:
            await edit_file(servers[name], text, changed, name == "predicted")
        common.print_progress(f"{n + 1}/{len(edits)} edits")


def parse_args() -> argparse.Namespace:
    parser = common.make_parser("session", __doc__)
    parser.add_argument("--model", required=True, help="a GGUF file that fills in the middle")
    parser.add_argument("--old", type=Path, required=True, metavar="DIR")
    parser.add_argument("--new", type=Path, required=True, metavar="DIR")
    parser.add_argument("--functions", type=int, default=8)
    parser.add_argument(
        "--after-line", type=int, default=0, metavar="N", help="only functions below N lines: of more than 256, windows move"
    )
    parser.add_argument("--ring", type=int, default=0, metavar="N", help="parts of other files that requests carry (llama.vim: 16)")
    parser.add_argument(
        "--reading", type=common.parse_number, default=10.0, metavar="S", help="seconds before a function is begun, with --ring"
    )
    parser.add_argument("--requests", type=common.parse_positive, default=8, help="of a function that are waited for")
    parser.add_argument("--pauses", action="store_true", help="between these requests the time passes that typing takes")
    parser.add_argument("--typed", type=int, default=120, help="characters of a body that are typed (0: nothing is)")
    parser.add_argument("--typed-tokens", type=common.parse_positive, default=128, help="of a suggestion while a body is typed, at most")
    parser.add_argument("--cancel", action="store_true", help="each key cancels the request under way; they have no time limit")
    parser.add_argument("--edits", type=int, default=0, help="whole files that are edited by chat")
    parser.add_argument("--think", type=common.parse_number, default=2.0, metavar="S", help="seconds before the first key of a line")
    parser.add_argument("--max-tokens", type=common.parse_positive, default=64)
    parser.add_argument("--contenders", default=CONTENDERS)
    parser.add_argument("--datastore", metavar="STORE", help="of the old release, for the contender `store`")
    parser.add_argument("--llama-server-python", default="python", metavar="PATH", help="an interpreter with xllamacpp")
    parser.add_argument("--threads", type=common.parse_positive)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    found = find_new_functions(args.old, args.new, 2 * args.functions, args.after_line) if args.functions else []
    functions, typed = found[::2], found[1::2] if args.typed else []
    with contextlib.ExitStack() as stack:
        servers = {}
        for name in args.contenders.split(","):
            common.print_progress(f"starting {name}")
            servers[name] = stack.enter_context(open_server(name, args))
            servers[name].ring = Ring(args.ring, args.seed)
        asyncio.run(replay(servers, functions, typed, args))
        figures = {name: summarise(server) for name, server in servers.items()}
    columns = [
        "cold_s",
        "first_ms",
        "last_ms",
        "prompt_tokens",
        "shown",
        "visible",
        "accepted_chars",
        "typed_chars",
        "cpu_s_per_accepted_char",
        "edit_s",
    ]
    common.print_table(["server", *columns], [[name, *(str(f.get(key)) for key in columns)] for name, f in figures.items()])
    names = (
        "functions",
        "ring",
        "reading",
        "requests",
        "pauses",
        "typed",
        "typed_tokens",
        "cancel",
        "edits",
        "think",
        "max_tokens",
        "threads",
        "seed",
    )
    settings = {name: getattr(args, name) for name in names} | {"old": args.old.name, "new": args.new.name}
    document = {"benchmark": "session", "model": Path(args.model).name, "figures": figures, "settings": settings}
    common.print_document(document | common.describe_machine("cpu", args.threads or count_cores()))


if __name__ == "__main__":
    main()
