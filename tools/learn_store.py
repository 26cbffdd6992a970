"""Learn the weights of a datastore's features beside all others, and add them to the weights that the package ships.

The traces are those of `learn_mix`. Every session has a store of one kind:

    own       the files around its requests in an older state: functions missing, lines edited, sentences changed
    both      the same, and the foreign store beside it
    foreign   the foreign store alone, which has nothing to do with the requests

What was learned without a store is held: the states of all other groups, and how they mix where no store speaks. What is learned is what
the store's own states mean, and how all groups mix beside it, beginning with how they mix without. Half of the sessions know the answers
of those before them, as on a server.

    python -m tools.learn_store --corpus DIR... --foreign STORE --out FILE.npz [--traces N] [--epochs E] [--seed S] [--recorded F.jsonl]

The shipped weights: `--corpus` of CPython 3.11's standard library (PSF) and the installed sympy, scipy, numpy, matplotlib, rich, requests,
pygments, fontTools, huggingface_hub, setuptools, mpmath, werkzeug, jinja2 and starlette; `--foreign` of torch, transformers, vllm, mypy,
hypothesis, schemathesis, pydantic, trio, aiohttp, openai, fastapi, selenium and triton; `--recorded` greedy outputs of
SmolLM2-135M-Instruct after prompts made from the same files. Prints the loss per held-out output token, by kind and kind of store, before
and after, and as the last line one JSON document.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import random
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.common import describe_machine, print_document, print_table, run_command
from ngramspec.cli.datastore import load_tokenizer_backend
from ngramspec.datastore import Datastore
from ngramspec.datastore.build import build
from ngramspec.speculative import features, proposer, tree_builder
from ngramspec.speculative.datastore_drafter import DatastoreDrafter
from ngramspec.speculative.drafter import DraftOptions, DraftParams
from ngramspec.speculative.feature_weights import WEIGHTS, load_weights, save_weights
from ngramspec.speculative.features import ExternalTrees
from ngramspec.speculative.syntax import SyntaxTable, open_syntax
from tools import learn_mix
from tools.learn_mix import KINDS, SESSION, Made, Samples

STORES = ("own", "both", "foreign")
FILES = 40  # of a session's own datastore, at most
AGAIN = 2  # requests of a session that are made a second time
BESIDE = 2 * features.SETS // 3  # the first of the weight sets for nodes with a match in a datastore


def age_text(text: str, donor: str, rng: random.Random) -> str:
    """Return a source file as it may have been earlier: some functions not written yet, some lines different."""
    lines = text.splitlines()
    try:
        functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    except (SyntaxError, ValueError, RecursionError):
        functions = []
    for f in sorted(functions, key=lambda f: -f.lineno):
        if rng.random() < 0.6:
            del lines[f.lineno - 1 : f.end_lineno]
    for _ in range(rng.choice((0, 1, 2, 4))):
        if len(lines) > 5:
            lines = learn_mix.edit_lines(lines, donor.splitlines(), rng)
    return "\n".join(lines)


class Store(NamedTuple):
    """The datastores of one session."""

    kind: str
    drafter: DatastoreDrafter


def stores_of(sessions: dict[int, list[str]], foreign: Datastore, tokenizer: str, folder: Path, seed: int) -> dict[int, Store]:
    """Build a datastore for each session, whose requests were drawn from these files [n]."""
    rng, made = random.Random(seed), {}
    backend: Any = load_tokenizer_backend(tokenizer)
    for session, texts in sessions.items():
        kind = rng.choice(STORES) if texts else "foreign"
        named = {"foreign": foreign} if kind != "own" else {}
        if kind != "foreign":
            files = folder / f"files-{session}"
            files.mkdir()
            for i, text in enumerate(texts[:FILES]):
                old = age_text(text, rng.choice(texts), rng) if "def " in text else learn_mix.revise_text(text, rng)
                (files / f"{i}.py").write_text(old or "pass\n", encoding="utf-8")
            build([files], folder / f"store-{session}", backend, tokenizer)
            named["own"] = Datastore.open(folder / f"store-{session}")
        drafter = DatastoreDrafter(named, 1024, similar=False)
        drafter.follows_changes = False
        drafter.wait_until_loaded()
        made[session] = Store(kind, drafter)
    return made


def asked_again(traces: list[Made], rng: random.Random) -> list[Made]:
    """Return the traces, with some requests of a session repeated at its end: the output cache then predicts them fully."""
    out: list[Made] = []
    for _, session in itertools.groupby(traces, key=lambda t: t.session):
        made = list(session)
        out += made + rng.sample(made, min(AGAIN, len(made)))
    return out


def trees_of(drafter: DatastoreDrafter, trace: Made) -> ExternalTrees:
    """Return the datastores' trees at every position of the trace's output, and at its end."""
    text, slots = np.concatenate([trace.prompt, trace.output]), np.arange(len(trace.output) + 1, dtype=np.int32)
    for slot in slots.tolist():
        drafter.begin(slot, text[: len(trace.prompt) + slot])
    drafts = drafter.propose(slots)
    return ExternalTrees(drafts.start, drafts.tokens, drafts.parents, drafts.codes)


def collect(traces: list[Made], stores: dict[int, Store], weights: tree_builder.Weights, max_out: int, syntax: SyntaxTable) -> Samples:
    """Return the samples of all positions with a match in a datastore."""
    parts = []
    tables = proposer.TreeProposer(DraftOptions(vocab_size=len(syntax.classes), max_seqs=1), syntax=syntax, weights=weights)
    position = 0
    for t in traces:
        tenant = str(t.session) if t.session % 2 else None
        tables.begin(0, t.prompt, DraftParams(prediction=t.prediction, tenant=tenant))
        tables._own.enlarge_buffer(0, len(t.output) + 1, tables._contexts)
        samples = learn_mix.follow(tables, t, int(len(t.output) < max_out), position, trees_of(stores[t.session].drafter, t), 1)
        spoken = samples.state[:, features.EXTERNAL] > 0
        parts.append(Samples(*(a[spoken] for a in samples)))
        position += len(t.output) + 1
        tables.end(0)
        if tenant is not None:
            tables.remember(t.output, tenant)
    return Samples(*(np.concatenate(a) for a in zip(*parts, strict=True)))


class DatastoreMix(torch.nn.Module):
    """The mix as `tree_builder.score_candidates` computes it, with a datastore."""

    held: torch.Tensor

    def __init__(self, weights: tree_builder.Weights) -> None:
        super().__init__()
        n = features.EXTERNAL
        self.register_buffer("held", torch.from_numpy(weights.states[:n].astype(np.float32)))
        without, third = torch.from_numpy(weights.mix.astype(np.float32)), BESIDE // 2
        mix = without[:, : n + 1].clone()
        mix[BESIDE:, :n] = without[:third, :n]
        bias = without[:, features.BIAS].clone()
        bias[BESIDE:] = without[:third, features.BIAS]
        self.mix, self.bias = torch.nn.Parameter(mix), torch.nn.Parameter(bias)
        self.own = torch.nn.Parameter(torch.from_numpy(weights.states[n].astype(np.float32)).clip(-4, 4))
        learns = torch.zeros_like(mix)
        learns[BESIDE:] = 1.0
        learns[:, n] = 1.0
        self.mix.register_hook(lambda gradient: gradient * learns)
        self.bias.register_hook(lambda gradient: gradient * learns[:, 0])

    def forward(self, state: torch.Tensor, sets: torch.Tensor) -> torch.Tensor:
        n = features.EXTERNAL
        others = self.held[torch.arange(n), state[:, :n]] * (state[:, :n] > 0)
        z = torch.cat([others, (self.own[state[:, n]] * (state[:, n] > 0)).unsqueeze(1)], 1)
        return (z * self.mix[sets]).sum(1) + self.bias[sets]


def fit(samples: Samples, weights: tree_builder.Weights, epochs: int, size: int = 16384, rate: float = 0.02) -> DatastoreMix:
    """Fit by Adam with a rate that falls to zero."""
    model, n = DatastoreMix(weights), len(samples.set)
    steps = max(epochs * (n // size), 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.001, steps)
    for step in range(steps):
        rows = np.random.default_rng(step).integers(0, n, size)
        state, sets, right = learn_mix.make_batch(samples, rows)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(state, sets), right)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model


def to_weights(model: DatastoreMix, weights: tree_builder.Weights) -> tree_builder.Weights:
    """Return the package's arrays. Those of other drafters are left as they are."""
    states, mix = weights.states.copy(), weights.mix.copy()
    states[features.EXTERNAL], states[features.EXTERNAL, 0] = model.own.detach().numpy(), 0.0
    mix[:, : features.EXTERNAL + 1] = model.mix.detach().numpy()
    mix[:, features.BIAS] = model.bias.detach().numpy()
    return tree_builder.Weights(states, mix)


