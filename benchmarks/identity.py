"""Is the text the same, whatever decodes it?

    python -m benchmarks.identity --model M --prompts F.jsonl [--prompts F.jsonl ...] [--limit N] [--max-tokens K]
        [--temperature T --seed S] [--modes off@8,on@1,on@8,off@1] [--log F.jsonl] [--threads N]

Every prompt is completed in every mode: speculation off or on, as many prompts at a time as the mode says. The first mode is what the
others are compared with. `--log` keeps each text's digest as it is done, and a later call with the same settings goes on from there.
Progress goes to standard error, a table and a last line of JSON to standard output; the exit status is 1 where a text differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import common
from benchmarks.common import Prompt
from ngramspec import Engine, SamplingParams


class Mode(NamedTuple):
    speculation: bool
    concurrency: int

    def __str__(self) -> str:
        return f"{'on' if self.speculation else 'off'}@{self.concurrency}"


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    with Engine(args.model, threads=args.threads, device=args.device, dtype=args.dtype, max_seqs=64, progress=say) as engine:
        document = measure(engine, args)
    rows = [[name, n, *(row[str(mode)] for mode in args.modes[1:])] for name, row in document["sets"].items() for n in [row["prompts"]]]
    common.print_table(["", "prompts", *(f"{mode} as {args.modes[0]}" for mode in args.modes[1:])], rows)
    common.print_document(document)
    sys.exit(not document["identical"])


def measure(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    log = Log(args.log, {"model": args.model, "max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed})
    sets = {path.stem: _fitting(path, engine, args) for path in args.prompts}
    for mode in args.modes:
        for name, prompts in sets.items():
            todo = [prompt for prompt in prompts if (str(mode), name, prompt.name) not in log.digests]
            for i in range(0, len(todo), mode.concurrency):
                group = todo[i : i + mode.concurrency]
                done = engine.complete([p.ids for p in group], params, speculation=mode.speculation, prefix_cache=False)
                for prompt, completion in zip(group, done, strict=True):
                    log.add((str(mode), name, prompt.name), common.digest([completion.token_ids]), len(completion.token_ids))
                say(f"{mode} {name}: {i + len(group)}/{len(todo)}, {log.differing(args.modes[0])} differ")
    result = {}
    for name, prompts in sets.items():
        found = {str(mode): [log.digests[str(mode), name, prompt.name] for prompt in prompts] for mode in args.modes}
        same = {mode: sum(a == b for a, b in zip(found[str(args.modes[0])], digests, strict=True)) for mode, digests in found.items()}
        result[name] = {"prompts": len(prompts), **same}
    return {
        "model": args.model,
        "identical": all(row[str(mode)] == row["prompts"] for row in result.values() for mode in args.modes),
        "tokens": sum(log.tokens.values()),
        "sets": result,
        "settings": {"modes": [str(mode) for mode in args.modes], "limit": args.limit, **log.settings},
        "exactness": engine.exactness,
        **common.environment(args.device, engine.threads),
    }


class Log:
    """Digests of the texts that are done, by (mode, set, prompt); in a file where there is one."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        """Raises SystemExit where the file was written with other settings."""
        self.settings, self.digests, self.tokens = settings, dict[tuple[str, str, str], str](), dict[tuple[str, str, str], int]()
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        if lines and json.loads(lines[0]) != settings:
            raise SystemExit(f"--log: {path} was written with {lines[0]}")
        for line in lines[1:]:
            mode, name, prompt, digest, n = json.loads(line)
            self.digests[mode, name, prompt], self.tokens[mode, name, prompt] = digest, n
        self._file = None if path is None else path.open("a")
        if self._file is not None and not lines:
            print(json.dumps(settings), file=self._file, flush=True)

    def add(self, key: tuple[str, str, str], digest: str, n_tokens: int) -> None:
        self.digests[key], self.tokens[key] = digest, n_tokens
        if self._file is not None:
            print(json.dumps([*key, digest, n_tokens]), file=self._file, flush=True)

    def differing(self, reference: Mode) -> int:
        """Texts that are not those of the reference, as far as both are known."""
        return sum(self.digests.get((str(reference), *key[1:]), digest) != digest for key, digest in self.digests.items())


def _fitting(path: Path, engine: Engine, args: argparse.Namespace) -> list[Prompt]:
    prompts = common.read_prompts(path, engine.tokenizer, args.limit)
    return [prompt for prompt in prompts if len(prompt.ids) + args.max_tokens <= engine.max_model_len]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.identity", description=(__doc__ or "").split("\n")[0])
    common.model_options(parser)
    parser.add_argument("--prompts", type=Path, action="append", required=True, metavar="F.jsonl", help="rows with `prompt` or `messages`")
    parser.add_argument("--limit", type=common.positive, metavar="N", help="only the first N prompts of each file")
    parser.add_argument("--max-tokens", type=common.positive, default=128, metavar="K")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--modes", type=modes, default=modes("off@8,on@1,on@8,off@1"), metavar="off@8,on@1,...", help="what is compared")
    parser.add_argument("--log", type=Path, metavar="F.jsonl", help="keep what is done here, and go on from it")
    args = parser.parse_args(argv)
    for path in args.prompts:
        if not path.is_file():
            parser.error(f"--prompts: there is no file {str(path)!r}")
    args.dtype = common.settle_dtype(args.device, args.dtype)
    return args


def modes(text: str) -> list[Mode]:
    found = []
    for name in text.split(","):
        state, _, count = name.strip().partition("@")
        if state not in ("on", "off") or not count.isdecimal() or int(count) < 1:
            raise argparse.ArgumentTypeError(f"a mode is on@N or off@N, N prompts at a time, got {name!r}")
        found.append(Mode(state == "on", int(count)))
    return found


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
