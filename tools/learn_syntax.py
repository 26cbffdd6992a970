"""Learn the syntax table (`ngramspec.speculative.syntax`) from source trees, and what its probabilities mean beside all other features.

    python -m tools.learn_syntax --corpus DIR... --tokenizer M... --out FILE.npz [--contexts N] [--chars C] [--seed S]
    python -m tools.learn_syntax --recorded F.jsonl --tokenizer M --weights FILE.npz [--epochs E]

The first writes the table. Files of each folder, up to C characters a folder, are cut into tokens by each tokenizer. Of all contexts of 1
to 6 classes that at least 3 files have, the N are kept that predict their next tokens best against their shorter contexts, by the sum of
log-likelihood, with the tokens that most often follow. Probabilities are interpolated with those of the shorter context (Witten and Bell,
"The Zero-Frequency Problem", 1991). The file holds no text longer than a token, and none but the 3,000 that most files have.

The second writes the weights of the tree builder, learned with that table from what `tools.record` wrote: the table's own states and how
they mix, with all else as it is shipped.

The shipped table: the tokenizers of Qwen2.5-Coder, SmolLM2 and Gemma 3; `--chars 1000000`; CPython 3.11's standard library (PSF) and the
installed transformers, sympy, networkx, torch, fastapi, rich, jinja2, httpx, huggingface_hub, matplotlib, hypothesis, werkzeug, attr,
click and pygments (BSD, MIT, Apache-2.0, MPL-2.0, PSF); express, zod, vue, cobra, gin, ripgrep, gson, jq, fmt, Newtonsoft.Json, sinatra
and guzzle (MIT, Apache-2.0, Unlicense). The shipped weights: 320 greedy outputs of Qwen2.5-Coder-1.5B-Instruct, 128 tokens each, after
prompts that `tools.learn_mix --write-prompts` made from aiohttp, celery, django, flask, pandas, requests, scikit-learn, scrapy, sqlalchemy,
starlette and tornado, of which nothing is in the table. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit

from benchmarks.common import describe_machine, print_document, print_progress, run_command
from ngramspec.models.loader import load_tokenizer
from ngramspec.speculative.feature_weights import load_weights, save_weights
from ngramspec.speculative.features import BIAS, EXTERNAL, SYNTAX
from ngramspec.speculative.syntax import (
    CHANGE,
    CONTROL,
    FOLLOWERS,
    LEVELS,
    LINE_ENDS,
    NONE,
    ORDERS,
    classify_token,
    count_joined_blanks,
    encode_change,
    extend_hash,
    find_columns,
    hash_class,
    make_key,
    open_syntax,
)
from ngramspec.speculative.tree_builder import Weights
from ngramspec.tokenizer.spelling import list_token_bytes
from tools import learn_mix

SUFFIXES = {".py", ".js", ".ts", ".tsx", ".go", ".rs", ".java", ".c", ".h", ".cc", ".cpp", ".cs", ".rb", ".php", ".md"}
SKIP = {"test", "tests", "idlelib", "lib2to3", "_vendor", "__pycache__", "site-packages", "node_modules", "vendor", "testdata"}
# Of one file; longer ones are cut.
FILE_CHARS = 16_000
# Characters of a line; files with longer ones were made by machines.
LINE_CHARS = 400
# Files that have a context, and times that it occurs, at least.
LEAST_FILES, LEAST_TIMES = 3, 8
# Texts that are classes of their own: words, a sign and a word in one token, and others; texts that may follow.
WORDS, LED_WORDS, SIGNS, FOLLOWING = 300, 60, 1500, 3000
# Weight of a context's distinct followers against its occurrences when it is interpolated with its shorter context.
DISTINCT_WEIGHT = 1.5
# Changes of indentation, with the line ends before them, in the order of their numbers from 1 on.
_CHANGES = [(line_ends, columns) for line_ends in range(LINE_ENDS) for columns in range(1 - CHANGE, CHANGE)]
# Candidates of a step of learning weights; its learning rates of states and mix.
BATCH, RATES = 4096, (0.1, 0.01)
# Slots of the hash table for a context, at least.
SLOTS = 1.9


def read_files(folder: Path, n_chars: int, rng: random.Random) -> list[str]:
    """Return texts of a folder's source files in random order, up to about `n_chars` together."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and not SKIP.intersection(path.relative_to(folder).parts))
    rng.shuffle(paths)
    texts: list[str] = []
    for path in paths:
        if n_chars <= 0:
            break
        text = path.read_text(encoding="utf-8", errors="replace")[:FILE_CHARS]
        if text.strip() and "\0" not in text and max(map(len, text.splitlines())) <= LINE_CHARS:
            texts.append(text)
            n_chars -= len(text)
    return texts


