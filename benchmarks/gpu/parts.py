"""The parts of the GPU benchmark: each takes the plan and gives its figures as it comes by them, so that they are known if it is stopped.

Passes are timed as `step` times them, texts compared and replayed as `decode` does.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import common, decode, step
from benchmarks.common import Prompt, print_progress
from benchmarks.gpu.profile import busy_us, kernel_table, measure_bandwidth, profile_work
from benchmarks.our_engine import OurEngine
from benchmarks.peers import Contender, PeerAbsentError, TimedRun
from benchmarks.recordings import make_library_edits
from ngramspec import Engine, SamplingParams, Stats
from ngramspec.models.loader import load_model, load_tokenizer
from ngramspec.models.random_weights import empty_model
from ngramspec.models.shapes import PREFIX, read_shape
from ngramspec.models.smollm2 import SMOLLM2_PACKAGE
from ngramspec.outputs import Completion
from ngramspec.speculative.drafter import Candidates, SequenceInfo
from ngramspec.speculative.single import SingleDrafter

STATIC, LOOKUP = {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 10}
# transformers' ways to generate; with a static cache on a GPU it compiles its forward by itself.
GENERATE: dict[str, dict[str, Any]] = {
    "hf eager": {},
    "hf static, compiled": STATIC,
    "hf prompt lookup": LOOKUP,
    "hf prompt lookup, static": STATIC | LOOKUP,
}
N_GENERATED, PROMPT_LENGTH = 6, 192
# Passes in a profile.
PROFILED = 5
PROBED_BYTES = 1 << 30  # bytes over which the memory's speed is measured beside a model that leaves no room for more

Figures = dict[str, Any]
Named = Iterator[tuple[str, Figures]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, and how much of it."""

    device: str = "cuda:0"
    dtype: str = "bfloat16"
    large: str = "random:Llama-3.1-8B"
    small: str = "random:SmolLM2-135M"
    code: str = "random:Qwen2.5-Coder-7B"
    hybrid: str = "random:Qwen3.5-0.8B"
    moe: str = "random:Qwen3-30B-A3B"
    tokenizer: str | None = None
    """Model whose tokenizer prompts and traces take; None: the small model's own, and without one words."""
    prompts: Path | None = None
    trace: Path | None = None
    context: int = 1024
    contexts: tuple[int, ...] = (128, 1024, 8192, 32768)
    """Tokens before a pass with one row; those that fit count."""
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    batches: tuple[int, ...] = (1, 8, 32)
    lengths: tuple[int, ...] = (2, 4, 8, 16)
    """Fixed lengths of drafts that the replay is compared with."""
    repeat: int = 30
    n_prompts: int = 240
    """Prompts for identity on the small model; on the others a quarter of it and four more."""
    n_traces: int = 16
    """Replayed one at a time; for the largest batch a quarter as many groups."""
    max_tokens: int = 64
    kv_bytes: int = 8 << 30
    tests: tuple[str, ...] = ("-n", "logical", "tests/backends/cuda")
    """Arguments of pytest."""


def choose_small_model() -> str:
    """Return SmolLM2 with its real weights where its package is installed, else its shape."""
    return "smollm2" if importlib.util.find_spec(SMOLLM2_PACKAGE) else Plan.small


def open_engine(plan: Plan, model: str, **options: Any) -> Engine:
    """Return an engine without a tokenizer: the parts hand it token ids, and measure passes, not text."""
    if not plan.device.startswith("cuda"):
        options.pop("linears", None)
    engine = Engine(model, device=plan.device, dtype=plan.dtype, kv_memory=plan.kv_bytes, progress=print_progress, **options)
    common.finish_start(engine)
    return engine


def release(plan: Plan) -> None:
    """Give back the memory of what is no longer referred to, before the next model is loaded."""
    gc.collect()
    if plan.device.startswith("cuda"):
        torch.cuda.empty_cache()


def tokenizer_for(plan: Plan, model: str, vocab_size: int) -> Any:
    """Return the plan's tokenizer, else the model's own, else words."""
    if plan.tokenizer is not None:
        return load_tokenizer(plan.tokenizer)
    return common.WordTokenizer(vocab_size) if model.startswith(PREFIX) else load_tokenizer(model)


def open_weights(plan: Plan, model: str) -> Any:
    """Open a model whose weights can be counted: those of a shape take no memory, others are loaded."""
    dtype = getattr(torch, plan.dtype)
    return empty_model(read_shape(model), dtype) if model.startswith(PREFIX) else load_model(model, dtype=dtype).model


