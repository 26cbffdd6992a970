"""How soon `ngramspec serve --repo` answers on a fresh checkout, and how soon it drafts from a line that was just saved.

A git repository of N Python files is made (by default of this interpreter's own library and packages), and `serve --repo` is started on it
with no store in the cache. Short completions are asked for, one a second, until the store is there. Then K times a line that begins with a
name that is nowhere else is saved in a file of the tree, and a completion of its first half is asked for every 50 ms until a token was
drafted from that file. Figures of the JSON document:

first_completion_s  from the start of the process to the first answer; `while`: the store's state before and after it
build_s             from the same start until drafts come from the store
completion_ms       median time of 24 tokens without drafts while it was built and after, which is what the build takes from passes
longest_pass_ms     the greatest time from one of these tokens to the next
held_up             how many of them took 50 ms more than the median after the build, of `passes`
save_s              from the end of the write to the end of the first answer with a token from the saved file; `save_s_all`: each of them
restart_s           a second start with the cache as it is, until drafts come from the store
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import shutil
import statistics
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import print_progress
from benchmarks.server_process import ServerProcess, open_url, serve
from ngramspec.backends.cpu.cores import count_cores
from ngramspec.datastore import file_filters

PROMPTS = ("import os\nimport sys\n\ndef main(", "class Node:\n    def __init__(self", "def test_", "with open(path) as file:\n    ")
N_TOKENS = 24  # of a completion
PAUSE_S = 1.0  # between completions while the store is built: somebody types
HELD_UP_MS = 50
WAIT_S = 3600  # for a build
SAVE_WAIT_S = 120
# Tokens of a saved line have no other source: neither earlier answers nor similar files.
OPTIONS: dict[str, Any] = {"answers": 0, "no_similar": True}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--files", type=common.parse_positive, default=10_000, metavar="N", help="repo: files of the checkout (10000)")
    parser.add_argument("--saves", type=common.parse_positive, default=10, metavar="K", help="repo: saved lines (10)")
    parser.add_argument("--sources", type=Path, nargs="+", metavar="DIR", help="repo: where Python files are copied from")


def run_repo(args: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON document."""
    model = args.model or "smollm2"
    with tempfile.TemporaryDirectory(prefix="ngramspec-repo-") as folder:
        tree, environment = Path(folder) / "checkout", {"NGRAMSPEC_CACHE": str(Path(folder) / "cache")}
        n_files = make_checkout(tree, args.sources or [Path(sysconfig.get_path(name)) for name in ("purelib", "stdlib")], args.files)
        print_progress(f"{n_files} files in {tree}")
        with serve(model, environment, **OPTIONS) as process:  # what the model's own first start converts is there then
            complete(process, PROMPTS[0])
        on_tree = {**OPTIONS, "repo": tree, "admin_on_loopback": True}
        with serve(model, environment, **on_tree) as process:
            before = read_store(process)["state"]
            complete(process, PROMPTS[0])
            first_s, states = process.age_s, [before, read_store(process)["state"]]
            print_progress(f"the first completion after {first_s:.1f} s, the store: {states}")
            during = [time_passes(process, PROMPTS) for _ in wait_for_store(process, lambda store: store["ready"], PAUSE_S)]
            build_s = process.age_s
            print_progress(f"drafts from the store after {build_s:.1f} s")
            for _ in wait_for_store(process, lambda store: store["state"] == "followed", 0.02):
                pass
            after = [time_passes(process, PROMPTS) for _ in range(max(len(during), 10))]
            saves = [save_line(process, tree, number) for number in range(args.saves)]
            n_tokens = process.call("/admin/datastores")["datastores"][0]["tokens"]
        with serve(model, environment, **on_tree) as process:
            for _ in wait_for_store(process, lambda store: store["ready"], 0.02):
                pass
            restart_s = process.age_s
    document = {
        "model": model,
        "files": n_files,
        "tokens": n_tokens,
        "first_completion_s": round(first_s, 2),
        "while": states,
        "build_s": round(build_s, 1),
        "restart_s": round(restart_s, 2),
        **summarise_passes({"building": during, "after": after}),
        "save_s": round(statistics.median(saves), 2),
        "save_s_all": [round(each, 2) for each in saves],
        "settings": {"files": args.files, "saves": args.saves},
        **common.describe_machine("cpu", count_cores()),
    }
    columns = ["files", "tokens", "first_completion_s", "build_s", "restart_s", "save_s"]
    common.print_table(columns, [[document[name] for name in columns]])
    return document


