"""Build, open, look up, update: what a datastore costs.

    python -m benchmarks.datastore open|lookup|size [--store STORE] [--corpus FILE.npz] [--tokens 50000000] [--model M] [--repeat N]

`--corpus` holds tokens [n], document offsets [n_docs + 1] and line ends per token id; where there is no such file it is made of the Python
files of the installed packages, with M's tokenizer, and kept. A store of the first `tokens` of it is measured, made if STORE has none;
what is left of the corpus is text that the store does not have, and look-ups are made with that. The page cache is warm. A table and a
last line of JSON go to standard output, progress to standard error.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numba import carray, njit

from benchmarks import common, datastore_writing
from ngramspec.datastore import format as layout
from ngramspec.datastore import manifest as manifests
from ngramspec.datastore import segment_writer
from ngramspec.datastore.errors import DatastoreNotFoundError
from ngramspec.datastore.lookup import Matcher, propose_batch
from ngramspec.datastore.lookup_arrays import NODES, OCCURRENCES, OUT_PARENTS, OUT_START, OUT_TOKENS
from ngramspec.datastore.numba_intrinsics import cast_to_pointer
from ngramspec.datastore.reader import Datastore

BATCH, MAX_MATCH, STEPS = 64, 64, 32
# Tokens that a sequence may need: its first context and the most it can be ahead after STEPS.
MIN_DOCUMENT = 64 + 24 * STEPS


@dataclass(frozen=True, eq=False)
class Corpus:
    tokens: np.ndarray  # u16|u32 [n], documents one after the other
    offsets: np.ndarray  # [n_docs + 1] int64
    line_ends: np.ndarray  # u8 [vocab_size]


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    with ExitStack() as stack:
        if args.store is None:
            args.store = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "store"
        document = args.run(args)
    common.print_document({"program": f"datastore {args.command}", **document, **common.describe_machine("cpu", 1)})


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.make_parser("datastore", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run in COMMANDS.items():
        command = commands.add_parser(name, help=(run.__doc__ or "").split("\n")[0])
        command.set_defaults(run=run)
        command.add_argument("--store", type=Path, help="made where there is none; default a temporary one")
        command.add_argument("--corpus", type=Path, default=Path("corpus.npz"), metavar="FILE.npz", help="made where there is none")
        command.add_argument("--tokens", type=common.parse_positive, default=50_000_000, metavar="N", help="of the store")
        command.add_argument("--model", default="smollm2", help="whose tokenizer makes the corpus")
        command.add_argument("--repeat", type=common.parse_positive, default=25, metavar="N")
    datastore_writing.add_commands(commands)
    return parser.parse_args(argv)


# ---- the subcommands: args enter, the JSON document leaves


def run_open(args: argparse.Namespace) -> dict[str, Any]:
    """Measure how long opening takes, in milliseconds."""
    ensure_store(args)
    store = Datastore.open(args.store)
    code = (
        "import sys; from benchmarks.common import time_ms; from ngramspec.datastore.reader import Datastore; "
        "print(time_ms(lambda: Datastore.open(sys.argv[1])))"
    )
    times = {
        "mapped": [common.time_ms(lambda: Datastore.open(args.store)) for _ in range(args.repeat)],
        "copied": [common.time_ms(lambda: Datastore.open(args.store, copy=True)) for _ in range(3)],
        "refresh": [common.time_ms(Datastore.open(args.store).refresh) for _ in range(args.repeat)],
        "mapped, first of a process": [float(subprocess.check_output([sys.executable, "-c", code, args.store])) for _ in range(3)],
    }
    rows = [[name, statistics.median(t), max(t)] for name, t in times.items()]
    common.print_table(["open", "median ms", "max ms"], rows)
    figures = {f"{name}_ms": round(median, 4) for name, median, _ in rows[:3]}
    return {"tokens": store.n_tokens, **figures, "first_of_a_process_ms": round(rows[3][1], 3)}


def run_lookup(args: argparse.Namespace) -> dict[str, Any]:
    """Measure how long a look-up with its tree takes, in µs per sequence."""
    corpus = ensure_store(args)
    store = Datastore.open(args.store)
    for segment in store.snapshot.segments:
        segment.data[::4096].sum()
    in_store = documents_in_store(corpus, args.tokens)
    if store.n_tokens != (expected := int(corpus.offsets[in_store]) + in_store + 1):  # a separator before all and after each
        raise SystemExit(
            f"{args.store} has {store.n_tokens:,} tokens; a store of the first {args.tokens:,} of {args.corpus} would have {expected:,}. "
            "lookup needs the --corpus and --tokens that the store was made with"
        )
    report: dict[str, Any] = {"tokens": store.n_tokens, "segments": len(store.snapshot.segments), "batch": BATCH}
    table = []
    for text, first, last in (("not in the store", in_store, len(corpus.offsets) - 1), ("in the store", 0, in_store)):
        for mode in ("anew", "following"):
            figures = measure_lookups(store, corpus, first, last, mode == "following", args.repeat)
            report[f"{text.replace(' ', '_')}_{mode}"] = figures
            table.append([f"text {text}, {mode}", *figures.values()])
    header = ["µs per sequence", f"B={BATCH} p50", "p99", "cpu p50", "p99", "one p50", "p99", "call B=1", "propose B=1", "nodes"]
    common.print_table([*header, "tokens right"], table)
    work = Matcher([store.snapshot], 1).work
    return {**report, "settings": {"max_match": MAX_MATCH, "nodes": int(work[NODES]), "occurrences": int(work[OCCURRENCES])}}


def run_size(args: argparse.Namespace) -> dict[str, Any]:
    """Measure how many bytes a token takes on disk."""
    ensure_store(args)
    store = Datastore.open(args.store)
    sections = dict.fromkeys(layout.SECTIONS, 0)
    for segment in store.snapshot.segments:
        for name, section in segment.header.sections.items():
            sections[name] += section.n_bytes
    on_disk = sum(path.stat().st_size for path in args.store.iterdir())
    rows = [[name, n, n / store.n_tokens] for name, n in sections.items()]
    common.print_table(["section", "bytes", "per token"], [*rows, ["all files", on_disk, on_disk / store.n_tokens]])
    figures = {name: round(n / store.n_tokens, 4) for name, n in sections.items()}
    vocab_size = store.snapshot.manifest.vocab_size
    return {"tokens": store.n_tokens, "vocab_size": vocab_size, "bytes_per_token": round(on_disk / store.n_tokens, 4), "sections": figures}


COMMANDS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"open": run_open, "lookup": run_lookup, "size": run_size}


# ---- measuring


def measure_lookups(store: Datastore, corpus: Corpus, first: int, last: int, follow: bool, repeat: int) -> dict[str, float]:
    """Return microseconds per sequence: of a batch's share, of one sequence in compiled code, and of calls from Python with one sequence.

    Sequences begin in documents first..last-1. Following is what decoding does: each step appends what the tree got right, and one more.
    Otherwise every context is of another place. A batch and single sequences never see the same context. CPU time tells a slow look-up
    from one that other programs interrupted.
    """
    rng = np.random.default_rng(0)
    found: dict[str, list[float]] = defaultdict(list)
    slots = np.arange(BATCH, dtype=np.int32)
    for n in range(repeat + 1):
        if n == 1:  # the first round compiles and warms
            found.clear()
        groups = {name: Group(store, corpus, first, last, rng) for name in ("batch", "alone", "call", "propose")}
        for _ in range(STEPS if follow else 1):
            for name, group in groups.items():
                contexts, fresh, matcher = group.make_contexts(), group.fresh, group.matcher
                if name == "batch":
                    busy_start, start = time.thread_time(), time.perf_counter()
                    made = propose_batch(matcher.work, slots, contexts, fresh)
                    found["batch"].append((time.perf_counter() - start) / BATCH * 1e6)
                    found["batch_cpu"].append((time.thread_time() - busy_start) / BATCH * 1e6)
                    found["nodes"].append(made / BATCH)
                elif name == "alone":
                    ns = np.zeros(BATCH, np.int64)
                    time_alone(matcher.work, contexts, fresh, ns)
                    found["alone"] += (ns / 1e3).tolist()
                else:
                    call = matcher.propose if name == "propose" else partial(propose_batch, matcher.work)
                    for b in range(8):
                        some = (slots[b : b + 1], contexts[b : b + 1], fresh[b : b + 1])
                        found[name].append(common.time_ms(lambda call=call, some=some: call(*some)) * 1e3)
                appended = group.append_accepted(name == "batch")
                if name == "batch":
                    found["right"].append(appended.mean() - 1)
    figures = {
        f"{name}_us_p{p}": round(float(np.percentile(found[name], p)), 2) for name in ("batch", "batch_cpu", "alone") for p in (50, 99)
    }
    figures |= {f"{name}_us_p50": round(statistics.median(found[name]), 2) for name in ("call", "propose")}
    return {**figures, "nodes": round(statistics.mean(found["nodes"]), 1), "tokens_right": round(statistics.mean(found["right"]), 3)}


class Group:
    """BATCH sequences somewhere in the corpus, and the matcher that follows them."""

    def __init__(self, store: Datastore, corpus: Corpus, first: int, last: int, rng: np.random.Generator):
        self.tokens = corpus.tokens
        long = first + np.flatnonzero(np.diff(corpus.offsets[first : last + 1]) > 2 * MIN_DOCUMENT)
        chosen = rng.choice(long, BATCH)
        spare = corpus.offsets[chosen + 1] - corpus.offsets[chosen] - MIN_DOCUMENT
        self.places = corpus.offsets[chosen] + 64 + (rng.random(BATCH) * spare).astype(np.int64)
        self.fresh = np.full(BATCH, -1, np.int32)
        self.matcher = Matcher([store.snapshot], BATCH, max_match=MAX_MATCH)

    def make_contexts(self) -> np.ndarray:
        """Return the last tokens of each sequence [BATCH, MAX_MATCH] int32, newest first."""
        back = self.places[:, None] - 1 - np.arange(MAX_MATCH)
        return self.tokens[back].astype(np.int32)

    def append_accepted(self, drafted: bool) -> np.ndarray:
        """Append what a tree of the batch got right and one more token; groups without a batch's trees go on by three -> [BATCH] int32."""
        self.fresh = np.full(BATCH, 3, np.int32)
        if drafted:
            texts = self.tokens[self.places[:, None] + np.arange(24)].astype(np.int32)
            self.fresh = np.array([1 + count_accepted(self.matcher.work, i, text) for i, text in enumerate(texts)], np.int32)
        self.places = self.places + self.fresh
        return self.fresh


