"""How long does somebody who writes code wait for suggestions? An editing session is replayed against servers over HTTP.

    python -m benchmarks.session --model M.gguf --old DIR --new DIR [--functions N] [--requests N] [--typed N] [--edits N]
        [--contenders on,off,store,prefix-first,suffix-first,as-sent,not-ahead,predicted,llama-none,llama-ngram-simple,llama-ngram-mod]
        [--datastore STORE] [--llama-server-python PATH] [--after-line N] [--ring N] [--pauses]

DIR are two releases of a library. Functions of the new one whose body is nowhere in the old one are written into their file, one after
the other, as llama.vim has them completed: /infill with the 256 lines before the cursor and the 64 after it, greedy, up to `--max-tokens`
tokens. Each server has the same file and threads; functions are done by all servers in turns.

    cold        the first request of a function: the file's head has not been seen
    requests    at the beginnings of words of the body, in their order, each waited for: milliseconds to the first and the last token;
                `prompt_tokens`: how many of the prompt's were computed, in the mean, at cold and at these requests. With `--pauses`
                what is between two of them is typed before the next one, in the mean time of a key and of a line
    typed       the bodies of as many other functions, which no server was asked for before, are typed for real: each key cancels the
                request under way and sends another, unless what is shown goes on with that key. A suggestion that is what comes next, or
                whose first line is, is accepted instead of typing it. What is around the cursor has been computed when typing begins
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
import math
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
from benchmarks.http_client import Connection, ServerAddress, fetch, find_quantile
from benchmarks.server_process import read_cpu_s, serve
from ngramspec.backends.cpu.cores import count_cores

PREFIX_LINES, SUFFIX_LINES = 256, 64  # llama.vim's n_prefix and n_suffix
CHUNK_LINES, SCOPE_LINES = 64, 1024  # llama.vim's ring_chunk_size, of which half is taken, and ring_scope
SAME, NEAR = 0.9, 0.5  # similarity from which on chunks count as one, and a chunk repeats what stands around the cursor
KEY_MEAN_S, KEY_DEVIATION_S = 0.239, 0.112
BODY_CHARS = 120, 2000  # functions with bodies of so many characters are written
CONTEXT, RING_CONTEXT = 8192, 16384  # tokens; the latter with --ring
EDIT_LINES = 50, 500  # of a file that is edited as a whole
TEST_FOLDERS = {"tests", "_tests", "test"}
CONTENDERS = "on,off,llama-none,llama-ngram-simple,llama-ngram-mod"
ORDERS = ("prefix-first", "suffix-first")  # of prompts, whatever the model's format


@dataclass(frozen=True, slots=True)
class NewFunction:
    """A function that is to be written into its file."""

    name: str
    before: str
    body: str
    after: str

    @property
    def path(self) -> str:
        return self.name.partition(":")[0]

    def get_lines_around(self, n: int) -> list[str]:
        """Return the function's last lines and those after it, up to n of each."""
        return (self.before + self.body).split("\n")[-n:] + self.after.split("\n")[:n]


