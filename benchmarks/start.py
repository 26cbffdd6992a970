"""How long until the first token, and in how much memory?

    python -m benchmarks.start --model M [--threads N] [--precision auto|int8|float32] [--repeat N]
        [--against llama [--llama-python PATH] [--llama-gguf F]]

A fresh process opens the model as `ngramspec complete` does and completes a short text: the seconds from the process's start to its first
token, its peak and steady memory some tokens later. The first start finds an empty cache folder (ngramspec's; what numba compiled lies
beside the package), those after it what that one left; with the latter, llama.cpp starts in turns. A start of each that does not count
comes before all, so that the file is in the system's cache and code is compiled. Progress goes to standard error, a table and a last line
of JSON to standard output.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ngramspec
from benchmarks import common
from benchmarks.our_engine import find_gguf_files
from benchmarks.peers import Peer, PeerAbsentError, add_llama_options, open_llama_passes

TEXT = "def fibonacci(n):\n"
N_MORE = 32  # tokens after the first one, before memory is looked at
LLAMA_CONTEXT = 2048  # tokens that llama.cpp makes room for, all of them at its start


@dataclass(frozen=True, slots=True)
class Start:
    """Figures of one process."""

    seconds: float
    """Time to its first token."""
    peak_bytes: int | None
    rss_bytes: int | None
    """Memory at most, and after the last token; None if the system has no /proc."""
    more: dict[str, Any]
    """The worker's last answer: see `_peer_worker`."""


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="ngramspec-cache-") as cache:
        try:
            document = measure(args, cache)
        except PeerAbsentError as error:
            raise SystemExit(str(error)) from error
    print_figures(document)
    common.print_document(document)


def measure(args: argparse.Namespace, cache: str) -> dict[str, Any]:
    """Return the JSON document. Raises PeerAbsentError for a process of ours that did not start, SystemExit for llama.cpp's."""
    contenders: dict[str, Callable[[], Start]] = {"ours": partial(time_start, partial(open_ours, args, {"NGRAMSPEC_CACHE": cache}))}
    if args.against:
        gguf = next(iter(find_gguf_files(args.model)), None)
        contenders["llama"] = partial(time_start, partial(open_llama_passes, args, gguf, LLAMA_CONTEXT))
        contenders["llama"]()
    time_start(partial(open_ours, args, {}))
    first = contenders["ours"]()
    common.print_progress(f"first start: {first.seconds:.2f} s")
    starts = common.run_in_turns(contenders, args.repeat, warm_up=0)
    last = starts["ours"][-1]
    props = last.more["props"]
    return {
        "model": args.model,
        "start_s": round(statistics.median(each.seconds for each in starts["ours"]), 3),
        "first_start_s": round(first.seconds, 3),
        "peak_bytes": find_most(starts["ours"], "peak_bytes"),
        "rss_bytes": find_most(starts["ours"], "rss_bytes"),
        "first_peak_bytes": first.peak_bytes,
        "file_bytes": count_file_bytes(args.model),
        "kv_bytes": last.more["kv_bytes"],
        "llama_start_s": round(statistics.median(each.seconds for each in starts["llama"]), 3) if args.against else None,
        "llama_peak_bytes": find_most(starts["llama"], "peak_bytes") if args.against else None,
        "llama_rss_bytes": find_most(starts["llama"], "rss_bytes") if args.against else None,
        "settings": {name: getattr(args, name) for name in ("repeat", "precision", "against")} | {"tokens": 1 + N_MORE},
        **{name: props.get(name) for name in ("exactness", "dtype", "precision")},
        **common.describe_machine(args.device, props["threads"]),
    }


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.make_parser("start", __doc__)
    common.add_model_options(parser)
    parser.add_argument("--repeat", type=common.parse_positive, default=5, metavar="N", help="starts of each")
    add_llama_options(parser)
    args = parser.parse_args(argv)
    args.dtype = common.settle_dtype(args.device, args.dtype)
    return args


def open_ours(args: argparse.Namespace, environment: dict[str, str]) -> Peer:
    """Open the engine in a process of its own, with the same code as here."""
    path = [str(Path(ngramspec.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return Peer(
        Path(sys.executable), "ours", args.model, common.get_engine_options(args), environment | {"PYTHONPATH": os.pathsep.join(path)}
    )


def time_start(open_process: Callable[[], Peer]) -> Start:
    """Start one process, and end it. Raises PeerAbsentError."""
    began = time.perf_counter()
    with contextlib.closing(open_process()) as peer:
        peer.ask(text=TEXT)
        seconds = time.perf_counter() - began
        more = peer.ask(more=N_MORE)
        return Start(seconds, *read_memory(peer.process.pid), more)


def read_memory(pid: int) -> tuple[int | None, int | None]:
    """Return the bytes that a process had at most, and has, in memory."""
    status = Path(f"/proc/{pid}/status")
    text = status.read_text() if status.exists() else ""
    peak, rss = (re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE) for name in ("VmHWM", "VmRSS"))
    return peak and int(peak[1]) << 10, rss and int(rss[1]) << 10


def find_most(starts: list[Start], name: str) -> int | None:
    return max((value for each in starts if (value := getattr(each, name)) is not None), default=None)


def count_file_bytes(model: str) -> int | None:
    """Return the size of the files that the weights come from; None if they come from none that lies here."""
    files = find_gguf_files(model) or [*Path(model).glob("*.safetensors")]
    return sum(path.stat().st_size for path in files) or None


def print_figures(document: dict[str, Any]) -> None:
    def make_row(name: str, seconds: str, peak: str, rss: str) -> list[Any]:
        sizes = [document.get(peak), document.get(rss)]
        return [name, document[seconds], *(None if size is None else size / 1e6 for size in sizes)]

    rows = [
        make_row("start", "start_s", "peak_bytes", "rss_bytes"),
        make_row("first start", "first_start_s", "first_peak_bytes", ""),
    ]
    if document["llama_start_s"] is not None:
        rows.append(make_row("llama.cpp", "llama_start_s", "llama_peak_bytes", "llama_rss_bytes"))
    common.print_table(["", "to the first token, s", "peak MB", "steady MB"], rows)
    size, kv = document["file_bytes"], document["kv_bytes"]
    print(f"file: {'–' if size is None else f'{size / 1e6:.0f} MB'}; keys and values in use: {kv / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
