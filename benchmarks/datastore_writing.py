"""Build, update, crash: the subcommands of `benchmarks.datastore` that write.

    python -m benchmarks.datastore build [--paths P...] [--megabytes 110] [--model M] [--repeat N]
    python -m benchmarks.datastore update [--paths P...] [--files 10000] [--changed 10] [--model M] [--repeat N]
    python -m benchmarks.datastore crash [--moments 200]

The text is Python, by default that of the installed packages. `build` compares building with tokenizing alone (the tokenizer's own
call on texts in memory) and sorting alone (of the tokens of one segment), in turns. `update` changes files of a store and brings it up to
date in this process, by the command, and by a watcher, whose time runs from the save until an open reader has the new generation.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks import common
from benchmarks.common import print_progress
from ngramspec.datastore import Datastore, corpus, segment_writer
from ngramspec.datastore.build import BATCH_CHARS, build, read_corpus
from ngramspec.datastore.format import compute_suffix_width, get_separator
from ngramspec.datastore.recorder import Recorder
from ngramspec.datastore.suffix_array import sort_suffixes
from ngramspec.datastore.tokens import Encoder
from ngramspec.datastore.update import update
from ngramspec.datastore.watch import watch
from ngramspec.models.loader import load_tokenizer

PYTHON = corpus.CorpusOptions(languages=("python",))


def add_commands(commands: Any) -> None:
    """Add the subcommands to an argparse parser's."""
    for name, run in (("build", run_build), ("update", run_update), ("crash", run_crash)):
        command = commands.add_parser(name, help=(run.__doc__ or "").split("\n")[0])
        command.set_defaults(run=run, store=Path())
        if name == "crash":
            command.add_argument("--moments", type=common.parse_positive, default=200, metavar="N")
            command.add_argument("--seed", type=int, default=0)
            continue
        command.add_argument("--model", default="smollm2", help="whose tokenizer is used")
        command.add_argument("--paths", type=Path, nargs="+", default=[Path(sysconfig.get_paths()["purelib"])], help="where the text is")
        command.add_argument("--repeat", type=common.parse_positive, default=1 if name == "build" else 5, metavar="N")
        if name == "build":
            command.add_argument("--megabytes", type=common.parse_positive, default=110, metavar="N", help="of text")
        else:
            command.add_argument(
                "--files", type=common.parse_positive, default=10_000, metavar="N", help="of the store, the smallest there are"
            )
            command.add_argument("--changed", type=common.parse_positive, default=10, metavar="N", help="files changed each time")


def run_build(args: argparse.Namespace) -> dict[str, Any]:
    """Measure how long building takes, against tokenizing and sorting alone."""
    tokenizer = load_tokenizer(args.model).backend_tokenizer
    with tempfile.TemporaryDirectory() as folder:
        n_files = write_corpus(Path(folder) / "corpus", args.paths, megabytes=args.megabytes)
        documents = read_python([Path(folder) / "corpus"])
        mb = sum(document.size for document in documents) / 1e6
        encoder = Encoder(tokenizer, args.model)
        tokens = np.concatenate(
            [encoder.encode([d.text for d in batch])[0] for batch in segment_writer.batch_documents(documents, BATCH_CHARS)]
        )
        tokens = np.concatenate([np.array([get_separator(tokens.itemsize)], tokens.dtype), tokens])
        last: dict[str, Any] = {}

        def build_store() -> None:
            with peak_memory(last):
                last["summary"] = build([Path(folder) / "corpus"], Path(folder) / "store", tokenizer, args.model, options=PYTHON)

        works = {
            "tokenizing": lambda: tokenize_alone(tokenizer, documents),
            "sorting": lambda: sort_suffixes(tokens, compute_suffix_width(len(tokens))),
            "build": build_store,
        }
        times = common.run_in_turns({name: partial(common.time_ms, work) for name, work in works.items()}, args.repeat, warm_up=0)
    seconds = {name: statistics.median(values) / 1e3 for name, values in times.items()}
    ratio = seconds["build"] / (seconds["tokenizing"] + seconds["sorting"])
    summary = last["summary"]
    rows = [[name, value, mb / value] for name, value in seconds.items()]
    common.print_table(["", "seconds", "MB/s"], rows)
    print(f"build / (tokenizing + sorting) = {ratio:.3f}; {summary.bytes / summary.tokens:.2f} bytes per token, peak {last['peak_mb']} MB")
    return {
        "mb": round(mb, 2),
        "files": n_files,
        "documents": len(documents),
        "tokens": summary.tokens,
        "segments": summary.segments,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "stages": summary.as_json()["seconds"],
        "mb_s": round(mb / seconds["build"], 3),
        "ratio": round(ratio, 4),
        "bytes_per_token": round(summary.bytes / summary.tokens, 4),
        "peak_mb": last["peak_mb"],
        "settings": {"model": args.model, "repeat": args.repeat},
    }


