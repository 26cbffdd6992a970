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

Every output position, and the end of the output, gives one sample per candidate: the states of all groups of evidence and whether the
candidate was right. State values and mixing factors are fitted together, by the log loss. Only those numbers are written.

    python -m benchmarks.learn_mix --corpus DIR... --out FILE.npz [--traces N] [--epochs E] [--seed S] [--tokenizer M]

The shipped weights: `--corpus` of CPython 3.11's standard library (PSF) and the installed sympy, networkx, scipy, numpy, pydantic,
fastapi, hypothesis, transformers, numba, torch, huggingface_hub, pygments, requests, rich, psutil and starlette (BSD, MIT, Apache-2.0),
the defaults otherwise. Prints the loss per held-out output token, by kind, and as the last line one JSON document.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit

from benchmarks.common import environment, print_document, print_table
from ngramspec.drafting import evidence, merge, ngram, proposer

KINDS = ("body", "function", "resume", "edit", "prose", "revise", "chat", "dialogue")
INSTRUCTIONS = (
    "Edit the program below as instructed. Reply with the whole edited program in one ```python block.",
    "Please change this code and give me the complete new version:",
    "Refactor the following file. Return all of it.",
    "Here is my code. Fix the problem described below it and print the full result.",
    "Apply the requested change and output the updated file, nothing else.",
)
CHAT = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
SKIP = {"test", "tests", "idlelib", "lib2to3", "_vendor", "__pycache__", "site-packages"}


def sources(folders: list[Path], suffixes: tuple[str, ...], limit: int = 400_000) -> list[str]:
    """Texts of all files with these suffixes, in a stable order, neither tiny nor huge."""
    texts = []
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            wanted = path.suffix in suffixes or path.name in suffixes
            if wanted and not SKIP.intersection(path.relative_to(folder).parts) and path.is_file() and 1500 < path.stat().st_size < limit:
                texts.append(path.read_text(encoding="utf-8", errors="replace"))
    return texts


