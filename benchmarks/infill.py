"""How much of what is written at a cursor does a model fill in right, by where its prompt begins the middle?

    python -m benchmarks.infill --model F.gguf --prompts F.jsonl [--prompts F.jsonl ...] [--limit 64] [--max-tokens 64]
    python -m benchmarks.infill --model F.gguf --old DIR --new DIR [--limit 64]

`--prompts`: rows with `prompt`, `suffix` and `reference`. `--old`, `--new`: two releases of a library; cursors are put inside of lines of
functions that are new; the rest of the line and of the function is left out of the prompt. Greedy. For each form: the share of cursors at
which the first line, and at which the whole text, is as written, and the share of characters before the first that differs. Progress goes
to standard error, a table and a last line of JSON to standard output.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import common
from benchmarks.our_engine import describe_engine
from benchmarks.session import SUFFIX_LINES, find_new_functions
from ngramspec import Engine, SamplingParams
from ngramspec.prompts.fim import MIDDLE_LINES, Fim, FimOptions

FORMS = {
    "at the cursor": FimOptions(),
    "its line": FimOptions(middle_lines=1, heals=True),
    f"{MIDDLE_LINES} lines": FimOptions(middle_lines=MIDDLE_LINES, heals=True),
    "suffix first": FimOptions("suffix-first", heals=True),
    "suffix first, not healed": FimOptions("suffix-first"),
}
PREFIX_LINES = 60  # before a cursor in a library
FEWEST_LETTERS = 6  # of a line in which a cursor is put, its indentation not counted
BATCH = 8  # texts that are written at a time


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in a text, and what was written there."""

    prefix: str
    reference: str
    suffix: str


class Score(NamedTuple):
    """How well one text was filled in."""

    line: bool
    whole: bool
    characters: float


def read_cursors(path: Path, limit: int) -> list[Cursor]:
    """Return `limit` rows of a file, evenly over it. Of several references the first counts."""
    rows = common.pick_evenly([row for _, row in common.iterate_rows(path)], limit)
    return [Cursor(row["prompt"], common.get_reference(row), row["suffix"]) for row in rows]


def put_cursors(old: Path, new: Path, limit: int, seed: int = 0) -> list[Cursor]:
    """Return places inside of lines of functions that are new in a release. Raises SystemExit if there are none."""
    rng, cursors = random.Random(seed), []
    for function in find_new_functions(old, new, limit):
        lines = function.body.splitlines()
        long = [i for i, line in enumerate(lines) if len(line.lstrip()) >= FEWEST_LETTERS and not line.lstrip().startswith("#")]
        if long:
            n = rng.choice(long)
            line = lines[n]
            at = rng.randrange(len(line) - len(line.lstrip()) + 1, len(line) - 2)
            before = [*function.before.splitlines(), *lines[:n]][-PREFIX_LINES:]
            suffix = "\n" + "\n".join(function.after.split("\n")[:SUFFIX_LINES])
            cursors.append(Cursor("\n".join([*before, line[:at]]), line[at:], suffix))
    return cursors


def score_text(reference: str, text: str) -> Score:
    """Compare what was filled in with what was written."""
    common_chars = next((i for i, (a, b) in enumerate(zip(reference, text, strict=False)) if a != b), min(len(reference), len(text)))
    lines = [each.split("\n")[0] for each in (reference, text)]
    return Score(lines[0] == lines[1], reference.strip("\n") == text.strip("\n"), common_chars / max(len(reference), 1))


def measure(engine: Engine, sets: dict[str, list[Cursor]], max_tokens: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the figures of each set and form. Raises SystemExit if the model has no tokens to fill in the middle with."""
    forms = {name: Fim.detect(engine.tokenizer, options) for name, options in FORMS.items()}
    scores: dict[str, dict[str, list[Score]]] = {name: {form: [] for form in forms} for name in sets}
    for name, cursors in sets.items():
        for first in range(0, len(cursors), BATCH):
            batch = cursors[first : first + BATCH]
            for form, fim in forms.items():
                if fim is None:
                    raise SystemExit("this model has no tokens to fill in the middle with")
                params = [
                    SamplingParams(max_tokens=max_tokens, stop_token_ids=fim.stop_ids, healed=fim.find_unfinished(each.prefix))
                    for each in batch
                ]
                requests = [engine.submit(fim.make_prompt(each.prefix, each.suffix), p) for each, p in zip(batch, params, strict=True)]
                made = [score_text(each.reference, request.result().text) for each, request in zip(batch, requests, strict=True)]
                scores[name][form] += made
            common.print_progress(f"{name}: {first + len(batch)}/{len(cursors)} cursors")
    return {name: {form: _summarise(found) for form, found in of_form.items()} for name, of_form in scores.items()}


def _summarise(scores: Sequence[Score]) -> dict[str, Any]:
    shares = {name: round(statistics.fmean(getattr(each, name) for each in scores), 3) for name in Score._fields}
    return {"cursors": len(scores), **shares}


def parse_args() -> argparse.Namespace:
    parser = common.make_parser("infill", __doc__)
    common.add_model_options(parser)
    parser.add_argument("--prompts", type=common.parse_file, action="append", default=[], metavar="F.jsonl", help="may be repeated")
    parser.add_argument("--old", type=Path, metavar="DIR")
    parser.add_argument("--new", type=Path, metavar="DIR")
    parser.add_argument("--limit", type=common.parse_positive, default=64, metavar="N", help="cursors of each set (64)")
    parser.add_argument("--max-tokens", type=common.parse_positive, default=64, metavar="N", help="of each text (64)")
    args = parser.parse_args()
    if not args.prompts and not (args.old and args.new):
        parser.error("--prompts, or --old and --new, say what is filled in")
    args.dtype = common.settle_dtype(args.device, args.dtype)
    return args


def main() -> None:
    args = parse_args()
    sets = {path.name: read_cursors(path, args.limit) for path in args.prompts}
    if args.old and args.new:
        sets[args.new.name] = put_cursors(args.old, args.new, args.limit)
    with Engine(args.model, progress=common.print_progress, max_seqs=BATCH, **common.get_engine_options(args)) as engine:
        figures = measure(engine, sets, args.max_tokens)
        settings = {"limit": args.limit, "max_tokens": args.max_tokens, "old": args.old and args.old.name}
        machine = common.describe_machine(args.device, engine.threads)
        document = {
            "benchmark": "infill",
            "model": args.model,
            "figures": figures,
            "settings": settings,
            **describe_engine(engine),
            **machine,
        }
    header = ["set", "middle begins", "cursors", "line", "whole", "characters"]
    common.print_table(header, [[name, form, *each.values()] for name, of_form in figures.items() for form, each in of_form.items()])
    common.print_document(document)


if __name__ == "__main__":
    common.run_command(main)
