"""How far from float32 is a model whose products are of 8-bit codes? Do its texts end where llama.cpp ends them?

    python -m benchmarks.fidelity --model M --texts F.jsonl [--texts F.jsonl ...] [--tokens 4000] [--threads N]
        [--against llama [--llama-python PATH] [--llama-gguf F]]
    python -m benchmarks.fidelity --text-ends --model F.gguf --texts F.jsonl [--texts F.jsonl ...] [--limit 40] [--max-tokens 128]

The model reads reference texts (rows with `prompt` or `messages`, and `reference`), and its distributions over each next token of the
references are compared: mean Kullback-Leibler divergence from float32's to int8's, in nats, and the perplexity of each; the same of
llama.cpp on the same token ids. Several files give as many tokens each. With `--text-ends` both write texts from the same prompts: see
`benchmarks/text_ends.py`. Progress goes to standard error, a table and a last line of JSON to standard output.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import common, text_ends
from benchmarks.our_engine import describe_engine, find_gguf_files, run_text
from benchmarks.peers import Peer, add_llama_options, open_llama_passes
from ngramspec import Engine

TITLES = {"float32": "float32", "int8": "int8", "llama": "llama.cpp"}
PIECE = 64  # rows whose logits are held at a time


@dataclass(frozen=True, slots=True)
class ReferenceText:
    """A prompt with its reference."""

    ids: list[int]
    first: int
    """Index of the reference's first token."""