def read_weights(plan: Plan, model: str) -> tuple[int, Figures]:
    """Return bytes of weights that a pass of the model reads, and how fast the device can."""
    n_bytes = step.count_weight_bytes(open_weights(plan, model))
    found = measure_bandwidth(plan.device, n_bytes)
    release(plan)
    return n_bytes, found


def make_greedy_params(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n, ignore_eos=True)


# ---- tests and passes


def run_tests(plan: Plan) -> Named:
    """Run the tests that need a device."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no", "-rfE", *plan.tests]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print_progress(line.rstrip())
            lines.append(line.strip())
    counts = {word.rstrip("s"): int(n) for n, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", " ".join(lines[-3:]))}
    failures = [line[:300] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    yield "pytest", {"exit_code": process.returncode, **counts, "failures": failures}


def measure_floor(plan: Plan) -> Named:
    """Return how fast the device reads its memory, over as many bytes as the models' weights."""
    for model in dict.fromkeys((plan.large, plan.small, plan.hybrid)):
        yield model, read_weights(plan, model)[1]


def measure_passes(plan: Plan) -> Named:
    """Return milliseconds of a pass by rows and by contexts, against the reading of the weights."""
    for model in dict.fromkeys((plan.large, plan.small, plan.hybrid)):
        n_bytes, read = read_weights(plan, model)
        with open_engine(plan, model) as engine:
            ms = by_rows({"": engine}, plan)[""]
            ratios = {"over_floor": read["floor_ms"], "over_one_row": ms["1"]}
            found = {"context": plan.context, "weight_bytes": n_bytes, "floor_ms": read["floor_ms"], "gb_s": read["gb_s"], "ms": ms}
            found |= {name: {rows: round(t / base, 3) for rows, t in ms.items()} for name, base in ratios.items()}
            yield model, {**found, "by_context": by_context(engine, plan, n_bytes, read["gb_s"]), "props": engine.props()}
        del engine
        release(plan)


def by_context(engine: Engine, plan: Plan, n_bytes: int, gb_s: float) -> dict[str, Figures]:
    """Return median milliseconds of a pass of one row after texts of these lengths, against the reading of weights, keys and values."""
    token_bytes = sum(2 * heads * dim for heads, dim in engine.runner.shapes) * getattr(torch, plan.dtype).itemsize
    fitting = [n for n in plan.contexts if n + 1 < min(engine.max_model_len, engine.runner.pool.n_positions)]
    medians = common.measure_medians({str(n): partial(engine.time_pass, 1, n) for n in fitting}, plan.repeat)
    floors = {str(n): (n_bytes + n * token_bytes) / gb_s / 1e6 for n in fitting}
    return {n: {"ms": round(ms, 4), "over_floor": round(ms / floors[n], 3)} for n, ms in medians.items()}


