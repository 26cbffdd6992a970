"""From a fresh checkout to drafts: does `serve --repo` answer at once, and how soon is a saved line drafted?

    python -m benchmarks.repo_serve --model M [--files N] [--saves K] [--sources DIR ...]

Copies N Python files (default 10,000) of this interpreter's own library and packages, or of DIRs, into a new git repository, and starts
`ngramspec serve --repo` on it with no store in the cache. Asks for short completions, one a second, until the store is there. Then saves
K times: a line that begins with a name that is nowhere else goes into a file of the tree, and a completion of its first half is asked for
every 50 ms until a token was drafted from that file.

`first_completion_s`: from the start of the process to the first answer, `while`: the store's state before and after it. `build_s`: from
the same start until drafts come from the store. `completion_ms`: median time of 24 tokens without drafts while it was built and after,
which is what the build takes from passes; `longest_pass_ms`: the greatest time from one of these tokens to the next, and `held_up`: how
many of them took 50 ms more than the median after the build, of `passes`. `save_s`: from the end of the write to the end of the first
answer with a token from the saved file, `save_s_all`: each of them. `restart_s`: a second start with the cache as it is, until drafts come
from the store. Progress goes to standard error, a table and a last line of JSON to standard output.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import say
from ngramspec.datastore import file_filters

PROMPTS = ("import os\nimport sys\n\ndef main(", "class Node:\n    def __init__(self", "def test_", "with open(path) as file:\n    ")
PAUSE_S = 1.0
"""Between completions while the store is built: somebody types."""
HELD_UP_MS = 50
WAIT_S = 3600
SETTINGS = ("files", "saves")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    with tempfile.TemporaryDirectory(prefix="ngramspec-repo-") as folder:
        document = measure(args, Path(folder))
    columns = ["files", "tokens", "first_completion_s", "build_s", "restart_s", "save_s"]
    common.print_table(columns, [[document[name] for name in columns]])
    common.print_document(document)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.new_parser("repo_serve", __doc__)
    parser.add_argument("--model", default="smollm2", help="folder, hub name, GGUF file or smollm2, the default")
    parser.add_argument("--files", type=common.positive, default=10_000, metavar="N", help="default 10000")
    parser.add_argument("--saves", type=common.positive, default=10, metavar="K", help="default 10")
    parser.add_argument("--sources", type=Path, nargs="+", metavar="DIR", help="where Python files are copied from")
    return parser.parse_args(argv)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The JSON document, by servers on a tree in this folder."""
    tree = folder / "checkout"
    n_files = checkout(tree, args.sources or own_sources(), args.files)
    say(f"{n_files} files in {tree}")
    with serving(args.model, None, folder / "cache") as server:  # what the model's own first start converts is there then
        server.until(lambda: server.answers())
        server.complete(PROMPTS[0])
    with serving(args.model, tree, folder / "cache") as server:
        server.until(lambda: server.answers())
        before = server.state()
        server.complete(PROMPTS[0])
        first_s, while_ = server.seconds(), [before, server.state()]
        say(f"the first completion after {first_s:.1f} s, the store: {while_}")
        during = [server.passes(PROMPTS) for _ in server.until_ready()]
        build_s = server.seconds()
        say(f"drafts from the store after {build_s:.1f} s")
        server.until(lambda: server.state() == "followed")
        after = [server.passes(PROMPTS) for _ in range(max(len(during), 10))]
        saves = [server.save(tree, number) for number in range(args.saves)]
        tokens = server.get("/admin/datastores")["datastores"][0]["tokens"]
    with serving(args.model, tree, folder / "cache") as server:
        server.until(lambda: server.answers())
        for _ in server.until_ready():
            pass
        restart_s = server.seconds()
    return {
        "model": args.model,
        "files": n_files,
        "tokens": tokens,
        "first_completion_s": round(first_s, 2),
        "while": while_,
        "build_s": round(build_s, 1),
        "restart_s": round(restart_s, 2),
        **passes({"building": during, "after": after}),
        "save_s": round(statistics.median(saves), 2),
        "save_s_all": [round(each, 2) for each in saves],
        "settings": {name: getattr(args, name) for name in SETTINGS},
        **common.environment("cpu", os.cpu_count() or 1),
    }


def passes(found: dict[str, list[list[list[float]]]]) -> dict[str, Any]:
    """The document's part about passes: of each phase, round and prompt the seconds of each."""
    ms = {
        phase: [s * 1e3 for texts in rounds for text in texts for s in text[1:]] for phase, rounds in found.items()
    }  # the first: a prompt
    bar = statistics.median(ms["after"]) + HELD_UP_MS
    texts = {phase: [statistics.fmean(map(sum, texts)) * 1e3 for texts in rounds] for phase, rounds in found.items()}
    return {
        "completion_ms": {phase: round(statistics.median(each), 1) if each else None for phase, each in texts.items()},
        "passes": {phase: len(each) for phase, each in ms.items()},
        "longest_pass_ms": {phase: round(max(each), 1) if each else None for phase, each in ms.items()},
        "held_up": {phase: sum(one > bar for one in each) for phase, each in ms.items()},
    }


