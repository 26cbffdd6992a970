"""Learn the weights of the draft mix from plain source trees and write the file that the package ships.

No model and no benchmark data: files of the folders given are turned into prompts with continuations, the way requests look,

    body       a file up to a function's docstring -> its body          (completion with a long prompt)
    function   imports and one documented function -> its body          (completion with a short prompt)
    resume     a file up to some line -> what follows                   (completion anywhere)
    edit       code in a chat prompt -> the same code with renames, deleted, inserted, moved and changed lines
    prose      documentation up to some paragraph -> what follows
    revise     documentation in a chat prompt -> the same with words replaced, sentences dropped or moved
    chat       a paragraph as the user's message -> the paragraphs after it
    dialogue   a long system text and several turns of paragraphs -> the next turn
    noise      random words -> others: text that never repeats is a request too

Every output position, and the end of the output, gives one sample per candidate: the states of all groups of evidence and whether the
candidate was right. State values and mixing factors are fitted together, by the log loss. Only those numbers are written.

What a datastore says is left untaught: `tools.learn_store` adds it to the file, and has to follow. `tools.learn_syntax` does so last.

Traces come in sessions of one kind from neighbouring files: each knows the answers of those before it. Half of the edits have the text
that was edited as their predicted output. `--recorded` adds outputs of a real model with its own candidates, which no plain text has.

    python -m tools.learn_mix --corpus DIR... --out FILE.npz [--traces N] [--epochs E] [--seed S] [--tokenizer M] [--recorded F.jsonl]
    python -m tools.learn_mix --corpus DIR... --write-prompts F.jsonl [--traces N]      (for tools.record)

The shipped weights: `--corpus` of CPython 3.11's standard library (PSF) and the installed sympy, scipy, numpy, transformers, numba, torch,
huggingface_hub, pygments, requests, rich, tokenizers, and aiohttp, django, fastapi, flask, networkx, pandas, psutil, scikit-learn, scrapy,
sqlalchemy and starlette from PyPI (BSD, MIT, Apache-2.0); `--recorded` greedy outputs of SmolLM2-135M-Instruct after prompts made from the
same files; the defaults otherwise. Prints the loss per held-out output token, by kind, and as the last line one JSON document.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit

from benchmarks.common import RowError, describe_machine, iterate_rows, print_document, print_table, run_command
from ngramspec.speculative import features, ngram_table, proposer, tree_builder
from ngramspec.speculative.drafter import DraftOptions, DraftParams
from ngramspec.speculative.feature_weights import make_cold_weights, save_weights
from ngramspec.speculative.features import ExternalTrees
from ngramspec.speculative.recycled import record_topk
from ngramspec.speculative.syntax import SyntaxTable, open_syntax

KINDS = ("body", "function", "resume", "edit", "prose", "revise", "chat", "dialogue", "noise", "recorded")
SESSION = 20  # traces of a session
POOLS = (3, 6, 12, 40)  # from how many neighbouring files they are drawn
INSTRUCTIONS = (
    "Edit the program below as instructed. Reply with the whole edited program in one ```python block.",
    "Please change this code and give me the complete new version:",
    "Refactor the following file. Return all of it.",
    "Here is my code. Fix the problem described below it and print the full result.",
    "Apply the requested change and output the updated file, nothing else.",
)
CHAT = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
SKIP = {"test", "tests", "idlelib", "lib2to3", "_vendor", "__pycache__", "site-packages"}


def read_sources(folders: list[Path], suffixes: tuple[str, ...], limit: int = 400_000) -> list[str]:
    """Return the texts of all files with these suffixes, in a stable order, neither tiny nor huge."""
    texts = []
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            wanted = path.suffix in suffixes or path.name in suffixes
            if wanted and not SKIP.intersection(path.relative_to(folder).parts) and path.is_file() and 1500 < path.stat().st_size < limit:
                texts.append(path.read_text(encoding="utf-8", errors="replace"))
    return texts


def find_documented(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            yield node


def edit_lines(lines: list[str], donor: list[str], rng: random.Random) -> list[str]:
    """Make a few mechanical edits, of the sizes that requests to change code ask for."""
    lines = list(lines)
    for _ in range(rng.choice((1, 1, 2, 3, 4, 6))):
        op, i = rng.randrange(7), rng.randrange(len(lines))
        n = rng.choice((1, 1, 2, 3, 5))
        if op == 0:
            names = re.findall(r"\b[a-z_][a-z_0-9]{3,}\b", "\n".join(lines))
            if names:
                old = rng.choice(names)
                new = rng.choice((old + "_new", "new_" + old, old.split("_")[0] + "_value", rng.choice(names) + "s"))
                lines = [re.sub(rf"\b{old}\b", new, line) for line in lines]
        elif op == 1 and len(lines) > n + 5:
            del lines[i : i + n]
        elif op == 2:
            j = rng.randrange(max(len(donor) - n, 1))
            lines[i:i] = donor[j : j + n]
        elif op == 3:
            j = rng.randrange(max(len(lines) - n, 1))
            lines[i:i] = lines[j : j + n]
        elif op == 4:
            lines[i] = re.sub(
                r"\b\w+\b",
                lambda m: m.group() if rng.random() < 0.7 else str(rng.choice(("None", "0", "value", "result", m.group() + "2"))),
                lines[i],
            )
        elif op == 5:
            indent = re.match(r"\s*", lines[i]).group()  # type: ignore[union-attr]
            lines[i : i + n] = [indent + "if " + rng.choice(("value", "self.enabled", "not done", "n > 0")) + ":"] + [
                "    " + line for line in lines[i : i + n]
            ]
        else:
            j = rng.randrange(len(lines))
            lines[i], lines[j] = lines[j], lines[i]
    return lines


def revise_text(text: str, rng: random.Random) -> str:
    sentences = re.split(r"(?<=[.!?:]) +|(?<=\n)", text)
    words = re.findall(r"[A-Za-z]{4,}", text) or ["text"]
    out: list[str] = []
    for s in sentences:
        if rng.random() < 0.12:
            continue
        if rng.random() < 0.35:
            s = re.sub(r"[A-Za-z]{4,}", lambda m: m.group() if rng.random() < 0.8 else rng.choice(words), s)
        out.append(s)
        if rng.random() < 0.1:
            out.append(rng.choice(sentences))
    return " ".join(out).replace("\n ", "\n")


class Made(NamedTuple):
    """What a model was asked, what follows, and the output that was expected (empty: none)."""

    kind: str
    session: int
    prompt: np.ndarray  # [n] int32
    output: np.ndarray  # [m] int32
    prediction: np.ndarray  # [k] int32
    top: np.ndarray  # [m, KEPT] int64, the model's own most likely tokens at each output position; [0, KEPT]: not known
    logits: np.ndarray  # [m, KEPT] float32, theirs, up to a constant


def trace(kind: str, code: list[str], prose: list[str], rng: random.Random) -> tuple[str, ...] | None:
    """Return one (prompt, output[, what was edited]) of this kind, or None if the file drawn is not suited to it."""
    if kind in ("prose", "revise", "chat", "dialogue"):
        text = rng.choice(prose)
        if kind == "chat":
            at = rng.randrange(max(len(text) - 2500, 1))
            parts = text[at : at + 3000].split("\n\n")[1:]
            return (CHAT.format("\n\n".join(parts[:2])), "\n\n".join(parts[2:])[:1500]) if len(parts) > 3 else None
        if kind == "dialogue":
            at, n = rng.randrange(max(len(text) - 5000, 1)), rng.choice((1000, 4000, 9000))
            parts = [part for part in text[at : at + n + 6000].split("\n\n")[1:] if len(part) > 40]
            system = "\n\n".join(parts[: len(parts) // 2])
            turns = parts[len(parts) // 2 :][: rng.choice((2, 4, 8))]
            if len(turns) < 2:
                return None
            said = "".join(f"<|im_start|>{('user', 'assistant')[i & 1]}\n{turn}<|im_end|>\n" for i, turn in enumerate(turns[:-1]))
            return f"<|im_start|>system\n{system}<|im_end|>\n{said}<|im_start|>assistant\n", turns[-1][:1200]
        if kind == "prose":
            at = text.find("\n", rng.randrange(200, max(len(text) - 800, 201)))
            start = max(at - rng.choice((400, 1500, 5000, 16000)), 0)
            return text[start : at + 1], text[at + 1 : at + 1400]
        at = rng.randrange(max(len(text) - 2000, 1))
        piece = text[at : at + rng.randrange(500, 2500)]
        return (
            CHAT.format(rng.choice(("Rewrite this: ", "Improve the text below.\n\n", "Shorten:\n")) + piece),
            revise_text(piece, rng),
            piece,
        )
    text = rng.choice(code)
    if kind == "noise":
        words = list(set(re.findall(r"[A-Za-z]{2,}|\d+", text)))
        drawn = [rng.choice(words) for _ in range(240)]
        return " ".join(drawn[:100]), " ".join(drawn[100:])
    lines = text.splitlines()
    if kind == "resume":
        i = rng.randrange(10, max(len(lines) - 20, 11))
        prompt = "\n".join(lines[:i])[-rng.choice((600, 2000, 5000, 12000)) :]
        return prompt + "\n", "\n".join(lines[i : i + 45])
    if kind == "edit":
        i = rng.randrange(max(len(lines) - 40, 1))
        old = lines[i : i + rng.randrange(15, 120)]
        new = "\n".join(edit_lines(old, rng.choice(code).splitlines(), rng))
        ask = rng.choice(INSTRUCTIONS) + "\n\n```python\n" + "\n".join(old) + "\n```\n\nInstruction: " + rng.choice(lines).strip()
        return CHAT.format(ask), "```python\n" + new + "\n```" if rng.random() < 0.5 else new, "\n".join(old)
    try:
        functions = list(find_documented(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return None
    if not functions:
        return None
    f = rng.choice(functions)
    first = f.body[1].lineno - 1
    body = "\n".join(lines[first : f.end_lineno]) + "\n"
    if kind == "function":
        head = [line for line in lines[:60] if re.match(r"(import|from) ", line)][: rng.randrange(4)]
        return "\n".join(head + ["", ""] * bool(head) + lines[f.lineno - 1 : first]) + "\n", body
    return "\n".join(lines[:first])[-rng.choice((2000, 5000, 9000)) :] + "\n", body


NOTHING = np.empty(0, np.int32)
NO_TOP, NO_LOGITS = np.empty((0, features.KEPT), np.int64), np.empty((0, features.KEPT), np.float32)


class Samples(NamedTuple):
    """One row per candidate."""

    state: np.ndarray  # [N, EXTERNAL + external drafters] int16, 0: the group is silent
    set: np.ndarray  # [N] int16, weight set
    right: np.ndarray  # [N] bool
    position: np.ndarray  # [N] int32, output position, over all traces


@njit(nogil=True)
def _sample(draft_state, external, n_drafters, history, output, likely, ends, samples, position):
    """Follow one output token by token, take samples and return their number. `external`: a tree per position, or none. `likely`: the
    target's top tokens and their logits, or none."""
    n, (top, logits) = 0, likely
    arrays = tree_builder.view_draft_state(draft_state)
    state, nodes, keys = arrays.states[0], arrays.nodes, np.empty(len(arrays.contexts) + 1, np.uint64)
    cursor, look_back = nodes.cursor[0], np.empty(tree_builder.RESYNC_TOKENS, np.int32)
    for i in range(len(output) + ends):
        seq = ngram_table.view_arrays(state, arrays.contexts)
        nodes.hit_history[0] = state[ngram_table.HIT_HISTORY]
        cursor[0], cursor[1], cursor[2] = state[ngram_table.COPY_AT], state[ngram_table.COPY_MATCHED], state[ngram_table.COPY_MISSES]
        cursor[3], cursor[4], cursor[5] = (
            state[ngram_table.PREDICTION_AT],
            state[ngram_table.PREDICTION_MATCHED],
            state[ngram_table.PREDICTION_MISSES],
        )
        for d in range(n_drafters):
            nodes.external[0, d] = -1 if external.start[i + 1] > external.start[i] else -2
        tree_builder.score_candidates(arrays, state, 0, 0, external, i * n_drafters, n_drafters)
        truth = output[i] if i < len(output) else -1
        for c in range(nodes.n[0]):
            for g in range(samples.state.shape[1]):
                samples.state[n, g] = nodes.cand_state[c, g]
            samples.set[n], samples.right[n], samples.position[n] = nodes.set[0], nodes.cand_token[c] == truth, position + i
            n += 1
        if i == len(output):
            break
        hit = nodes.n[0] > 0 and nodes.cand_token[nodes.top[0]] == truth
        state[ngram_table.HIT_HISTORY] = features.push_hit(state[ngram_table.HIT_HISTORY], hit)
        if len(top):
            last = seq.tokens[(state[ngram_table.LENGTH] - 1) & (len(seq.tokens) - 1)]
            before = seq.tokens[(state[ngram_table.LENGTH] - 2) & (len(seq.tokens) - 1)]
            record_topk(arrays.recycled, np.int64(before), np.int64(last), top[i], logits[i])
        copied = tree_builder.follow_copy(state, seq, cursor[0], cursor[1], cursor[2], truth)
        state[ngram_table.COPY_AT], state[ngram_table.COPY_MATCHED], state[ngram_table.COPY_MISSES] = copied
        ahead = tree_builder.follow_prediction(state, cursor[3], cursor[4], cursor[5], truth)
        state[ngram_table.PREDICTION_AT], state[ngram_table.PREDICTION_MATCHED], state[ngram_table.PREDICTION_MISSES] = ahead
        ngram_table.push_token(state, seq, truth, history, keys)
        if i % 3 == 2:  # a pass accepts a few tokens at once
            tree_builder.resync_prediction(state, seq, look_back)
    return n


