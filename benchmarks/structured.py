"""How much faster is JSON that follows a schema, is it valid, and is the text the same?

    python -m benchmarks.structured --model M [--device cpu|cuda:N] [--dtype D] --prompts F.jsonl [--limit N] [--max-tokens K]
        [--temperature T --seed S] [--precision auto|int8|float32]

A row has `prompt` or `messages`, and a JSON `schema`; without one, it is made from the functions that its system message lists, or from its
`reference`. Strings, lists and numbers are bounded, so that a text can come to its end.

Every prompt is completed with speculation off, with drafts except forced tokens, and with all, in turns. A rate counts
generated tokens over the whole time from the prompt to the last of them; `decoding_speedup` leaves out the time to the first one, which
no draft shortens. `valid`: texts that fit their schema, by jsonschema_rs;
`identical`: the same tokens in all three; `forced_share`: accepted tokens that the grammar foresaw, of all; `mask_ms`: what the grammar
takes for a row (its mask, applied, and the step to the next token), replayed over the texts. With --micro no model runs: `mask_ms` is
measured on synthetic vocabularies of 49k and 152k tokens, over JSON that random choices among the allowed tokens write. Progress goes to
standard error, a table and a last line of JSON to standard output.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from benchmarks import common
from benchmarks.common import print_progress
from benchmarks.decode import find_median_ratio, find_rate
from benchmarks.our_engine import OurEngine, describe_engine, make_fresh_drafts
from benchmarks.peers import TimedRun
from ngramspec import Engine, Grammar, SamplingParams, Stats
from ngramspec.grammar.llguidance import Grammars
from ngramspec.sampling.sampler import apply_mask
from ngramspec.tokenizer.encode import Encoding

# Most characters, most members, greatest number.
STRING, LIST, NUMBER = 160, 6, 1_000_000
SIZES, ROWS = (49_152, 152_064), 2000
# Such as a call of a tool.
CALL = {
    "type": "object",
    "properties": {
        "name": {"enum": ["search", "open", "write"]},
        "arguments": {
            "type": "object",
            "properties": {
                "path": {"type": "string", "maxLength": STRING},
                "lines": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": NUMBER}, "maxItems": LIST},
                "text": {"type": "string"},
            },
            "required": ["path", "lines", "text"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
SETTINGS = ("limit", "max_tokens", "temperature", "seed", "precision")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.micro:
        document = measure_masks(args.seed)
        common.print_table(["vocabulary", "rows", "p50 ms", "p99 ms"], [list(each.values()) for each in document["vocabularies"]])
        common.print_document(document)
        return
    options = common.get_engine_options(args)
    with Engine(args.model, linears=args.linears, progress=print_progress, **options) as engine:
        document = measure(engine, args)
    header = [
        "",
        "prompts",
        "valid",
        "identical",
        "off tok/s",
        "without tok/s",
        "on tok/s",
        "speedup",
        "by foresight",
        "forced",
        "p50 ms",
        "p99 ms",
    ]
    of = ["prompts", "valid", "identical", "tok_s_off", "tok_s_without", "tok_s_on", "speedup", "by_foresight", "forced_share"]
    common.print_table(header, [[document["file"], *(document[name] for name in of), *document["mask_ms"].values()]])
    common.print_document(document)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.make_parser("structured", __doc__)
    common.add_model_options(parser, required=False)
    common.add_linears_option(parser)
    add = parser.add_argument
    add(
        "--prompts",
        type=common.parse_file,
        metavar="F.jsonl",
        help="rows with `prompt` or `messages`, and a schema or a reference",
    )
    add("--limit", type=common.parse_positive, metavar="N", help="only the first N prompts")
    add("--max-tokens", type=common.parse_positive, default=512, metavar="K", help="default 512")
    add("--temperature", type=common.parse_number, default=0.0, metavar="T", help="0, the default, is greedy")
    add("--seed", type=int, default=0, metavar="S", help="of sampling")
    add("--micro", action="store_true", help="only what a row of the grammar takes, by size of the vocabulary")
    args = parser.parse_args(argv)
    if not args.micro and (args.model is None or args.prompts is None):
        parser.error("--model and --prompts are required, or --micro")
    args.dtype = common.settle_dtype(args.device, args.dtype)
    return args


def measure(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON document of a comparison on this engine."""
    common.finish_start(engine)
    prompts = common.read_prompts(args.prompts, engine.tokenizer, args.limit)
    schemas = [schema_of(row) for _, row in itertools.islice(common.iterate_rows(args.prompts), len(prompts))]
    fitting = [i for i, prompt in enumerate(prompts) if len(prompt.ids) + args.max_tokens <= engine.max_model_len]
    if not fitting:
        raise SystemExit(f"no prompt fits in {engine.max_model_len} tokens beside --max-tokens {args.max_tokens}")
    ids, schemas = [prompts[i].ids for i in fitting], [schemas[i] for i in fitting]
    params = {
        tuple(each): SamplingParams(
            max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed, grammar=Grammar.json_schema(schema)
        )
        for each, schema in zip(ids, schemas, strict=True)
    }
    for each in params.values():
        engine.compile_grammar(each.grammar)  # once for each form of answer, not for each request

    def make_contender(speculation: bool, forced: bool) -> OurEngine:
        drafts = make_fresh_drafts(engine, 64)  # nothing that one has learned helps another
        return OurEngine(engine, lambda prompt: params[tuple(prompt)], speculation, speculator=drafts, drafts_forced_tokens=forced)

    ways = {"off": (False, False), "without": (True, False), "on": (True, True)}
    for way in ways.values():  # what is made at a first call; the drafts that know this answer are not used again
        make_contender(*way).complete([ids[0]])
    contenders = {name: make_contender(*way) for name, way in ways.items()}
    runs: dict[str, list[TimedRun]] = {name: [] for name in contenders}
    for i, order in enumerate(common.order_turns(list(contenders), len(ids))):
        for name in order:
            runs[name].append(contenders[name].complete([ids[i]]))
        print_progress(f"{i + 1}/{len(ids)}: " + ", ".join(f"{name} {runs[name][-1].seconds:.2f} s" for name in contenders))
    outputs = [run.outputs[0] for run in runs["on"]]
    stats = Stats.sum(run.stats for run in runs["on"])
    rates = {name: find_rate(made) for name, made in runs.items()}
    return {
        "model": args.model,
        "file": args.prompts.name,
        "prompts": len(ids),
        "skipped": len(prompts) - len(ids),
        "valid": sum(is_valid(schema, text_of(engine, output)) for schema, output in zip(schemas, outputs, strict=True)),
        "identical": sum(len({str(runs[name][i].outputs) for name in runs}) == 1 for i in range(len(ids))),
        "tok_s_off": round(rates["off"], 1),
        "tok_s_without": round(rates["without"], 1),
        "tok_s_on": round(rates["on"], 1),
        "speedup": round(rates["on"] / rates["off"], 3),
        "median_speedup": round(find_median_ratio(runs["on"], runs["off"]), 3),
        "decoding_speedup": round(decoding_s(runs["off"]) / decoding_s(runs["on"]), 3),
        "by_foresight": round(rates["on"] / rates["without"], 3),
        "forced_share": round(stats.accepted_by_source.get("grammar", 0) / max(stats.tokens, 1), 3),
        "mask_ms": mask_ms(engine, [params[tuple(each)].grammar for each in ids], outputs),
        "settings": {name: getattr(args, name) for name in SETTINGS},
        **describe_engine(engine),
        **common.describe_machine(args.device, engine.threads),
    }