class Ring:
    """Parts of files that an editor has shown, the latest last, as llama.vim collects them."""

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._rng = size, random.Random(seed)
        self._chunks: list[tuple[str, list[str]]] = []
        self._queued: list[tuple[str, list[str]]] = []

    def _cut(self, lines: list[str]) -> list[str]:
        """Return a part of as many lines as a chunk has, at random."""
        first = self._rng.randint(0, max(0, len(lines) - CHUNK_LINES // 2))
        return lines[first : first + CHUNK_LINES // 2] if len(lines) + 1 >= CHUNK_LINES else lines

    def pick(self, path: str, lines: list[str], replaces: bool) -> None:
        """Queue a part of these lines, unless there is one like it; `replaces`: instead of those like it."""
        chunk = self._cut(lines)
        if self._size == 0 or len(lines) < 3:
            return
        for chunks in (self._queued, self._chunks):
            alike = [i for i, (_, other) in enumerate(chunks) if chunk == other or (i and measure_similarity(chunk, other) > SAME)]
            if alike and not (replaces and all(chunks[i][1] != chunk for i in alike)):
                return
            for i in reversed(alike):
                del chunks[i]
        self._queued = [*self._queued[-15:], (path, chunk)]

    def fill(self, functions: list[NewFunction]) -> None:
        """Take chunks from around functions that were visited before the session, until there are as many as it keeps."""
        for function in functions:
            self.pick_around(function)
            while len(self._chunks) < self._size and self.update():
                pass

    def pick_around(self, function: NewFunction) -> None:
        """Pick what stands around a function that has been written and saved."""
        for _ in range(2):
            self.pick(function.path, function.get_lines_around(CHUNK_LINES // 2), replaces=True)

    def update(self) -> bool:
        """Take one of the queued chunks; return whether there was one."""
        if self._queued:
            self._chunks = [*self._chunks[-self._size + 1 :], self._queued.pop(0)]
            return True
        return False

    def get_extra(self, around: list[str] | None = None) -> list[dict[str, str]]:
        """Return the chunks as a request has them, after those were removed that are like the lines around the cursor."""
        if around is not None:
            near = self._cut(around)
            self._chunks = [each for i, each in enumerate(self._chunks) if not i or measure_similarity(each[1], near) <= NEAR]
        return [{"text": "\n".join(lines) + "\n", "filename": path} for path, lines in self._chunks]


def measure_similarity(a: list[str], b: list[str]) -> float:
    """Return the share of lines that two chunks have in common."""
    return 2 * sum(line in b for line in a) / (len(a) + len(b))


@dataclass(slots=True)
class Figures:
    """What one server did for the writer."""

    cold_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    last_ms: list[float] = field(default_factory=list)
    cold_tokens: list[int] = field(default_factory=list)
    """Tokens of prompts that were computed: of each function's first request, and of the others."""
    first_tokens: list[int] = field(default_factory=list)
    asked: int = 0
    """Keys in the typed part after which a suggestion was asked for."""
    shown: int = 0
    """How often one was there before the next key."""
    accepted_chars: int = 0
    typed_chars: int = 0
    cpu_s: float = 0.0
    """Processor time of the server in the typed part."""
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


def make_body(function: NewFunction, at: int, max_tokens: int, ring: Ring) -> dict[str, Any]:
    """Return llama.vim's request with the cursor after the first `at` characters of the function's body."""
    written = function.before + function.body[:at]
    lines = written.split("\n")
    return {
        "input_prefix": "".join(line + "\n" for line in lines[-PREFIX_LINES - 1 : -1]),
        "prompt": lines[-1],
        "input_suffix": "\n" + "".join(line + "\n" for line in function.after.split("\n")[:SUFFIX_LINES]),
        "input_extra": ring.get_extra(lines[-CHUNK_LINES // 2 :] + function.after.split("\n")[: CHUNK_LINES // 2]),
        "id_slot": 0,
        "n_predict": max_tokens,
        "temperature": 0.0,
        "cache_prompt": True,
        "stream": True,
    }


async def complete(address: ServerAddress, body: dict[str, Any], times: list[float], computed: list[int] | None = None) -> str:
    """Return a suggestion; `times` gets the seconds at which each of its pieces came, `computed` the number of the prompt's tokens that
    were not taken from a cache. Raises OSError for a refusal.
    """
    sent, text = time.perf_counter(), ""
    async with contextlib.aclosing(await Connection.open(address)) as connection:
        connection.send("/infill", body)
        status, _ = await connection.read_head()
        if status != 200:
            raise OSError(f"/infill answered {status}")
        async for data in connection.read_events():
            event = json.loads(data)
            text += event.get("content", "")
            times.append(time.perf_counter() - sent)
            if event.get("stop"):
                if computed is not None:
                    computed.append(event["timings"]["prompt_n"])
                break
    return text


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
        await complete(server.address, make_body(function, at, max_tokens, server.ring), times, computed)
        if n == 0:
            server.figures.cold_ms.append(times[-1] * 1e3)
        else:
            server.figures.first_ms.append(times[0] * 1e3)
            server.figures.last_ms.append(times[-1] * 1e3)


def find_accepted(suggestion: str, coming: str) -> int:
    """Return how many characters of `coming` a writer takes from a suggestion: all of it or its first line, if that is what comes."""
    whole = suggestion.rstrip()
    line = whole.split("\n")[0]
    for text in (whole, line):
        rest = coming[len(text) :]
        if text.strip() and coming.startswith(text) and (not rest or rest[0] == "\n" or text is whole):
            return len(text)
    return 0


async def type_body(
    server: ReplayedServer, function: NewFunction, n_chars: int, max_tokens: int, think_s: float, rng: random.Random
) -> None:
    """Write the first `n_chars` of the body as a typist would, with the suggestions of a server."""
    spread = math.sqrt(math.log(1 + (KEY_DEVIATION_S / KEY_MEAN_S) ** 2))
    figures, body, at, shown = server.figures, function.body[:n_chars], 0, ""
    cpu = server.read_cpu_s()
    while at < len(body):
        pause = rng.lognormvariate(math.log(KEY_MEAN_S) - spread**2 / 2, spread) + (think_s if body[at - 1 : at] in ("", "\n") else 0)
        if shown:
            await asyncio.sleep(pause)
        else:
            figures.asked += 1
            task = asyncio.create_task(complete(server.address, make_body(function, at, max_tokens, server.ring), []))
            await asyncio.wait([task], timeout=pause)
            if task.done():
                shown = task.result()
                figures.shown += 1
                await asyncio.sleep(pause / 2)  # it is read
            else:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if n := min(find_accepted(shown, function.body[at:]), len(body) - at):
            figures.accepted_chars += n
            at, shown = at + n, ""
        else:
            shown = shown[1:] if shown.startswith(body[at]) else ""
            figures.typed_chars += 1
            at += 1
    figures.cpu_s += server.read_cpu_s() - cpu


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
    f = server.figures
    figures: dict[str, Any] = {
        "cold_s": round(statistics.median(f.cold_ms) / 1e3, 2) if f.cold_ms else None,
        "first_ms": [round(find_quantile(f.first_ms, q)) for q in (0.5, 0.95)] if f.first_ms else None,
        "prompt_tokens": [round(statistics.fmean(each)) for each in (f.cold_tokens, f.first_tokens) if each],
        "last_ms": [round(find_quantile(f.last_ms, q)) for q in (0.5, 0.95)] if f.last_ms else None,
        "shown": round(f.shown / f.asked, 3) if f.asked else None,
        "asked": f.asked,
        "accepted_chars": f.accepted_chars,
        "typed_chars": f.typed_chars,
        "cpu_s_per_accepted_char": round(f.cpu_s / f.accepted_chars, 3) if f.accepted_chars else None,
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
                await fetch(server.address, "/infill", make_body(typed[n], 0, 0, server.ring) | {"stream": False})
                await type_body(server, typed[n], args.typed, args.max_tokens, args.think, random.Random(f"{args.seed} {n}"))
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
    parser.add_argument("--reading", type=float, default=10.0, metavar="S", help="seconds before a function is begun, with --ring")
    parser.add_argument("--requests", type=common.parse_positive, default=8, help="of a function that are waited for")
    parser.add_argument("--pauses", action="store_true", help="between these requests the time passes that typing takes")
    parser.add_argument("--typed", type=int, default=120, help="characters of a body that are typed (0: nothing is)")
    parser.add_argument("--edits", type=int, default=0, help="whole files that are edited by chat")
    parser.add_argument("--think", type=float, default=2.0, metavar="S", help="seconds before the first key of a line")
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
        "accepted_chars",
        "typed_chars",
        "cpu_s_per_accepted_char",
        "edit_s",
    ]
    common.print_table(["server", *columns], [[name, *(str(f.get(key)) for key in columns)] for name, f in figures.items()])
    names = ("functions", "ring", "reading", "requests", "pauses", "typed", "edits", "think", "max_tokens", "threads", "seed")
    settings = {name: getattr(args, name) for name in names} | {"old": args.old.name, "new": args.new.name}
    document = {"benchmark": "session", "model": Path(args.model).name, "figures": figures, "settings": settings}
    common.print_document(document | common.describe_machine("cpu", args.threads or count_cores()))


if __name__ == "__main__":
    main()