def run_update(args: argparse.Namespace) -> dict[str, Any]:
    """Measure how long after a change the store has seen it."""
    tokenizer = load_tokenizer(args.model).backend_tokenizer
    with tempfile.TemporaryDirectory() as folder:
        home, store = Path(folder) / "corpus", Path(folder) / "store"
        n_files = write_corpus(home, args.paths, files=args.files)
        started = time.perf_counter()
        summary = build([home], store, tokenizer, args.model, options=PYTHON)
        built = time.perf_counter() - started
        print_progress(f"{n_files} files, {summary.files} documents, {summary.tokens} tokens: {built:.1f} s")
        files = sorted(home.rglob("*.py"))
        edits = itertools.count()

        def change_files() -> None:
            for n in range(args.changed):
                with files[(next(edits) * 7919 + n) % len(files)].open("a") as file:
                    file.write(f"\nEDIT_{next(edits)} = {n}\n")

        def time_update() -> float:
            change_files()
            started = time.perf_counter()
            done = update(store)
            seconds = time.perf_counter() - started
            if done.added != args.changed:
                raise SystemExit(f"{args.changed} files changed, the update saw {done.added}")
            return seconds

        here = [time_update() for _ in range(args.repeat)]
        merged = Datastore.open(store).info()["segments"]
        change_files()
        command = [sys.executable, "-m", "ngramspec", "build-datastore", "-u", "-q", "-o", store]
        by_command = common.time_ms(lambda: subprocess.run(command, check=True)) / 1e3
        refreshes = watch_latencies(store, tokenizer, args.model, files, args.repeat)
    rows = [["update", statistics.median(here), max(here)], ["by the command", by_command, by_command]]
    rows.append(["from saving a file to a reader that has it", statistics.median(refreshes), max(refreshes)])
    common.print_table(["", "median s", "max s"], rows)
    return {
        "files": n_files,
        "documents": summary.files,
        "tokens": summary.tokens,
        "changed": args.changed,
        "update_s": round(statistics.median(here), 4),
        "update_max_s": round(max(here), 4),
        "command_s": round(by_command, 3),
        "watch_s": round(statistics.median(refreshes), 4),
        "watch_max_s": round(max(refreshes), 4),
        "build_s": round(built, 2),
        "segments": merged,
        "settings": {"model": args.model, "repeat": args.repeat},
    }


def run_crash(args: argparse.Namespace) -> dict[str, Any]:
    """Does a store survive kill -9 of its writer?"""
    command = [sys.executable, "-m", "tools.store_crash", "--moments", str(args.moments), "--seed", str(args.seed)]
    # a process of its own: it forks, and this one has threads
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    *table, last = done.stdout.splitlines()
    print("\n".join(table))
    if done.returncode:
        raise SystemExit(last)
    document: dict[str, Any] = json.loads(last)
    return document


def read_python(paths: list[Path]) -> list[corpus.Document]:
    """Return the documents that a build would take from these folders."""
    recorder = Recorder()
    return list(read_corpus(corpus.find_files(corpus.resolve_sources(paths), PYTHON, recorder.skipped), PYTHON, recorder))


def write_corpus(home: Path, paths: list[Path], *, megabytes: int | None = None, files: int | None = None) -> int:
    """Copy documents into a folder: evenly spaced ones until they have these megabytes, or the smallest ones -> how many."""
    found = read_python(paths)
    if files is not None:
        chosen = sorted(found, key=lambda document: len(document.text))[:files]
    else:
        share = min(1.0, (megabytes or 1) * 1e6 / sum(document.size for document in found))
        chosen = [d for n, d in enumerate(found) if int((n + 1) * share) > int(n * share)]
    for n, document in enumerate(chosen):
        path = home / f"{n % 100:02}" / f"{n}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(document.text.encode())
    return len(chosen)


def tokenize_alone(tokenizer: Tokenizer, documents: list[corpus.Document]) -> None:
    """Run the tokenizer's own call over all texts, in batches of a megabyte, and do nothing with what it returns."""
    for batch in segment_writer.batch_documents(documents, 1 << 20):
        tokenizer.encode_batch_fast([document.text for document in batch], add_special_tokens=False)


def watch_latencies(store: Path, tokenizer: Tokenizer, name: str, files: list[Path], repeat: int) -> list[float]:
    """Return seconds from the end of a save to a reader's having the generation with it."""
    stop, ready = threading.Event(), threading.Event()
    watcher = threading.Thread(target=watch, args=(store, tokenizer, name), kwargs={"stop": stop, "on_ready": lambda sources: ready.set()})
    watcher.start()
    seconds = []
    try:
        if not ready.wait(60):
            raise SystemExit("the watcher did not begin")
        reader = Datastore.open(store)
        for n in range(repeat):
            with files[n * 31 % len(files)].open("a") as file:
                file.write(f"\nSAVED_{n} = {time.time_ns()}\n")
            started = time.perf_counter()
            while not reader.refresh():
                if time.perf_counter() - started > 30:
                    raise SystemExit("a saved file was not seen within 30 s")
                time.sleep(0.005)
            seconds.append(time.perf_counter() - started)
    finally:
        stop.set()
        watcher.join()
    return seconds


@contextlib.contextmanager
def peak_memory(out: dict[str, Any]) -> Iterator[None]:
    """Return the process's largest resident memory meanwhile, out["peak_mb"]; its largest ever where the system does not forget."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    yield
    out["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    with contextlib.suppress(OSError):
        if match := re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text()):
            out["peak_mb"] = int(match[1]) >> 10