def documented(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            yield node


def edited(lines: list[str], donor: list[str], rng: random.Random) -> list[str]:
    """A few mechanical edits, of the sizes that requests to change code ask for."""
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


def revised(text: str, rng: random.Random) -> str:
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


def trace(kind: str, code: list[str], prose: list[str], rng: random.Random) -> tuple[str, str] | None:
    """One (prompt, output) of this kind, or None where the file drawn does not lend itself to it."""
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
        return CHAT.format(rng.choice(("Rewrite this: ", "Improve the text below.\n\n", "Shorten:\n")) + piece), revised(piece, rng)
    text = rng.choice(code)
    lines = text.splitlines()
    if kind == "resume":
        i = rng.randrange(10, max(len(lines) - 20, 11))
        prompt = "\n".join(lines[:i])[-rng.choice((600, 2000, 5000, 12000)) :]
        return prompt + "\n", "\n".join(lines[i : i + 45])
    if kind == "edit":
        i = rng.randrange(max(len(lines) - 40, 1))
        old = lines[i : i + rng.randrange(15, 120)]
        new = "\n".join(edited(old, rng.choice(code).splitlines(), rng))
        ask = rng.choice(INSTRUCTIONS) + "\n\n```python\n" + "\n".join(old) + "\n```\n\nInstruction: " + rng.choice(lines).strip()
        return CHAT.format(ask), "```python\n" + new + "\n```" if rng.random() < 0.5 else new
    try:
        functions = list(documented(ast.parse(text)))
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


class Samples(NamedTuple):
    """One row per candidate."""

    state: np.ndarray  # [N, EXTERNAL] int16, 0: the group is silent
    set: np.ndarray  # [N] int16, weight set
    right: np.ndarray  # [N] bool
    position: np.ndarray  # [N] int32, output position, over all traces


@njit(nogil=True)
def _sample(states, contexts, nodes, outside, weights, work, history, output, ends, samples, n, position):
    """Follow one output token by token, taking samples from row n on -> the next free row."""
    state, keys = states[0], np.empty(len(contexts) + 1, np.uint64)
    for i in range(len(output) + ends):
        seq = ngram.arrays(state, contexts)
        nodes.hits[0] = state[ngram.HITS]
        nodes.place[0, 0], nodes.place[0, 1], nodes.place[0, 2] = state[ngram.FOLLOW], state[ngram.MATCHED], state[ngram.MISSES]
        merge._look(state, seq, nodes, 0, 0, outside, 0, 0, weights, work)
        truth = output[i] if i < len(output) else -1
        for c in range(nodes.n[0]):
            for g in range(samples.state.shape[1]):
                samples.state[n, g] = nodes.cand_state[c, g]
            samples.set[n], samples.right[n], samples.position[n] = nodes.set[0], nodes.cand_token[c] == truth, position + i
            n += 1
        if i == len(output):
            break
        hit = nodes.n[0] > 0 and nodes.cand_token[nodes.top[0]] == truth
        state[ngram.HITS] = evidence.hit_into(state[ngram.HITS], hit)
        place = nodes.place[0]
        at, matched, misses = ngram.follow(seq, state[ngram.LENGTH], place[0], place[1], place[2], truth)
        state[ngram.FOLLOW], state[ngram.MATCHED], state[ngram.MISSES] = at, matched, misses
        ngram.push(state, seq, truth, history, keys)
    return n


def collect(traces: list[tuple[str, list[int], list[int]]], weights: merge.Weights, max_out: int) -> Samples:
    """Samples of all traces (kind, prompt, output). `weights` only say which candidate counts as the predicted one."""
    total = sum(len(output) + 1 for _, _, output in traces)
    rows = total * evidence.WIDTH
    samples = Samples(
        np.empty((rows, evidence.EXTERNAL), np.int16), np.empty(rows, np.int16), np.empty(rows, np.bool_), np.empty(rows, np.int32)
    )
    tables = proposer.Proposer(vocab_size=2**31 - 1, max_seqs=1, weights=weights)
    n = position = 0
    for _, prompt, output in traces:
        tables.begin(0, np.array(prompt, np.int32))
        tables._grow_buffer(0, len(output) + 1)
        whole = len(output) < max_out
        n = _sample(
            tables._states, tables._contexts, tables._nodes, proposer._NO_OUTSIDE, tables.weights, tables._work, tables.history,
            np.array(output, np.int32), int(whole), samples, n, position,
        )  # fmt: skip
        position += len(output) + 1
    return Samples(*(a[:n] for a in samples))


class Mix(torch.nn.Module):
    """The mix as `merge._look` computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.states = torch.nn.Parameter(torch.zeros(evidence.EXTERNAL, evidence.STATES))
        self.mix = torch.nn.Parameter(torch.full((evidence.SETS, evidence.EXTERNAL), 0.3))
        self.bias = torch.nn.Parameter(torch.zeros(evidence.SETS))

    def forward(self, state: torch.Tensor, sets: torch.Tensor) -> torch.Tensor:
        z = self.states[torch.arange(evidence.EXTERNAL), state] * (state > 0)
        return (z * self.mix[sets]).sum(1) + self.bias[sets]


def batch(samples: Samples, rows: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.from_numpy(samples.state[rows].astype(np.int64)),
        torch.from_numpy(samples.set[rows].astype(np.int64)),
        torch.from_numpy(samples.right[rows].astype(np.float32)),
    )


def fit(samples: Samples, epochs: int, size: int = 16384, rate: float = 0.03) -> Mix:
    """Adam with a rate that falls to zero."""
    model, n = Mix(), len(samples.set)
    steps = max(epochs * (n // size), 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.001, steps)
    step = 0
    while step < steps:
        order = np.random.default_rng(step).permutation(n)
        for i in range(0, n - size + 1, size):
            state, sets, right = batch(samples, order[i : i + size])
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(state, sets), right)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
    return model


def losses(model: Mix, samples: Samples, kinds: np.ndarray) -> dict[str, float]:
    """Summed log loss per output position, by kind. kinds [positions] int."""
    out, counts = np.zeros(len(KINDS)), np.bincount(kinds, minlength=len(KINDS))
    with torch.no_grad():
        for i in range(0, len(samples.set), 100_000):
            rows = slice(i, i + 100_000)
            state, sets, right = batch(samples, rows)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(state, sets), right, reduction="none").numpy()
            out += np.bincount(kinds[samples.position[rows]], loss, len(KINDS))
    return {kind: round(float(x / max(c, 1)), 4) for kind, x, c in zip(KINDS, out, counts, strict=True)}


def to_weights(model: Mix) -> merge.Weights:
    """The package's arrays; what external drafters say starts from its plain meaning."""
    weights = proposer.cold_weights()
    weights.states[: evidence.EXTERNAL] = model.states.detach().numpy()
    weights.states[: evidence.EXTERNAL, 0] = 0.0
    weights.mix[:, : evidence.EXTERNAL] = model.mix.detach().numpy()
    weights.mix[:, evidence.BIAS] = model.bias.detach().numpy()
    return weights


def docstrings(texts: list[str]) -> Iterator[str]:
    for text in texts:
        try:
            nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.Module))]
        except (SyntaxError, ValueError, RecursionError):
            continue
        joined = "\n\n".join(d for n in nodes if (d := ast.get_docstring(n)))
        if len(joined) > 3000:
            yield joined