class TokenCorpus:
    """Files as token texts: one stream for all tokenizers, each file begun by a control token."""

    def __init__(self) -> None:
        self.names: list[bytes] = [CONTROL, *(b"\xfe%d" % encode_change(*change) for change in _CHANGES)]
        self.columns: list[tuple[int, int]] = [(-1, -1)] * len(self.names)
        """`find_columns` of each text."""
        self._number_of: dict[tuple[bytes, tuple[int, int]], int] = {}
        self._tokens: list[np.ndarray] = []
        self._files: list[np.ndarray] = []

    def add(self, files: list[str], backend: Any) -> None:
        """Append all files, cut into tokens by this tokenizer."""
        text_of = {token: text for text, token in list_token_bytes(backend).items()}
        joined = count_joined_blanks(backend, text_of)
        number_of_token: dict[int, int] = {}
        for number, encoded in enumerate(backend.encode_batch(files, add_special_tokens=False)):
            stream = [0]
            for token in encoded.ids:
                if token not in number_of_token:
                    text = text_of.get(token, CONTROL)
                    columns = find_columns(text, joined)  # differ between tokenizers
                    if (text, columns) not in self._number_of:
                        self._number_of[text, columns] = len(self.names)
                        self.names.append(text)
                        self.columns.append(columns)
                    number_of_token[token] = self._number_of[text, columns]
                stream.append(number_of_token[token])
            self._tokens.append(np.array(stream, np.int32))
            self._files.append(np.full(len(stream), number, np.int32))

    def join(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return of each token its text's number, its file, and its distance from the file's beginning: three of [n] int32."""
        reach = np.concatenate([np.arange(len(each), dtype=np.int32) for each in self._tokens])
        return np.concatenate(self._tokens), np.concatenate(self._files), reach


@njit
def find_changes(tokens: np.ndarray, reach: np.ndarray, columns: np.ndarray, line_ends: np.ndarray) -> np.ndarray:
    """Return the tokens with those that indent a line replaced by the number of the change. columns [texts, 2], line_ends [texts] int64:
    of texts of line ends and blanks alone, -1 of others."""
    out = tokens.copy()
    margin, now, has_text = np.int64(0), np.int64(0), False
    for i in range(len(tokens)):
        if reach[i] == 0:
            margin, now, has_text = np.int64(0), np.int64(0), False
            continue
        token = tokens[i]
        blanks, after_break = columns[token]
        base = now if has_text else margin
        begins = line_ends[token] > 0 or (line_ends[token] == 0 and not has_text and now == 0)
        if blanks > 0 and begins and line_ends[token] < LINE_ENDS and abs(blanks - base) < CHANGE:
            out[i] = 1 + line_ends[token] * (2 * CHANGE - 1) + blanks - base + CHANGE - 1
        if after_break >= 0:
            if has_text or blanks < 0:
                margin = now
            now, has_text = np.int64(after_break), False
        elif blanks >= 0:
            now = now if has_text else blanks
        else:
            has_text = True
    return out


@njit
def hash_contexts(classes: np.ndarray, reach: np.ndarray) -> np.ndarray:
    """Return the keys [ORDERS, n] uint32 of each position's contexts; 0 where the file has no such context."""
    keys = np.zeros((ORDERS, len(classes)), np.uint32)
    for i in range(len(classes)):
        h = np.uint64(0)
        for k in range(min(ORDERS, reach[i])):
            h = extend_hash(h, classes[i - 1 - k])
            keys[k, i] = make_key(h, k + 1)
    return keys


def choose_names(names: list[bytes], tokens: np.ndarray, files: np.ndarray) -> tuple[list[bytes], np.ndarray]:
    """Return the texts that are classes of their own, and a mask [texts] of those that may follow: those in most files."""
    in_files = np.unique(tokens.astype(np.int64) * (int(files.max()) + 1) + files) // (int(files.max()) + 1)
    n_files = np.bincount(in_files, minlength=len(names))
    n_files[0] = 0
    by_files = list(dict.fromkeys(names[i] for i in np.argsort(-n_files, kind="stable") if n_files[i]))
    frequent: list[bytes] = []
    for kind, most in ((b"a", WORDS), (b".a", LED_WORDS), (b"", SIGNS)):
        frequent += [name for name in by_files if _find_kind(name) == kind][:most]
    listed = {*by_files[:FOLLOWING]} - {CONTROL}
    may_follow = np.array([name in listed for name in names])
    may_follow[1 : 1 + len(_CHANGES)] = True
    return frequent, may_follow


def _find_kind(text: bytes) -> bytes | None:
    """Return b"a" for a word of two letters or more, b".a" for a sign and a word, b"" for others; None for what is no frequent text."""
    if text == CONTROL or text.startswith(b"\xfe") or text.endswith(b" "):
        return None
    name = classify_token(text, ())
    if name.strip() in (b"a", b"A", b"0"):
        return b"a" if len(text.strip()) > 1 and name.strip() != b"0" else None
    return b".a" if name.endswith(b"a") and name != text else b""


class Followers:
    """What followed the contexts of one length."""

    def __init__(self, keys: np.ndarray, tokens: np.ndarray, files: np.ndarray, shorter: np.ndarray, may_follow: np.ndarray) -> None:
        """Count them. keys [n] uint32, 0: none. shorter [n] float64, changed in place: each token's probability after a shorter context."""
        at = np.flatnonzero(keys)
        pairs, first, inverse, times = np.unique(
            keys[at].astype(np.int64) << 20 | tokens[at], return_index=True, return_inverse=True, return_counts=True
        )
        self.keys, self.context, distinct = np.unique(pairs >> 20, return_inverse=True, return_counts=True)
        in_files = np.unique(keys[at].astype(np.int64) << 20 | files[at]) >> 20
        n_files = np.unique(in_files, return_counts=True)[1]
        total, weight = np.bincount(self.context, weights=times), DISTINCT_WEIGHT * distinct[self.context]
        before = shorter[at[first]]
        self.token, self.prob = pairs & (1 << 20) - 1, (times + weight * before) / (total[self.context] + weight)
        self.listed = may_follow[self.token] & (self.prob >= LEVELS[0])
        gain = np.abs(times * np.log(self.prob / before)) * self.listed
        self.gain = np.where((n_files >= LEAST_FILES) & (total >= LEAST_TIMES), np.bincount(self.context, weights=gain), 0.0)
        shorter[at] = self.prob[inverse]

    def select(self, least_gain: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the contexts that gain at least that: keys [m], tokens [m, FOLLOWERS], -1: none, probabilities [m, FOLLOWERS]."""
        order = np.lexsort((-self.prob, self.context))
        order = order[(self.listed & (self.gain >= least_gain)[self.context])[order]]
        context = self.context[order]
        begins = np.append(True, np.diff(context) != 0)[: len(context)]
        row, starts = np.cumsum(begins) - 1, np.flatnonzero(begins)
        rank = np.arange(len(context)) - starts[row]
        tokens, probs = np.full((len(starts), FOLLOWERS), -1, np.int64), np.zeros((len(starts), FOLLOWERS))
        few = rank < FOLLOWERS
        tokens[row[few], rank[few]], probs[row[few], rank[few]] = self.token[order][few], self.prob[order][few]
        return self.keys[context[starts]], tokens, probs


@njit
def fill_slots(keys: np.ndarray, n_slots: int) -> np.ndarray:
    """Return the row of each slot of a hash table, -1: free. keys [m] uint32; the first of equal ones counts."""
    rows = np.full(n_slots, -1, np.int64)
    for i in range(len(keys)):
        slot = np.int64(keys[i]) & (n_slots - 1)
        while rows[slot] >= 0 and keys[rows[slot]] != keys[i]:
            slot = (slot + 1) & (n_slots - 1)
        if rows[slot] < 0:
            rows[slot] = i
    return rows


def save_table(path: Path, names: list[bytes], frequent: list[bytes], contexts: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """Write the file: see `syntax.open_syntax`."""
    keys, tokens, probs = contexts
    used = sorted({*tokens.ravel().tolist()} - {-1})
    followers = [names[i] for i in used if names[i] not in {*frequent}]
    index = {name: i for i, name in enumerate([*frequent, *followers])}
    number = np.full(len(names) + 1, NONE, np.uint16)  # the last one: of -1
    number[used] = [index[names[i]] for i in used]
    rows = fill_slots(keys.astype(np.uint32), 1 << int(np.ceil(np.log2(SLOTS * len(keys)))))
    filled = rows >= 0
    levels = np.searchsorted(np.array(LEVELS), probs, side="right").astype(np.uint8)
    np.savez_compressed(
        path,
        allow_pickle=False,
        names=np.frombuffer(b"\xff".join([*frequent, b"", *followers]), np.uint8),
        keys=np.where(filled, keys[rows], 0).astype(np.uint32),
        followers=np.where(filled[:, None], number[tokens[rows]], NONE).astype(np.uint16),
        levels=np.where(filled[:, None], levels[rows], 0).astype(np.uint8),
    )


def learn_table(args: argparse.Namespace) -> dict[str, Any]:
    """Write the table and return its part of the JSON document."""
    started, rng = time.perf_counter(), random.Random(args.seed)
    texts = [text for folder in args.corpus for text in read_files(folder, args.chars, rng)]
    corpus = TokenCorpus()
    for name in args.tokenizer:
        corpus.add(texts, load_tokenizer(name).backend_tokenizer)
    tokens, files, reach = corpus.join()
    print_progress(f"{len(texts)} files, {sum(map(len, texts))} characters, {len(tokens)} tokens, {time.perf_counter() - started:.0f} s")
    columns = np.array(corpus.columns, np.int64)
    line_ends = np.array([text.count(b"\n") if blanks >= 0 else -1 for text, (blanks, _) in zip(corpus.names, corpus.columns, strict=True)])
    frequent, may_follow = choose_names(corpus.names, tokens, files)
    own = frozenset(frequent)
    numbers = np.array([hash_class(CONTROL), *(hash_class(classify_token(name, own)) for name in corpus.names[1:])], np.uint32)
    keys = hash_contexts(numbers[tokens], reach)
    tokens = find_changes(tokens, reach, columns, line_ends)
    shorter = np.maximum(np.bincount(tokens) / len(tokens), 1e-6)[tokens]
    followers = [Followers(keys[k], tokens, files, shorter, may_follow) for k in range(ORDERS)]
    gains = np.sort(np.concatenate([each.gain for each in followers]))
    least_gain = max(float(gains[-min(args.contexts, len(gains))]), 1e-9)
    selected = [each.select(least_gain) for each in followers]
    save_table(args.out, corpus.names, frequent, tuple(np.concatenate(parts) for parts in zip(*selected, strict=True)))
    counts = {"files": len(texts), "tokens": len(tokens), "contexts": [len(each[0]) for each in selected], "bytes": args.out.stat().st_size}
    return {**counts, "settings": {"contexts": args.contexts, "chars": args.chars, "seed": args.seed}}


class SyntaxMix(learn_mix.Mix):
    """The shipped mix, of which only what the syntax table says is learned."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        n = EXTERNAL
        with torch.no_grad():
            self.states.copy_(torch.from_numpy(weights.states[:n]))
            self.mix.copy_(torch.from_numpy(weights.mix[:, :n]))
            self.bias.copy_(torch.from_numpy(weights.mix[:, BIAS]))
        learns = torch.arange(n) == SYNTAX
        self.states.register_hook(lambda gradient: gradient * learns[:, None])
        self.mix.register_hook(lambda gradient: gradient * learns)
        self.bias.requires_grad_(False)


def learn_weights(args: argparse.Namespace) -> dict[str, Any]:
    """Write the weights and return their part of the JSON document: the loss per token of the tenth that was held out."""
    tokenizer: Any = load_tokenizer(args.tokenizer[0])
    syntax = open_syntax(tokenizer.backend_tokenizer, len(tokenizer))
    weights, traces = load_weights(), learn_mix.read_recorded(args.recorded, 512, 0)
    end = max(len(traces) // 10, 1)
    held_out, seen = (learn_mix.collect(part, weights, 0, syntax) for part in (traces[:end], traces[end:]))
    kinds = np.full(int(held_out.position[-1]) + 1, learn_mix.KINDS.index("recorded"))
    model = SyntaxMix(weights)
    before = learn_mix.compute_losses(model, held_out, kinds)["recorded"]
    after = learn_mix.compute_losses(learn_mix.fit(model, seen, args.epochs, BATCH, RATES), held_out, kinds)["recorded"]
    learned = learn_mix.to_weights(model)
    weights.states[SYNTAX], weights.mix[:, SYNTAX] = learned.states[SYNTAX], learned.mix[:, SYNTAX]
    save_weights(args.weights, weights)
    return {"loss": {"before": before, "after": after}, "settings": {"epochs": args.epochs}}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.learn_syntax", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokenizer", nargs="+", required=True, metavar="M", help="folder, hub name, GGUF file or smollm2")
    parser.add_argument("--corpus", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="FILE.npz", help="the table")
    parser.add_argument("--contexts", type=int, default=65_000)
    parser.add_argument("--chars", type=int, default=600_000, help="of each folder, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recorded", type=Path, metavar="F.jsonl", help="outputs that tools.record wrote")
    parser.add_argument("--weights", type=Path, metavar="FILE.npz", help="the weights")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    if args.corpus and args.out:
        found = learn_table(args)
    elif args.recorded and args.weights:
        found = learn_weights(args)
    else:
        parser.error("--corpus and --out are needed, or --recorded and --weights")
    names = [Path(name).name for name in args.tokenizer]
    print_document({"benchmark": "learn_syntax", "tokenizers": names, **found, **describe_machine("cpu", torch.get_num_threads())})


if __name__ == "__main__":
    run_command(main)