@dataclass(slots=True)
class Sums:
    """Sums over the tokens of all references."""

    kl: float = 0.0
    """Divergence from float32's distributions to these, in nats."""
    loss: float = 0.0
    """Negative logarithms of what these give the tokens."""

    def add(self, exact: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Add rows [n, V] of float32's log-probabilities (float64) and of other logits, and the tokens [n] that follow in the text."""
        other = logits.double().log_softmax(-1)
        self.kl += float((exact.exp() * (exact - other)).sum())
        self.loss -= float(other.gather(1, targets[:, None]).sum())


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    if args.text_ends:
        common.print_document(text_ends.measure(args))
        return
    document = measure(args)
    print_figures(document)
    common.print_document(document)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON document. Raises what `Engine` raises."""
    options = common.get_engine_options(args)
    engines = {name: Engine(args.model, progress=common.print_progress, **options | {"precision": name}) for name in ("float32", "int8")}
    for engine in engines.values():
        engine.close()  # passes run in this thread
    engine = engines["float32"]
    torch.set_num_threads(engine.threads)
    texts = read_texts(args.texts, engine.tokenizer or common.WordTokenizer(engine.vocab_size), args.tokens, engine.max_model_len)
    sums = {name: Sums() for name in engines}
    n_tokens = 0
    with contextlib.ExitStack() as stack:
        if args.against:
            sums["llama"] = Sums()
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ngramspec-logits-")))
            gguf, longest = next(iter(find_gguf_files(args.model)), None), max(len(text.ids) for text in texts)
            llama = stack.enter_context(contextlib.closing(open_llama_passes(args, gguf, longest, every_logit=True)))
        for n, text in enumerate(texts, 1):
            pieces = {name: run_text(engine.runner, text.ids[:-1], text.first - 1, PIECE) for name, engine in engines.items()}
            if args.against:
                pieces["llama"] = read_llama_logits(llama, text, engine.vocab_size, scratch / "logits")
            n_tokens += add_text(text, pieces, sums)
            common.print_progress(
                f"text {n} of {len(texts)}, {n_tokens} tokens: " + "  ".join(f"KL {k} {s.kl / n_tokens:.5f}" for k, s in sums.items())
            )
    document = {
        "model": args.model,
        **make_figures(sums, n_tokens),
        "texts": len(texts),
        "settings": {"texts": [path.name for path in args.texts], "tokens": args.tokens, "against": args.against},
        "exactness": {name: engine.exactness for name, engine in engines.items()},
        "dtype": describe_engine(engine)["dtype"],
        **common.describe_machine(args.device, engine.threads),
    }
    if args.against:
        document["versions"]["llama"] = llama.version
    return document


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.make_parser("fidelity", __doc__)
    common.add_model_options(parser)
    text = "rows with `prompt` or `messages`, and `reference`; may be repeated"
    parser.add_argument("--texts", type=common.parse_file, action="append", required=True, metavar="F.jsonl", help=text)
    parser.add_argument("--tokens", type=common.parse_positive, default=4000, metavar="N", help="of all references together")
    add_llama_options(parser)
    parser.add_argument("--text-ends", action="store_true", help="write texts with llama.cpp, and compare where they end")
    parser.add_argument("--limit", type=common.parse_positive, default=40, metavar="N", help="of --text-ends: rows of each file (40)")
    parser.add_argument("--max-tokens", type=common.parse_positive, default=128, metavar="N", help="of --text-ends: of each text (128)")
    args = parser.parse_args(argv)
    if args.precision != "auto" and not args.text_ends:
        parser.error("--precision: both are compared here; leave it out")
    args.dtype = common.settle_dtype(args.device, args.dtype)
    return args


def read_texts(paths: list[Path], tokenizer: Any, n_tokens: int, max_len: int) -> list[ReferenceText]:
    """Return texts of all files in their order, each file with an equal share of `n_tokens`; longer texts are cut.

    Raises SystemExit if there is nothing to compare.
    """
    texts = []
    for n, path in enumerate(paths):
        left = n_tokens * (n + 1) // len(paths) - n_tokens * n // len(paths)
        for prompt, reference in read_references(path, tokenizer):
            n_reference = min(len(reference), left, max_len - len(prompt))
            if n_reference > 0:
                texts.append(ReferenceText(prompt + reference[:n_reference], len(prompt)))
                left -= n_reference
    if not texts:
        raise SystemExit(f"--texts: no row of {', '.join(path.name for path in paths)} has a reference that fits the model")
    return texts


def read_references(path: Path, tokenizer: Any) -> Iterator[tuple[list[int], list[int]]]:
    """Yield prompts and references of those rows that have one (of several the first), as token ids."""
    for (_, row), prompt in zip(common.iterate_rows(path), common.read_prompts(path, tokenizer), strict=True):
        text = common.get_reference(row)
        if prompt.ids and text:
            yield prompt.ids, list(tokenizer(text, add_special_tokens=False)["input_ids"])


def read_llama_logits(peer: Peer, text: ReferenceText, vocab_size: int, file: Path) -> Iterator[torch.Tensor]:
    """Yield logits as `run_text` yields them, through a file. Raises SystemExit if llama.cpp's model has another vocabulary."""
    answer = peer.ask(ids=text.ids[:-1], first=text.first - 1, file=str(file))
    if answer["vocab"] != vocab_size:
        raise SystemExit(f"--against llama: its model has {answer['vocab']} tokens, ours {vocab_size}")
    rows = np.fromfile(file, np.float32).reshape(-1, vocab_size)
    start = text.first - 1
    while start < len(text.ids) - 1:  # at the same places as `run_text`
        end = min((start // PIECE + 1) * PIECE, len(text.ids) - 1)
        yield torch.from_numpy(rows[start - text.first + 1 : end - text.first + 1])
        start = end


def add_text(text: ReferenceText, pieces: dict[str, Iterator[torch.Tensor]], sums: dict[str, Sums]) -> int:
    """Add a text's logits, in equal pieces by name. Return how many tokens of it were compared."""
    n = text.first
    for logits in zip(*pieces.values(), strict=True):
        by_name = dict(zip(pieces, logits, strict=True))
        exact = by_name["float32"].double().log_softmax(-1)
        targets = torch.tensor(text.ids[n : n + len(exact)])
        for name, each in by_name.items():
            sums[name].add(exact, each, targets)
        n += len(exact)
    assert n == len(text.ids)
    return n - text.first


def make_figures(sums: dict[str, Sums], n_tokens: int) -> dict[str, Any]:
    """Return the figures of the document."""
    kl = {f"kl_{name}": sums[name].kl / n_tokens if name in sums else None for name in ("int8", "llama")}
    perplexity = {f"perplexity_{name}": math.exp(sums[name].loss / n_tokens) if name in sums else None for name in TITLES}
    return {"tokens": n_tokens, **kl, **perplexity}


def print_figures(document: dict[str, Any]) -> None:
    rows = [
        [title, f"{document.get(f'kl_{name}', 0.0):.6f}", f"{perplexity:.4f}", f"{perplexity / document['perplexity_float32']:.4f}"]
        for name, title in TITLES.items()
        if (perplexity := document[f"perplexity_{name}"]) is not None
    ]
    common.print_table(["", "KL to float32, nats", "perplexity", "against float32"], rows)
    print(f"{document['tokens']} tokens of {document['texts']} texts")


if __name__ == "__main__":
    common.run_command(main)