def follow(tables: proposer.TreeProposer, t: Made, ends: int, position: int, external: ExternalTrees, n_drafters: int) -> Samples:
    """Return the samples of a trace, which `tables` has begun at slot 0. `ends`: 1 if its end is known, else 0."""
    rows = (len(t.output) + 1) * features.MAX_CANDIDATES
    samples = Samples(
        np.empty((rows, features.EXTERNAL + n_drafters), np.int16),
        np.empty(rows, np.int16),
        np.empty(rows, np.bool_),
        np.empty(rows, np.int32),
    )
    n = _sample(tables._draft_state, external, n_drafters, tables.history, t.output, (t.top, t.logits), ends, samples, position)
    return Samples(*(a[:n] for a in samples))


def collect(traces: list[Made], weights: tree_builder.Weights, max_out: int, syntax: SyntaxTable) -> Samples:
    """Return the samples of all traces. `weights` only say which candidate counts as the predicted one."""
    parts = []
    tables = proposer.TreeProposer(DraftOptions(vocab_size=len(syntax.classes), max_seqs=1), syntax=syntax, weights=weights)
    position = 0
    for t in traces:
        tables.begin(0, t.prompt, DraftParams(prediction=t.prediction, tenant=str(t.session)))
        tables._own.enlarge_buffer(0, len(t.output) + 1, tables._contexts)
        parts.append(follow(tables, t, int(len(t.output) < max_out), position, proposer.NO_EXTERNAL, 0))
        position += len(t.output) + 1
        tables.end(0)
        tables.remember(t.output, str(t.session))
    return Samples(*(np.concatenate(a) for a in zip(*parts, strict=True)))