def compute_losses(weights: tree_builder.Weights, samples: Samples, groups: np.ndarray) -> dict[str, float]:
    """Return the log loss per output position with a match in a datastore, by group of positions; groups [positions] str."""
    model = DatastoreMix(weights)
    with torch.no_grad():
        model.mix.copy_(torch.from_numpy(weights.mix[:, : features.EXTERNAL + 1].astype(np.float32)))
        model.bias.copy_(torch.from_numpy(weights.mix[:, features.BIAS].astype(np.float32)))
        model.own.copy_(torch.from_numpy(weights.states[features.EXTERNAL].astype(np.float32)))
        parts = []
        for i in range(0, len(samples.set), 100_000):
            state, of_sets, right = learn_mix.make_batch(samples, slice(i, i + 100_000))
            parts.append(torch.nn.functional.binary_cross_entropy_with_logits(model(state, of_sets), right, reduction="none").numpy())
    loss = np.concatenate(parts)
    of = groups[samples.position]
    return {
        str(g): round(float(loss[of == g].sum() / max(len(np.unique(samples.position[of == g])), 1)), 4)
        for g in sorted(set(groups.tolist()))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--corpus", nargs="+", type=Path, required=True)
    parser.add_argument("--foreign", type=Path, required=True, metavar="STORE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--base", type=Path, default=WEIGHTS, metavar="FILE.npz", help="what learn_mix wrote; default: the shipped weights")
    parser.add_argument("--recorded", type=Path, metavar="F.jsonl", help="outputs that tools.record wrote")
    parser.add_argument("--traces", type=int, default=2400)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--max-out", type=int, default=256)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--tokenizer", default="smollm2")
    args = parser.parse_args()
    from ngramspec.models.loader import load_tokenizer

    torch.manual_seed(args.seed)
    tokenizer: Any = load_tokenizer(args.tokenizer)
    syntax = open_syntax(tokenizer.backend_tokenizer, len(tokenizer))
    rng = random.Random(args.seed)
    code = learn_mix.read_sources(args.corpus, (".py",))
    prose = learn_mix.read_sources(args.corpus, (".txt", ".rst", ".md", "METADATA"), 2_000_000)
    prose += learn_mix.join_docstrings(rng.sample(code, min(len(code), 600)))
    started = time.perf_counter()
    code_blocks, prose_blocks = (learn_mix.make_blocks(texts, rng) for texts in (code, prose))
    c, p = max(len(code_blocks) // 10, 1), max(len(prose_blocks) // 10, 1)
    foreign, weights = Datastore.open(args.foreign), load_weights(args.base)
    sets: list[tuple[list[Made], Samples, np.ndarray]] = []
    with tempfile.TemporaryDirectory() as folder:
        for i, (blocks, n) in enumerate(
            (((code_blocks[c:], prose_blocks[p:]), args.traces), ((code_blocks[:c], prose_blocks[:p]), args.traces // 6))
        ):
            near: dict[int, list[str]] = {}
            traces = learn_mix.make_traces(*blocks, max(n, SESSION * len(KINDS)), args.seed + i, tokenizer, args.max_out, near)
            traces = asked_again(traces, random.Random(args.seed + i))
            if args.recorded:
                real = learn_mix.read_recorded(args.recorded, args.max_out, 10**6 + 1)
                traces += real[: len(real) // 10] if i else real[len(real) // 10 :]
                near[10**6 + 1] = []
            (Path(folder) / str(i)).mkdir()
            stores = stores_of(near, foreign, args.tokenizer, Path(folder) / str(i), args.seed + i)
            print(f"{len(traces)} traces, {len(stores)} stores, {time.perf_counter() - started:.0f} s", flush=True)
            groups = np.concatenate([np.full(len(t.output) + 1, f"{stores[t.session].kind} {t.kind}") for t in traces])
            sets.append((traces, collect(traces, stores, weights, args.max_out, syntax), groups))
            print(f"{len(sets[-1][1].set)} samples, {time.perf_counter() - started:.0f} s", flush=True)
    before = compute_losses(weights, sets[1][1], sets[1][2])
    weights = to_weights(fit(sets[0][1], weights, args.epochs), weights)
    after = compute_losses(weights, sets[1][1], sets[1][2])
    save_weights(args.out, weights)
    print_table(["store, kind", "before", "after"], [[group, before[group], after[group]] for group in before])
    settings = {"traces": args.traces, "epochs": args.epochs, "max_out": args.max_out, "seed": args.seed, "tokenizer": args.tokenizer}
    document = {"benchmark": "learn_store", "before": before, "after": after, "settings": settings}
    print_document({**document, **describe_machine("cpu", torch.get_num_threads())})


if __name__ == "__main__":
    run_command(main)