def decoding_s(runs: list[TimedRun]) -> float:
    """Return the seconds from the first token to the last."""
    return max(sum(run.seconds - run.prompt_s for run in runs), 1e-9)


def text_of(engine: Engine, output: list[int]) -> str:
    return str(engine.tokenizer.decode(output, skip_special_tokens=True))


def is_valid(schema: Any, text: str) -> bool:
    import jsonschema_rs

    try:
        return bool(jsonschema_rs.is_valid(schema, json.loads(text)))
    except ValueError:
        return False


def mask_ms(engine: Engine, grammars: list[Any], outputs: list[list[int]]) -> dict[str, float]:
    """Measure all rows of all texts."""
    row, took = np.zeros(engine.vocab_size, np.float32), []
    for grammar, output in zip(grammars, outputs, strict=True):
        constraint = engine.compile_grammar(grammar)
        for token in output:
            start = time.perf_counter()
            apply_mask(row, constraint.mask())
            constraint.accept(token)
            took.append((time.perf_counter() - start) * 1e3)
    return compute_percentiles(took)


def compute_percentiles(took: list[float]) -> dict[str, float]:
    return {"p50": round(float(np.percentile(took, 50)), 4), "p99": round(float(np.percentile(took, 99)), 4)}


# ------------------------------------------------------------------ by size of the vocabulary


def measure_masks(seed: int, sizes: Sequence[int] = SIZES, rows: int = ROWS) -> dict[str, Any]:
    """Return the JSON document of `--micro`."""
    found = []
    for size in sizes:
        print_progress(f"a vocabulary of {size:,} tokens")
        grammars = Grammars(Encoding(make_tokenizer(size, seed), size), [size - 1])
        found.append({"vocabulary": size, "rows": rows, **compute_percentiles(row_times(grammars, size, seed, rows))})
    return {"vocabularies": found, "settings": {"seed": seed}, **common.describe_machine("cpu", 1)}