@njit
def count_accepted(work, b, text):
    """Return the length of the path of the batch's tree b that is the text's beginning."""
    start = carray(cast_to_pointer(work[OUT_START]), BATCH + 1, np.int64)
    tokens = carray(cast_to_pointer(work[OUT_TOKENS]), start[BATCH], np.int32)
    parents = carray(cast_to_pointer(work[OUT_PARENTS]), start[BATCH], np.int32)
    node, n = -1, 0
    for i in range(start[b], start[b + 1]):
        if parents[i] == node and n < len(text) and tokens[i] == text[n]:
            node = i - start[b]
            n += 1
    return n


_clock_gettime = ctypes.CDLL(None).clock_gettime
_clock_gettime.argtypes = [ctypes.c_int, ctypes.c_void_p]
_clock_gettime.restype = ctypes.c_int
_MONOTONIC = int(time.CLOCK_MONOTONIC)


@njit
def time_alone(work, contexts, fresh, ns):
    """Return nanoseconds of each sequence's look-up [B], called one by one from compiled code."""
    slot, now = np.zeros(1, np.int32), np.zeros(2, np.int64)
    for b in range(len(fresh)):
        slot[0] = b
        _clock_gettime(_MONOTONIC, now.ctypes)
        start = now[0] * 1_000_000_000 + now[1]
        propose_batch(work, slot, contexts[b : b + 1], fresh[b : b + 1])
        _clock_gettime(_MONOTONIC, now.ctypes)
        ns[b] = now[0] * 1_000_000_000 + now[1] - start