class Mix(torch.nn.Module):
    """The mix as `tree_builder.score_candidates` computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.states = torch.nn.Parameter(torch.zeros(features.EXTERNAL, features.STATES))
        self.mix = torch.nn.Parameter(torch.full((features.SETS, features.EXTERNAL), 0.3))
        self.bias = torch.nn.Parameter(torch.zeros(features.SETS))

    def forward(self, state: torch.Tensor, sets: torch.Tensor) -> torch.Tensor:
        z = self.states[torch.arange(features.EXTERNAL), state] * (state > 0)
        return (z * self.mix[sets]).sum(1) + self.bias[sets]


def make_batch(samples: Samples, rows: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.from_numpy(samples.state[rows].astype(np.int64)),
        torch.from_numpy(samples.set[rows].astype(np.int64)),
        torch.from_numpy(samples.right[rows].astype(np.float32)),
    )


def fit(model: Mix, samples: Samples, epochs: int, size: int = 16384, rates: tuple[float, float] = (0.03, 0.03)) -> Mix:
    """Fit by Adam with rates, of states and mix, that fall to zero."""
    n = len(samples.set)
    steps = max(epochs * (n // size), 1)
    groups = [{"params": [model.states], "lr": rates[0]}, {"params": [model.mix, model.bias], "lr": rates[1]}]
    optimizer = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.001, steps)
    step = 0
    while step < steps:
        order = np.random.default_rng(step).permutation(n)
        for i in range(0, n - size + 1, size):
            state, sets, right = make_batch(samples, order[i : i + size])
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(state, sets), right)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
    return model


def compute_losses(model: Mix, samples: Samples, kinds: np.ndarray) -> dict[str, float]:
    """Return the summed log loss per output position, by kind. kinds [positions] int."""
    out, counts = np.zeros(len(KINDS)), np.bincount(kinds, minlength=len(KINDS))
    with torch.no_grad():
        for i in range(0, len(samples.set), 100_000):
            rows = slice(i, i + 100_000)
            state, sets, right = make_batch(samples, rows)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(state, sets), right, reduction="none").numpy()
            out += np.bincount(kinds[samples.position[rows]], loss, len(KINDS))
    return {kind: round(float(x / max(c, 1)), 4) for kind, x, c in zip(KINDS, out, counts, strict=True)}


def to_weights(model: Mix) -> tree_builder.Weights:
    """Return the package's arrays; what external drafters say starts from its plain meaning."""
    weights = make_cold_weights()
    weights.states[: features.EXTERNAL] = model.states.detach().numpy()
    weights.states[: features.EXTERNAL, 0] = 0.0
    weights.mix[:, : features.EXTERNAL] = model.mix.detach().numpy()
    weights.mix[:, features.BIAS] = model.bias.detach().numpy()
    return weights