def by_rows(engines: dict[str, Engine], plan: Plan) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of a pass of each engine with each number of rows, in turns."""
    pairs = list(itertools.product(engines, plan.rows))
    medians = common.measure_medians(
        {f"{name} {rows}": partial(engines[name].time_pass, rows, plan.context) for name, rows in pairs}, plan.repeat
    )
    return {name: {str(rows): round(medians[f"{name} {rows}"], 4) for rows in plan.rows} for name in engines}


def profile_kernels(plan: Plan) -> Named:
    """Return which kernels a pass of the large model consists of."""
    with open_engine(plan, plan.large) as engine:
        for rows in (1, 8):
            run = partial(engine.time_pass, rows, plan.context)
            for _ in range(3):
                run()
            found = profile_work(plan.device, lambda run=run: [run() for _ in range(PROFILED)])
            yield f"{rows} rows", kernel_table(found, PROFILED, len(engine.runner.shapes))


def measure_host(plan: Plan) -> Named:
    """Return the part of a step in which no kernel runs: wall time of undisturbed steps less that of kernels in profiled ones."""
    for model in dict.fromkeys((plan.large, plan.small)):
        with open_engine(plan, model, answers=0) as engine:  # the same text is written again and again
            prompt = np.random.default_rng(0).integers(0, engine.vocab_size, 64).tolist()
            whole = engine.complete(prompt, make_greedy_params(plan.max_tokens), speculation=False).token_ids
            told = make_foretold({tuple(prompt): whole}, engine.vocab_size, tree=True)
            for name, speculation in (("off", False), ("looking", True), ("drafts", True)):
                if name == "drafts":
                    engine.use(speculator=told)
                write = partial(engine.complete, prompt, speculation=speculation, prefix_cache=False)
                yield f"{model}, {name}", host_share(plan, write)
        del engine, write
        release(plan)


def host_share(plan: Plan, write: Callable[..., Completion]) -> Figures:
    """Measure by the difference of a long and a short run, so that the prompt's pass and the start do not count."""
    few, many = plan.max_tokens // 4, plan.max_tokens

    def run(n: int) -> tuple[float, int]:
        done = write(params=make_greedy_params(n))
        return done.duration_s * 1e3, done.stats.passes

    def time_device(n: int) -> tuple[float, int]:
        n_passes: list[int] = []
        found = profile_work(plan.device, lambda: n_passes.append(run(n)[1]))
        return busy_us(found) / 1e3, n_passes[0]

    def per_pass(measure: Any) -> float:
        short, long = measure(few), measure(many)
        return (long[0] - short[0]) / max(long[1] - short[1], 1)

    n_passes = run(many)[1]
    wall_ms = statistics.median(per_pass(run) for _ in range(max(plan.repeat // 6, 3)))
    device_ms = per_pass(time_device)
    return {
        "wall_ms": round(wall_ms, 4),
        "device_ms": round(device_ms, 4),
        "host_ms": round(wall_ms - device_ms, 4),
        "host_share": round(max(wall_ms - device_ms, 0.0) / wall_ms, 4) if wall_ms > 0 else None,
        "passes": n_passes,
        "tokens": many,
    }


def compare_products(plan: Plan) -> Named:
    """Return what row-invariant products cost against the vendor library's own choice."""
    with open_engine(plan, plan.large) as exact, open_engine(plan, plan.large, linears="vendor") as vendor:
        ms = by_rows({"exact": exact, "vendor": vendor}, plan)
        ratio = {rows: round(t / ms["vendor"][rows], 4) for rows, t in ms["exact"].items()}
        found = {"exact_ms": ms["exact"], "vendor_ms": ms["vendor"], "ratio": ratio}
        found |= {"exact": exact.exactness, "vendor": vendor.exactness, "policies": exact.props()["linear_policies"]}
        yield plan.large, found


# ---- texts


class Foretold:
    """Drafts from outputs that are known: a chain, or a tree with a wrong sibling each."""

    name = "foretold"
    LENGTH = 7

    def __init__(self, outputs: Mapping[tuple[int, ...], Sequence[int]], vocab_size: int, *, tree: bool) -> None:
        self.outputs, self.vocab_size, self.width = outputs, vocab_size, 2 if tree else 1
        self.tokens: dict[int, np.ndarray] = {}
        self.known: dict[int, Sequence[int]] = {}
        self.at: dict[int, int] = {}

    def begin(self, seq: int, tokens: np.ndarray) -> None:
        self.tokens[seq] = tokens

    def attach(self, seq: int, info: SequenceInfo) -> None:
        self.known[seq] = self.outputs.get(tuple(self.tokens[seq][: info.n_prompt].tolist()), ())
        self.at[seq] = len(self.tokens[seq]) - info.n_prompt

    def propose(self, seqs: Sequence[int], budget: int) -> list[Candidates]:
        found = []
        for seq in seqs:
            tokens, parents, above, at = list[int](), list[int](), -1, self.at[seq]
            for i, token in enumerate(self.known[seq][at : at + min(self.LENGTH, budget // self.width)], at):
                both = [token, (token + 1) % self.vocab_size][: self.width]
                right = 0 if i % 2 else self.width - 1  # it is the first, or the last
                parents += [above] * self.width
                above = len(tokens) + right
                tokens += both if right == 0 else both[::-1]
            found.append(Candidates(np.array(tokens, np.int32), np.array(parents, np.int32), np.ones(len(tokens), np.float32)))
        return found

    def observe(self, seq: int, accepted: np.ndarray, rejected: np.ndarray) -> None:
        self.at[seq] += len(accepted)

    def end(self, seq: int) -> None:
        self.known[seq] = ()


def make_foretold(outputs: Mapping[tuple[int, ...], Sequence[int]], vocab_size: int, *, tree: bool) -> SingleDrafter:
    """Return a drafter of which much is accepted and some is not: it drafts the outputs with every fifth token replaced."""
    spoiled = {ids: [(t + 7) % vocab_size if i % 5 == 4 else t for i, t in enumerate(text)] for ids, text in outputs.items()}
    drafter = Foretold(spoiled, vocab_size, tree=tree)
    return SingleDrafter(drafter, vocab_size=vocab_size, spec_length=drafter.LENGTH, spec_rows=drafter.LENGTH * drafter.width)


def check_identity(plan: Plan) -> Named:
    """Compare texts with drafts, as chain and as tree, and in batches, with those written one token and one prompt at a time."""
    few = plan.n_prompts // 4 + 4
    for model, n in {plan.hybrid: few, plan.small: plan.n_prompts, plan.large: few}.items():
        with open_engine(plan, model, max_seqs=max(64, *plan.batches)) as engine:
            prompts = identity_prompts(plan, engine, model, n)
            some: dict[str, Any] = {"max_tokens": 3 * plan.max_tokens // 4, "ignore_eos": True}
            seeded = {tuple(ids): SamplingParams(**some, temperature=0.8, top_p=0.95, seed=i) for i, ids in enumerate(prompts)}
            for name, params in (("greedy", dict.fromkeys(seeded, SamplingParams(**some))), ("seeded", seeded)):
                yield f"{model}, {name}", compare_texts(engine, prompts, params, plan.batches)
        del engine
        release(plan)


def identity_prompts(plan: Plan, engine: Engine, model: str, n: int) -> list[list[int]]:
    """Return up to n prompts: for real weights the plan's or else code, for random ones random ids, from 8 to some 400 a prompt."""
    room = engine.max_model_len - plan.max_tokens - 1
    found: list[list[int]] = []
    if not model.startswith(PREFIX):
        tokenizer = tokenizer_for(plan, model, engine.vocab_size)
        code = [trace.prompt for trace in make_library_edits(tokenizer)]
        found = code if plan.prompts is None else [prompt.ids for prompt in common.read_prompts(plan.prompts, tokenizer)]
    found = [ids for ids in found if len(ids) <= room][:n]
    rng = np.random.default_rng(1)
    return found or [rng.integers(0, engine.vocab_size, int(rng.integers(8, min(400, room)))).tolist() for _ in range(n)]


def compare_texts(
    engine: Engine, prompts: list[list[int]], params: Mapping[tuple[int, ...], SamplingParams], batches: Sequence[int]
) -> Figures:
    """Return how many texts are the reference's, by way of drafting and batch."""

    def write(batch: int, **way: Any) -> tuple[list[list[int]], float]:
        """Return the texts, `batch` prompts at a time, and tokens per pass."""
        ours = OurEngine(engine, lambda ids: params[tuple(ids)], **way)
        runs = [ours.complete(group) for group in decode.cut_groups(prompts, batch)]
        return [text for run in runs for text in run.outputs], Stats.sum(run.stats for run in runs).tokens_per_pass

    reference, _ = write(1, speculation=False)
    known = {tuple(ids): text for ids, text in zip(prompts, reference, strict=True)}
    ways: dict[str, dict[str, Any]] = {"off": {"speculation": False}, "on": {}}
    ways |= {name: {"speculator": make_foretold(known, engine.vocab_size, tree=name == "tree")} for name in ("chain", "tree")}
    own = engine.speculator
    identical, accepted = Figures(), Figures()
    for batch, (name, way) in itertools.product(batches, ways.items()):
        if (batch, name) != (1, "off"):
            where = f"{name}, batch {batch}"
            texts, tokens_per_pass = write(batch, **{"speculator": own, **way})
            identical[where] = sum(a == b for a, b in zip(reference, texts, strict=True))
            accepted[where] = round(tokens_per_pass, 3)
            print_progress(f"{where}: {identical[where]} of {len(prompts)} the same")
    engine.use(speculator=own)
    return {
        "prompts": len(prompts),
        "tokens": sum(map(len, reference)),
        "distinct_tokens": len({token for text in reference for token in text}),
        "exactness": engine.exactness,
        "all_identical": all(n == len(prompts) for n in identical.values()),
        "identical": identical,
        "tokens_per_pass": accepted,
    }


def measure_experts(plan: Plan) -> Named:
    """Measure a mixture of experts: milliseconds of a pass by rows, its kernels, whether texts with drafts and in batches are identical."""
    n_bytes = count_chosen_bytes(open_weights(plan, plan.moe))
    release(plan)
    with open_engine(plan, plan.moe, max_seqs=max(64, *plan.batches)) as engine:
        ms = by_rows({"": engine}, plan)[""]
        gb_s = measure_bandwidth(plan.device, min(n_bytes, PROBED_BYTES))["gb_s"]
        found = {"context": plan.context, "chosen_weight_bytes": n_bytes, "floor_ms": round(n_bytes / gb_s / 1e6, 4), "gb_s": gb_s}
        ratios = {name: {rows: round(t / base, 3) for rows, t in ms.items()} for name, base in
                  (("over_floor", n_bytes / gb_s / 1e6), ("over_one_row", ms["1"]))}  # fmt: skip
        yield "passes", {**found, "ms": ms, **ratios, "exactness": engine.exactness, "props": engine.props()}
        for rows in (1, plan.rows[-1]):
            work = profile_work(plan.device, lambda rows=rows: [engine.time_pass(rows, plan.context) for _ in range(PROFILED)])
            yield f"kernels, {rows} rows", kernel_table(work, PROFILED, len(engine.runner.shapes))
        prompts = identity_prompts(plan, engine, plan.moe, plan.n_prompts // 8 + 4)
        params = dict.fromkeys(map(tuple, prompts), make_greedy_params(plan.max_tokens // 2))
        yield "identity", compare_texts(engine, prompts, params, plan.batches)


def count_chosen_bytes(model: Any) -> int:
    """Return the bytes of weights that a pass of one row reads: of stacked experts those that a row chooses."""
    all_bytes, config = step.count_weight_bytes(model), model.config.get_text_config()
    stacked = [p for module in model.modules() for p in module.parameters(recurse=False) if p.dim() == 3 and hasattr(module, "num_experts")]
    return all_bytes - sum(p.nbytes - p.nbytes // len(p) * config.num_experts_per_tok for p in stacked)


def replay(plan: Plan) -> Named:
    """Replay recorded edits on the coding model's shape, speculation on against off and against fixed lengths, alone and in a batch."""
    alone, many = 1, plan.batches[-1]
    arguments = ["--model", plan.code, "--device", plan.device, "--dtype", plan.dtype, "--max-tokens", str(8 * plan.max_tokens)]
    arguments += ["--trace", *([str(plan.trace)] if plan.trace else []), "--fixed-length", ",".join(map(str, plan.lengths))]
    arguments += ["--tokenizer", plan.tokenizer] if plan.tokenizer is not None else []
    limits = {alone: plan.n_traces, many: max(plan.n_traces // 4, 1) * many}
    running = {alone: ["--concurrency", "1"], many: ["--concurrency", str(many), "--per-turn", str(3 * many)]}
    plans = {batch: decode.parse_args([*arguments, *running[batch], "--limit", str(limits[batch])]) for batch in limits}
    with decode.open_engine(plans[many], kv_memory=plan.kv_bytes) as engine:
        for batch, args in plans.items():
            document = decode.measure(engine, args)
            yield f"batch {batch}", {key: value for key, value in document.items() if key not in ("versions", "platform", "device")}


class Generate:
    """transformers' `generate`, greedy and without an end, on a model that is there."""

    def __init__(self, model: Any, max_tokens: int, options: Mapping[str, Any]) -> None:
        self.model = model
        self.options = {"max_new_tokens": max_tokens, "min_new_tokens": max_tokens, "do_sample": False, "pad_token_id": 0, **options}

    def complete(self, prompts: list[list[int]]) -> TimedRun:
        """Raises PeerAbsentError where transformers refuses."""
        outputs, start = [], time.perf_counter()
        try:
            for ids in prompts:
                prompt = torch.tensor([ids], device=self.model.device)
                made = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), **self.options)
                outputs.append(made[0, len(ids) :].tolist())
        except Exception as error:  # whatever it is that this version cannot do
            raise PeerAbsentError(f"{type(error).__name__}: {error}"[:300]) from error
        common.wait_for(str(self.model.device))
        return TimedRun(outputs, time.perf_counter() - start)

    def close(self) -> None:
        """Do nothing: all contenders share the model."""


def generate(plan: Plan) -> Named:
    """Compare with transformers' own generation: the same weights, prompts of the same length (it compiles anew for another)."""
    for model in dict.fromkeys((plan.small, plan.large)):
        stock = load_model(model, dtype=getattr(torch, plan.dtype), device=plan.device).model
        with open_engine(plan, model) as engine:
            ids = [trace.prompt[:PROMPT_LENGTH] for trace in make_library_edits(tokenizer_for(plan, model, engine.vocab_size))]
            whole = [each for each in ids if len(each) == PROMPT_LENGTH][:N_GENERATED]
            params, absent = make_greedy_params(2 * plan.max_tokens), dict[str, str]()
            contenders: dict[str, Contender] = {"off": OurEngine(engine, params, False), "on": OurEngine(engine, params)}
            contenders |= {name: Generate(stock, 2 * plan.max_tokens, options) for name, options in GENERATE.items()}
            decode.warm_up(contenders, absent, whole[:1])
            runs = decode.compare(contenders, absent, [Prompt(str(n), each) for n, each in enumerate(whole)], 1)
            yield model, {"prompts": len(whole), **decode.make_figures(runs, absent, sampled=False)}
        del stock, engine, contenders
        release(plan)