def make_tokenizer(size: int, seed: int) -> Any:
    """Return a tokenizer of bytes and of merges at random, lengths as those of trained ones, with an end of text as the last id."""
    random = np.random.default_rng(seed)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab, merges = {letter: i for i, letter in enumerate(alphabet)}, []
    common_letters = [*"etaoinsrhldcumfpgwybvkxjqz_\"':,{}[]0123456789", "\u0120"]  # the last is a blank
    parts = list(common_letters)
    while len(vocab) < size - 1:
        left = parts[int(len(parts) * random.random() ** 2)]
        right = parts[int(len(parts) * random.random() ** 3)]
        if len(left + right) <= 16 and left + right not in vocab and not right.startswith("\u0120"):
            vocab[left + right] = len(vocab)
            merges.append((left, right))
            parts.append(left + right)
    backend = Tokenizer(BPE(vocab, merges))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def row_times(grammars: Grammars, size: int, seed: int, rows: int) -> list[float]:
    """Return milliseconds of the thread's own time for each row, of texts that begin anew where they are whole."""
    random, row, took = np.random.default_rng(seed), np.zeros(size, np.float32), []
    compiled = [grammars.compile(Grammar.json_schema(schema)) for schema in (CALL, {"type": "object"})]
    apply_mask(row, compiled[0].mask())  # is compiled
    constraint = compiled[0].fork()
    while len(took) < rows:
        start = time.thread_time()
        mask = constraint.mask()
        apply_mask(row, mask)
        took.append((time.thread_time() - start) * 1e3)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: size - 1])
        if len(allowed) == 0 or random.random() < 0.01:
            constraint = compiled[len(took) % 2].fork()
            continue
        token = int(random.choice(allowed))
        start = time.thread_time()
        constraint.accept(token)
        took[-1] += (time.thread_time() - start) * 1e3
    return took


# ------------------------------------------------------------------ schemas


def schema_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a row's answer."""
    if isinstance(row.get("schema"), dict):
        return dict(row["schema"])
    written = row["reference"]
    try:
        reference = json.loads(written)
    except (TypeError, ValueError):
        return make_object_schema({"answer": {"type": "string", "minLength": 1, "maxLength": STRING}})
    if (functions := functions_of(row)) and isinstance(reference, list):
        calls = [
            make_object_schema({"name": {"const": each["name"]}, "arguments": bound_schema(each.get("parameters") or {})})
            for each in functions
        ]
        return {"type": "array", "minItems": 1, "maxItems": max(len(reference), 1), "items": {"anyOf": calls}}
    return infer_schema(reference)


def functions_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return those that the system message lists."""
    text = next((message["content"] for message in row.get("messages", ()) if message["role"] == "system"), "")
    try:
        listed = json.JSONDecoder().raw_decode(text[text.index("[") :])[0]
    except ValueError:
        return []
    return [each for each in listed if isinstance(each, dict) and "name" in each]


def make_object_schema(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def infer_schema(value: Any) -> dict[str, Any]:
    """Return what has the form of this value: its keys, its types, and twice its lengths."""
    match value:
        case dict():
            return make_object_schema({key: infer_schema(each) for key, each in value.items()})
        case list():
            return {"type": "array", "items": infer_schema(value[0]) if value else {"type": "null"}, "maxItems": 2 * len(value)}
        case str():
            return {"type": "string", "maxLength": min(2 * len(value) + 8, 2 * STRING)}
        case bool() | None:
            return {"type": "boolean"}
    return {"type": "integer" if isinstance(value, int) else "number", "minimum": -NUMBER, "maximum": NUMBER}


def bound_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a function's parameters as they are declared there, in JSON Schema's words and with an end."""
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return {"enum": schema["enum"]}
    match schema.get("type"):
        case "dict" | "object":
            known = {name: bound_schema(each) for name, each in (schema.get("properties") or {}).items() if isinstance(each, dict)}
            return make_object_schema(known, [name for name in schema.get("required") or [] if name in known])
        case "array" | "tuple":
            return {"type": "array", "items": bound_schema(schema.get("items") or {}), "maxItems": LIST}
        case "integer":
            return {"type": "integer", "minimum": -NUMBER, "maximum": NUMBER}
        case "float" | "number":
            return {"type": "integer", "minimum": -NUMBER, "maximum": NUMBER}
        case "boolean":
            return {"type": "boolean"}
    return {"type": "string", "maxLength": STRING}


if __name__ == "__main__":
    common.run_command(main)