def make_checkout(tree: Path, sources: Sequence[Path], most: int) -> int:
    """Make a git repository of Python files drawn from folders. Return how many it has."""
    paths = sorted({path for source in sources for path in source.rglob("*.py") if path.is_file() and not path.is_symlink()})
    random.Random(0).shuffle(paths)
    for path in paths[:most]:
        target = tree.joinpath(*path.parts[1:][-4:])
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false", "-C", str(tree)]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *command], check=True, stdout=subprocess.DEVNULL)
    return sum(1 for _ in tree.rglob("*.py"))


def summarise_passes(found: dict[str, list[list[list[float]]]]) -> dict[str, Any]:
    """Return the document's part about passes, from the seconds of each pass by phase, round and prompt."""
    # The first pass of a text is a prompt's.
    ms = {phase: [s * 1e3 for texts in rounds for text in texts for s in text[1:]] for phase, rounds in found.items()}
    bar = statistics.median(ms["after"]) + HELD_UP_MS
    texts = {phase: [statistics.fmean(map(sum, texts)) * 1e3 for texts in rounds] for phase, rounds in found.items()}
    return {
        "completion_ms": {phase: round(statistics.median(each), 1) if each else None for phase, each in texts.items()},
        "passes": {phase: len(each) for phase, each in ms.items()},
        "longest_pass_ms": {phase: round(max(each), 1) if each else None for phase, each in ms.items()},
        "held_up": {phase: sum(one > bar for one in each) for phase, each in ms.items()},
    }


def read_store(process: ServerProcess) -> dict[str, Any]:
    """Return `state` and `ready` of the tree's store."""
    (tree,) = process.call("/admin/repositories")["repositories"]
    return tree["stores"][0] if tree["stores"] else {"state": "waiting", "ready": False}


def wait_for_store(process: ServerProcess, is_there: Callable[[dict[str, Any]], bool], pause_s: float) -> Iterator[None]:
    """Yield once for each look that finds that the store is not yet so. Raises SystemExit after WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while not is_there(read_store(process)):
        if time.monotonic() > deadline:
            raise SystemExit("the store was not built in time")
        yield
        time.sleep(pause_s)


def complete(process: ServerProcess, prompt: str, n: int = N_TOKENS) -> Any:
    return process.call("/v1/completions", {"prompt": prompt, "max_tokens": n, "temperature": 0, "return_sources": True})


def time_passes(process: ServerProcess, prompts: Sequence[str]) -> list[list[float]]:
    """Return the seconds from each token to the next, from the request on, for each prompt; without drafts a token is a pass."""
    found = []
    for prompt in prompts:
        body = {"prompt": prompt, "max_tokens": N_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        times = [time.perf_counter()]
        with contextlib.closing(open_url(process.address, "/v1/completions", body | {"datastore": [], "speculation": False})) as events:
            times += [time.perf_counter() for event in events if event.startswith(b"data: {")]
        found.append([after - before for before, after in itertools.pairwise(times)])
    return found


def save_line(process: ServerProcess, tree: Path, number: int) -> float:
    """Save a line and return the seconds until a completion has a token of it. Raises SystemExit if none has in time."""
    files = sorted(tree.rglob("*.py"))
    later = files[number * len(files) // 97 % len(files) :]
    file = next(each for each in later if file_filters.find_content_reason(each.read_bytes(), code=True) is None)  # no generated one
    line = f"\nquorvix_{number}_{os.getpid()} = [{', '.join(map(str, range(30 + number, 50 + number)))}]\n"
    with file.open("a", encoding="utf-8") as out:
        out.write(line)
    saved = time.perf_counter()
    prompt = line[: line.index(f", {32 + number},") + 1]  # a model writes the next numbers, whatever is drafted
    while time.perf_counter() < saved + SAVE_WAIT_S:
        tokens = complete(process, prompt, 8)["choices"][0]["ngramspec"]["tokens"]
        if any(str(file) in (token["source"] or "") for token in tokens):
            took = time.perf_counter() - saved
            print_progress(f"saved line {number}: drafted from after {took:.2f} s")
            return took
        time.sleep(0.05)
    raise SystemExit(f"what was saved in {file} was never drafted from: {tokens}")