def make(code: list[str], prose: list[str], n: int, seed: int, tokenizer: Any, max_out: int) -> list[tuple[str, list[int], list[int]]]:
    """n traces, the kinds in turn."""
    rng = random.Random(seed)
    traces: list[tuple[str, list[int], list[int]]] = []
    while len(traces) < n:
        kind = KINDS[len(traces) % len(KINDS)]
        made = trace(kind, code, prose, rng)
        if made is None or len(made[1]) < 60:
            continue
        prompt, output = (list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in made)
        if len(output) >= 8:
            traces.append((kind, prompt, output[:max_out]))
    return traces


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--corpus", nargs="+", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--traces", type=int, default=6400)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--max-out", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokenizer", default="smollm2")
    args = parser.parse_args()
    from ngramspec.loading import load_tokenizer

    torch.manual_seed(args.seed)
    tokenizer: Any = load_tokenizer(args.tokenizer)
    rng = random.Random(args.seed)
    code = sources(args.corpus, (".py",))
    prose = sources(args.corpus, (".txt", ".rst", ".md", "METADATA", "topics.py"), 2_000_000)
    prose += docstrings(rng.sample(code, min(len(code), 600)))
    if len(code) < 20 or len(prose) < 20:
        parser.error(f"the corpus has {len(code)} usable Python files and {len(prose)} texts; 20 of each are the least")
    rng.shuffle(code)
    rng.shuffle(prose)
    c, p, started = len(code) // 10, len(prose) // 10, time.perf_counter()
    train = make(code[c:], prose[p:], args.traces, args.seed, tokenizer, args.max_out)
    held_out = make(code[:c], prose[:p], max(args.traces // 12, len(KINDS)), args.seed + 1, tokenizer, args.max_out)
    kinds = np.concatenate([np.full(len(output) + 1, KINDS.index(kind)) for kind, _, output in held_out])
    n_out, spent = sum(len(output) for _, _, output in train), time.perf_counter() - started
    print(f"{len(code)} Python files, {len(prose)} texts -> {n_out} output tokens, {spent:.0f} s", flush=True)
    weights = proposer.cold_weights()
    rows: list[dict[str, float]] = []
    for turn in range(2):  # which tokens counted as predicted is itself evidence: the second turn sees it as the learned mix says
        model = fit(collect(train if turn else train[: len(train) // 2], weights, args.max_out), args.epochs if turn else 1)
        weights = to_weights(model)
        rows.append(losses(model, collect(held_out, weights, args.max_out), kinds))
        print(f"turn {turn}: mean loss {np.mean(list(rows[-1].values())):.4f}, {time.perf_counter() - started:.0f} s", flush=True)
    proposer.save_weights(args.out, weights)
    print_table(["kind", "loss"], [[kind, loss] for kind, loss in rows[-1].items()])
    settings = {"traces": args.traces, "epochs": args.epochs, "max_out": args.max_out, "seed": args.seed, "tokenizer": args.tokenizer}
    print_document({"benchmark": "learn_mix", "loss": rows[-1], "settings": settings, **environment("cpu", torch.get_num_threads())})


if __name__ == "__main__":
    main()