def make_blocks(texts: list[str], rng: random.Random, size: int = 40) -> list[list[str]]:
    """Return blocks of `size` neighbouring files, in random order."""
    cut = [texts[i : i + size] for i in range(0, len(texts), size)]
    rng.shuffle(cut)
    return cut


def join_docstrings(texts: list[str]) -> Iterator[str]:
    for text in texts:
        try:
            nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.Module))]
        except (SyntaxError, ValueError, RecursionError):
            continue
        joined = "\n\n".join(d for n in nodes if (d := ast.get_docstring(n)))
        if len(joined) > 3000:
            yield joined


def make_traces(
    code: list[list[str]],
    prose: list[list[str]],
    n: int,
    seed: int,
    tokenizer: Any,
    max_out: int,
    drawn: dict[int, list[str]] | None = None,
) -> list[Made]:
    """Draw n traces, session by session, the kinds in turn. `code` and `prose` are blocks of neighbouring files.

    `drawn` gets those that each session was drawn from.
    """
    rng = random.Random(seed)
    kinds = KINDS[:-1]
    traces: list[Made] = []
    encode = lambda text: np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)  # noqa: E731
    session = 0
    while len(traces) < n:
        kind, pool = kinds[session % len(kinds)], rng.choice(POOLS)
        near = [_pick_near(blocks, pool, rng) for blocks in (code, prose)]
        made, session = 0, session + 1
        if drawn is not None:
            drawn[session] = near[0] + near[1]
        for _ in range(6 * SESSION):  # some files lend themselves to nothing
            texts = trace(kind, near[0], near[1], rng)
            if texts is None or len(texts[1]) < 60:
                continue
            prompt, output = encode(texts[0]), encode(texts[1])[:max_out]
            foreseen = encode(texts[2]) if len(texts) > 2 and rng.random() < 0.5 else NOTHING
            if len(output) >= 8:
                traces.append(Made(kind, session, prompt, output, foreseen, NO_TOP, NO_LOGITS))
                made += 1
            if made == SESSION:
                break
    return traces