def own_sources() -> list[Path]:
    return [Path(sysconfig.get_path(name)) for name in ("purelib", "stdlib")]


def checkout(tree: Path, sources: Sequence[Path], most: int) -> int:
    """A git repository of Python files drawn from folders; how many."""
    paths = sorted({path for source in sources for path in source.rglob("*.py") if path.is_file() and not path.is_symlink()})
    random.Random(0).shuffle(paths)
    chosen = paths[:most]
    for path in chosen:
        target = tree.joinpath(*path.parts[1:][-4:])
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false", "-C", str(tree)]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *command], check=True, stdout=subprocess.DEVNULL)
    return sum(1 for _ in tree.rglob("*.py"))


class Server:
    """A server under test, by HTTP."""

    def __init__(self, url: str, started: float) -> None:
        self.url, self.started = url, started

    def seconds(self) -> float:
        """Since its process was started."""
        return time.perf_counter() - self.started

    def get(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def answers(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.get("/health"))
        return False

    def state(self) -> str:
        (tree,) = self.get("/admin/repositories")["repositories"]
        return str(tree["stores"][0]["state"]) if tree["stores"] else "waiting"

    def ready(self) -> bool:
        (tree,) = self.get("/admin/repositories")["repositories"]
        return bool(tree["stores"]) and tree["stores"][0]["ready"]

    def until(self, what: Any) -> None:
        deadline = time.monotonic() + WAIT_S
        while not what():
            if time.monotonic() > deadline:
                raise SystemExit("the server took too long")
            time.sleep(0.02)

    def until_ready(self) -> Iterator[None]:
        """Until drafts come from the store: once each look that finds that they do not."""
        deadline = time.monotonic() + WAIT_S
        while not self.ready():
            if time.monotonic() > deadline:
                raise SystemExit("the store was not built in time")
            yield
            time.sleep(PAUSE_S)

    def complete(self, prompt: str, n: int = 24, **more: Any) -> Any:
        body = {"prompt": prompt, "max_tokens": n, "temperature": 0, "return_sources": True}
        return self.get("/v1/completions", body | more)

    def passes(self, prompts: Sequence[str], n: int = 24) -> list[list[float]]:
        """Seconds from each token to the next, from the request on, for each prompt; without drafts a token is a pass."""
        found = []
        for prompt in prompts:
            body = {"prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True, "stream": True}
            data = json.dumps(body | {"datastore": [], "speculation": False}).encode()
            request = urllib.request.Request(self.url + "/v1/completions", data, {"Content-Type": "application/json"})
            times = [time.perf_counter()]
            with urllib.request.urlopen(request, timeout=300) as events:
                times += [time.perf_counter() for event in events if event.startswith(b"data: {")]
            found.append([after - before for before, after in itertools.pairwise(times)])
        return found

    def save(self, tree: Path, number: int) -> float:
        """Seconds from a saved function to a completion with a token of it."""
        files = sorted(tree.rglob("*.py"))
        later = files[number * len(files) // 97 % len(files) :]
        file = next(each for each in later if file_filters.content_reason(each.read_bytes(), code=True) is None)  # no generated one
        line = f"\nquorvix_{number}_{os.getpid()} = [{', '.join(map(str, range(30 + number, 50 + number)))}]\n"
        with file.open("a", encoding="utf-8") as out:
            out.write(line)
        saved = time.perf_counter()
        prompt = line[: line.index(f", {32 + number},") + 1]  # a model writes the next numbers, whatever is drafted
        deadline = saved + 120
        while time.perf_counter() < deadline:
            tokens = self.complete(prompt, 8)["choices"][0]["ngramspec"]["tokens"]
            if any(str(file) in (token["source"] or "") for token in tokens):
                took = time.perf_counter() - saved
                say(f"saved line {number}: drafted from after {took:.2f} s")
                return took
            time.sleep(0.05)
        raise SystemExit(f"what was saved in {file} was never drafted from: {tokens}")


def forward(lines: Iterable[str]) -> None:
    """What the log says of the tree."""
    for line in lines:
        if line.startswith("{") and (facts := json.loads(line)).get("event") == "repository":
            say(facts["message"])


@contextlib.contextmanager
def serving(model: str, tree: Path | None, cache: Path) -> Iterator[Server]:
    """`ngramspec serve`, with a tree or without, as a process of its own."""
    command = [sys.executable, "-m", "ngramspec", "serve", "--model", model, "--port", "0", "--log-format", "json"]
    command += ["--answers", "0", "--no-similar"]  # so that the tokens of a saved line have no other source
    command += [] if tree is None else ["--repo", str(tree), "--admin-on-loopback"]
    stores = {"NGRAMSPEC_CACHE": str(cache)}
    started = time.perf_counter()
    with subprocess.Popen(command, env=os.environ | stores, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("{") and "url" in (facts := json.loads(line)):
                break
            sys.stderr.write(line)
        else:
            raise SystemExit("the server did not start")
        reader = threading.Thread(target=forward, args=(process.stderr,), daemon=True)
        reader.start()
        try:
            yield Server(facts["url"], started)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            reader.join(60)


if __name__ == "__main__":
    main()
