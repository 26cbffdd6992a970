"""How far from float32 is a model whose products are of 8-bit codes?

    python -m benchmarks.fidelity --model M --texts F.jsonl [--texts F.jsonl ...] [--tokens 4000] [--threads N]
        [--against llama [--llama-python PATH] [--llama-gguf F]]

The model reads reference texts (rows with `prompt` or `messages`, and `reference`), and its distributions over each next token of the
references are compared: mean Kullback-Leibler divergence from float32's to int8's, in nats, and the perplexity of each; the same of
llama.cpp on the same token ids. Several files give as many tokens each. Progress goes to standard error, a table and a last line of JSON to
standard output.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import common
from benchmarks.ours import described, gguf_files, text_logits
from benchmarks.peers import Peer, PeerAbsentError, llama_options, open_llama
from ngramspec import Engine

NAMES = {"float32": "float32", "int8": "int8", "llama": "llama.cpp"}
PIECE = 64
"""Rows whose logits are held at a time."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt with its reference."""

    ids: list[int]
    first: int
    """Index of the reference's first token."""


@dataclass(slots=True)
class Sums:
    """Over the tokens of all references."""

    kl: float = 0.0
    """Of float32's distributions to these, in nats."""
    loss: float = 0.0
    """Negative logarithms of what these give the tokens."""

    def add(self, exact: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Rows [n, V] of float32's log-probabilities (float64) and of other logits, and the tokens [n] that follow in the text."""
        other = logits.double().log_softmax(-1)
        self.kl += float((exact.exp() * (exact - other)).sum())
        self.loss -= float(other.gather(1, targets[:, None]).sum())


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    document = measure(args)
    show(document)
    common.print_document(document)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The JSON document. Raises what `Engine` raises."""
    options = common.engine_options(args)
    engines = {name: Engine(args.model, progress=common.say, **options | {"precision": name}) for name in ("float32", "int8")}
    for engine in engines.values():
        engine.close()  # passes run in this thread
    engine = engines["float32"]
    torch.set_num_threads(engine.threads)
    texts = read_texts(args.texts, engine.tokenizer or common.Words(engine.vocab_size), args.tokens, engine.max_model_len)
    sums = {name: Sums() for name in engines}
    n_tokens = 0
    with contextlib.ExitStack() as stack:
        if args.against:
            sums["llama"] = Sums()
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ngramspec-logits-")))
            llama = stack.enter_context(contextlib.closing(llama_peer(args, max(len(text.ids) for text in texts))))
        for n, text in enumerate(texts, 1):
            pieces = {name: text_logits(engine.runner, text.ids[:-1], text.first - 1, PIECE) for name, engine in engines.items()}
            if args.against:
                pieces["llama"] = llama_logits(llama, text, engine.vocab_size, scratch / "logits")
            n_tokens += compare(text, pieces, sums)
            common.say(
                f"text {n} of {len(texts)}, {n_tokens} tokens: " + "  ".join(f"KL {k} {s.kl / n_tokens:.5f}" for k, s in sums.items())
            )
    document = {
        "model": args.model,
        **figures(sums, n_tokens),
        "texts": len(texts),
        "settings": {"texts": [path.name for path in args.texts], "tokens": args.tokens, "against": args.against},
        "exactness": {name: engine.exactness for name, engine in engines.items()},
        "dtype": described(engine)["dtype"],
        **common.environment(args.device, engine.threads),
    }
    if args.against:
        document["versions"]["llama"] = llama.version
    return document


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.new_parser("fidelity", __doc__)
    common.model_options(parser)
    text = "rows with `prompt` or `messages`, and `reference`; may be repeated"
    parser.add_argument("--texts", type=common.file, action="append", required=True, metavar="F.jsonl", help=text)
    parser.add_argument("--tokens", type=common.positive, default=4000, metavar="N", help="of all references together")
    llama_options(parser)
    args = parser.parse_args(argv)
    if args.precision != "auto":
        parser.error("--precision: both are compared here; leave it out")
    args.dtype = common.settle_dtype(args.device, args.dtype)
    return args


def read_texts(paths: list[Path], tokenizer: Any, n_tokens: int, max_len: int) -> list[Text]:
    """Texts of all files in their order, each with an equal share of `n_tokens` reference tokens if it has them; longer texts are cut.

    Raises SystemExit where there is nothing to compare.
    """
    texts = []
    for n, path in enumerate(paths):
        left = n_tokens * (n + 1) // len(paths) - n_tokens * n // len(paths)
        for prompt, reference in references(path, tokenizer):
            n_reference = min(len(reference), left, max_len - len(prompt))
            if n_reference > 0:
                texts.append(Text(prompt + reference[:n_reference], len(prompt)))
                left -= n_reference
    if not texts:
        raise SystemExit(f"--texts: no row of {', '.join(path.name for path in paths)} has a reference that fits the model")
    return texts


def references(path: Path, tokenizer: Any) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts and references of those rows that have one (of several the first), as token ids."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    for row, prompt in zip(rows, common.read_prompts(path, tokenizer), strict=True):
        reference = row.get("reference") or ""
        text = reference if isinstance(reference, str) else next(filter(None, reference), "")
        if prompt.ids and text:
            yield prompt.ids, list(tokenizer(text, add_special_tokens=False)["input_ids"])


def llama_peer(args: argparse.Namespace, max_len: int) -> Peer:
    gguf: Path | None = args.llama_gguf or next(iter(gguf_files(args.model)), None)
    settings = {"threads": args.threads or torch.get_num_threads(), "max_len": max_len, "every_logit": True}
    try:
        return open_llama(args.llama_python, "passes", gguf, settings)
    except PeerAbsentError as error:
        raise SystemExit(f"--against llama: {error}") from error


def llama_logits(peer: Peer, text: Text, vocab_size: int, file: Path) -> Iterator[torch.Tensor]:
    """As `text_logits` yields them, through a file. Raises SystemExit where llama.cpp's model has another vocabulary."""
    answer = peer.ask(ids=text.ids[:-1], first=text.first - 1, file=str(file))
    if answer["vocab"] != vocab_size:
        raise SystemExit(f"--against llama: its model has {answer['vocab']} tokens, ours {vocab_size}")
    rows = np.fromfile(file, np.float32).reshape(-1, vocab_size)
    start = text.first - 1
    while start < len(text.ids) - 1:  # at the same places as `text_logits`
        end = min((start // PIECE + 1) * PIECE, len(text.ids) - 1)
        yield torch.from_numpy(rows[start - text.first + 1 : end - text.first + 1])
        start = end


def compare(text: Text, pieces: dict[str, Iterator[torch.Tensor]], sums: dict[str, Sums]) -> int:
    """Add a text's logits, in equal pieces by name; returns how many tokens of it were compared."""
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


def figures(sums: dict[str, Sums], n_tokens: int) -> dict[str, Any]:
    """The contract's part of the JSON document."""
    kl = {f"kl_{name}": sums[name].kl / n_tokens if name in sums else None for name in ("int8", "llama")}
    perplexity = {f"perplexity_{name}": math.exp(sums[name].loss / n_tokens) if name in sums else None for name in NAMES}
    return {"tokens": n_tokens, **kl, **perplexity}


def show(document: dict[str, Any]) -> None:
    rows = [
        [title, f"{document.get(f'kl_{name}', 0.0):.6f}", f"{perplexity:.4f}", f"{perplexity / document['perplexity_float32']:.4f}"]
        for name, title in NAMES.items()
        if (perplexity := document[f"perplexity_{name}"]) is not None
    ]
    common.print_table(["", "KL to float32, nats", "perplexity", "against float32"], rows)
    print(f"{document['tokens']} tokens of {document['texts']} texts")


if __name__ == "__main__":
    main()