def _pick_near(blocks: list[list[str]], n: int, rng: random.Random) -> list[str]:
    block = rng.choice(blocks)
    at = rng.randrange(max(len(block) - n, 0) + 1)
    return block[at : at + n]


def read_recorded(path: Path, max_out: int, session: int) -> list[Made]:
    """Read traces that `tools.record` wrote, all in one session."""
    traces = []
    for _, row in iterate_rows(path):
        output = np.array(row["output_ids"], np.int32)[:max_out]
        top, logits = np.array(row["top_ids"], np.int64)[:max_out], np.array(row["top_logprobs"], np.float32)[:max_out]
        if top.shape != (len(output), features.KEPT):
            raise RowError(f"{row.where}: top_ids must hold {features.KEPT} tokens per output token, got shape {top.shape}")
        traces.append(Made("recorded", session, np.array(row["prompt_ids"], np.int32), output, NOTHING, top, logits))
    return traces


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--corpus", nargs="+", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write-prompts", type=Path, metavar="F.jsonl", help="write the prompts instead of learning")
    parser.add_argument("--recorded", type=Path, metavar="F.jsonl", help="outputs that tools.record wrote")
    parser.add_argument("--traces", type=int, default=4800)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--max-out", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokenizer", default="smollm2")
    args = parser.parse_args()
    if (args.out is None) == (args.write_prompts is None):
        parser.error("--out or --write-prompts is needed")
    from ngramspec.models.loader import load_tokenizer

    torch.manual_seed(args.seed)
    tokenizer: Any = load_tokenizer(args.tokenizer)
    rng = random.Random(args.seed)
    syntax = open_syntax(tokenizer.backend_tokenizer, len(tokenizer))
    code = read_sources(args.corpus, (".py",))
    prose = read_sources(args.corpus, (".txt", ".rst", ".md", "METADATA", "topics.py"), 2_000_000)
    prose += join_docstrings(rng.sample(code, min(len(code), 600)))
    if len(code) < 20 or len(prose) < 20:
        parser.error(f"the corpus has {len(code)} usable Python files and {len(prose)} texts; 20 of each are the least")
    started = time.perf_counter()
    code_blocks, prose_blocks = (make_blocks(texts, rng) for texts in (code, prose))
    c, p = (max(len(blocks) // 10, 1) for blocks in (code_blocks, prose_blocks))
    train = make_traces(code_blocks[c:], prose_blocks[p:], args.traces, args.seed, tokenizer, args.max_out)
    if args.write_prompts is not None:
        rows = [json.dumps({"id": f"{t.kind}-{i}", "prompt_ids": t.prompt.tolist()}) + "\n" for i, t in enumerate(train)]
        args.write_prompts.write_text("".join(rows))
        return
    held_out = make_traces(
        code_blocks[:c], prose_blocks[:p], max(args.traces // 12, SESSION * len(KINDS)), args.seed + 1, tokenizer, args.max_out
    )
    if args.recorded:
        real = read_recorded(args.recorded, args.max_out, args.traces)
        train, held_out = train + real[len(real) // 10 :], held_out + real[: len(real) // 10]
    kinds = np.concatenate([np.full(len(t.output) + 1, KINDS.index(t.kind)) for t in held_out])
    n_out, spent = sum(len(t.output) for t in train), time.perf_counter() - started
    print(f"{len(code)} Python files, {len(prose)} texts -> {n_out} output tokens, {spent:.0f} s", flush=True)
    weights = make_cold_weights()
    losses_by_turn: list[dict[str, float]] = []
    for turn in range(2):  # which tokens counted as predicted is itself evidence: the second turn sees it as the learned mix says
        seen = train if turn else [t for t in train if t.session % 2 == 0]
        model = fit(Mix(), collect(seen, weights, args.max_out, syntax), args.epochs if turn else 1)
        weights = to_weights(model)
        losses_by_turn.append(compute_losses(model, collect(held_out, weights, args.max_out, syntax), kinds))
        print(f"turn {turn}: mean loss {np.mean(list(losses_by_turn[-1].values())):.4f}, {time.perf_counter() - started:.0f} s", flush=True)
    save_weights(args.out, weights)
    print_table(["kind", "loss"], [[kind, loss] for kind, loss in losses_by_turn[-1].items()])
    settings = {"traces": args.traces, "epochs": args.epochs, "max_out": args.max_out, "seed": args.seed, "tokenizer": args.tokenizer}
    found = {"loss": losses_by_turn[-1], "settings": settings}
    print_document({"benchmark": "learn_mix", **found, **describe_machine("cpu", torch.get_num_threads())})


if __name__ == "__main__":
    run_command(main)