# ---- the corpus and its store


def ensure_store(args: argparse.Namespace) -> Corpus:
    """Make what is missing of corpus and store."""
    corpus = read_corpus(args.corpus, args.model, args.tokens)
    try:
        n_tokens = Datastore.open(args.store).n_tokens
        common.print_progress(f"{args.store} has {n_tokens:,} tokens")
    except DatastoreNotFoundError:
        write_store(args.store, corpus, args.tokens)
    return corpus


def documents_in_store(corpus: Corpus, n_tokens: int) -> int:
    """Return documents that the store has: the first ones that make n_tokens."""
    return min(int(np.searchsorted(corpus.offsets, n_tokens)), len(corpus.offsets) - 1)


def read_corpus(path: Path, model: str, n_tokens: int) -> Corpus:
    if not path.exists():
        make_corpus(path, model, n_tokens + n_tokens // 8)
    with np.load(path) as arrays:
        return Corpus(arrays["tokens"], arrays["offsets"], arrays["line_ends"])


def make_corpus(path: Path, model: str, n_tokens: int) -> None:
    """Tokenize the Python files of the installed packages, those without a repeat, until there are n_tokens."""
    from ngramspec.models.loader import load_tokenizer

    tokenizer = load_tokenizer(model)
    vocab_size = len(tokenizer)
    roots = [Path(entry) for name in ("torch", "json") for entry in [importlib.util.find_spec(name).submodule_search_locations[0]]]  # type: ignore[union-attr,index]
    parts: list[np.ndarray] = []
    seen: set[bytes] = set()
    total = 0
    for file in sorted({file for root in roots for file in root.parent.rglob("*.py")}):
        raw = file.read_bytes() if file.is_file() else b""
        digest = hashlib.blake2b(raw).digest()
        if 0 < len(raw) < 1_000_000 and digest not in seen and total < n_tokens:
            seen.add(digest)
            encoded = tokenizer.backend_tokenizer.encode_batch_fast([raw.decode(errors="replace")], add_special_tokens=False)
            parts.append(np.array(encoded[0].ids, layout.choose_token_dtype(vocab_size)))
            total += len(parts[-1])
            if len(parts) % 500 == 0:
                common.print_progress(f"{total:,} tokens of {len(parts):,} files")
    if total < n_tokens:
        common.print_progress(f"the installed packages have {total:,} tokens only, {n_tokens:,} were wanted")
    ends = [min(text.count("\n"), 255) for text in tokenizer.batch_decode([[i] for i in range(vocab_size)])]
    np.savez(path, tokens=np.concatenate(parts), offsets=np.cumsum([0, *map(len, parts)]), line_ends=np.array(ends, np.uint8))


def write_store(folder: Path, corpus: Corpus, n_tokens: int) -> None:
    """Write one segment of the corpus's first documents."""
    n_docs, vocab_size = documents_in_store(corpus, n_tokens), len(corpus.line_ends)
    offsets, dtype = corpus.offsets[: n_docs + 1], layout.choose_token_dtype(vocab_size)
    names = [f"{i}.py".encode() for i in range(n_docs)]
    docs = np.zeros(n_docs, layout.DOC_DTYPE)
    docs["start"], docs["length"] = offsets[:-1] + np.arange(n_docs), np.diff(offsets)
    docs["path_bytes"] = [len(name) for name in names]
    docs["path_offset"] = np.cumsum(docs["path_bytes"]) - docs["path_bytes"]
    tokens = np.insert(corpus.tokens[: offsets[-1]].astype(dtype), offsets[1:], layout.get_separator(dtype.itemsize))
    common.print_progress(f"sorting {len(tokens):,} tokens")
    folder.mkdir(parents=True, exist_ok=True)
    fingerprint = hashlib.sha256(b"benchmark").hexdigest()
    entry = segment_writer.sort_and_write(
        folder, segment_writer.SegmentContents(tokens, docs, b"".join(names)), segment_writer.SegmentSettings(vocab_size, fingerprint)
    )
    vocabulary = manifests.write_vocabulary(folder, corpus.line_ends)
    tokenizer = manifests.write_tokenizer(folder, b"benchmark")
    manifests.write_manifest(folder, manifests.Manifest(1, "benchmark", fingerprint, vocab_size, vocabulary, tokenizer, (entry,)))


if __name__ == "__main__":
    main()
