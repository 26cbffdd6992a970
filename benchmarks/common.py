"""What the benchmarks share: options, prompts from files, measures in turns, results kept on disk, the machine in words, the last line.

A JSONL row or a seed enters, token ids leave. Knows tokenizers, nothing of engines or peers.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import hashlib
import heapq
import importlib.metadata
import inspect
import json
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import textwrap
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

import ngramspec
from ngramspec.outputs import Completion

SLOPES = {"flat": 0.005, "steep": 0.04}
"""Cost of a row as a share of a pass: a large GPU, a CPU of two cores."""
PACKAGES = ("torch", "transformers", "numpy", "numba")
DTYPES = ("float32", "bfloat16", "float16")
PRECISIONS = ("auto", "int8", "float32")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a contender is given."""

    name: str
    ids: list[int]
    output: list[int] | None = None
    """What is to be written, where that is known."""


class Words:
    """Stands in for a tokenizer where there is none: a word, a run of blanks or a sign is a token, its id a hash. Nothing decodes it."""

    all_special_ids: tuple[int, ...] = ()
    chat_template = "words"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [zlib.crc32(piece.encode()) % self.vocab_size for piece in re.findall(r"\w+|\s+|[^\w\s]", text)]}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "\n".join(message["content"] for message in messages) + "\n"

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(self.vocab_size)}

    def batch_decode(self, batch: list[list[int]]) -> list[str]:
        return [" ".join(map(str, ids)) for ids in batch]


def model_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """`--model` or `--random-weights`, either as `args.model`, where it runs, and how. See `settle_dtype` and `engine_options`."""
    from ngramspec.models.shapes import PREFIX, SHAPES

    model = parser.add_mutually_exclusive_group(required=required)
    model.add_argument("--model", help="folder, hub name, GGUF file, smollm2, or random:CONFIG")
    model.add_argument(
        "--random-weights",
        dest="model",
        type=lambda name: PREFIX + name,
        metavar="CONFIG",
        help=f"random weights in the shape of {', '.join(SHAPES)}, or of a config.json",
    )
    parser.add_argument("--device", type=device, default="cpu", metavar="cpu|cuda:N")
    parser.add_argument("--dtype", choices=DTYPES, help="default float32 on the CPU, bfloat16 on CUDA")
    parser.add_argument("--threads", type=positive, metavar="N", help="of everybody; default all cores")
    text = "of products with quantised weights; auto, the default: int8 where weights were quantised in blocks"
    parser.add_argument("--precision", choices=PRECISIONS, default="auto", help=text)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """What `model_options` says to an engine beside its model."""
    options = {name: getattr(args, name) for name in ("device", "dtype", "threads")}
    return options if args.precision == "auto" else options | {"precision": args.precision}


def linears_option(parser: argparse.ArgumentParser) -> None:
    choices = ("exact", "unpacked", "vendor")
    parser.add_argument("--linears", choices=choices, default="exact", help="unpacked: keep weights as float32; vendor: not exact, on CUDA")


def new_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Of `python -m benchmarks.NAME`, described by the first line of its module."""
    return argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=(doc or "").split("\n")[0])


# What a command line may say, for argparse's `type`. They raise argparse.ArgumentTypeError.


def device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or cuda:N, got {text!r}")
    return "cuda:0" if text == "cuda" else text


def positive(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer from 1, got {text!r}")
    return int(text)


def counts(text: str) -> list[int]:
    """Positive integers and ranges of them (1,4,8-12) with commas between, in their order of size."""
    found = set[int]()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        span = range(positive(first), positive(last if dash else first) + 1)
        if not span:
            raise argparse.ArgumentTypeError(f"a range rises, got {part!r}")
        found.update(span)
    return sorted(found)


def file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return Path(text)


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Names with commas between, each once, in the order given."""

    def choose(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return list(dict.fromkeys(names))

    return choose


def settle_dtype(device: str, dtype: str | None) -> str:
    return dtype or ("bfloat16" if device.startswith("cuda") else "float32")


def wait_for(device: str) -> None:
    """Until the device has done what it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def read_prompts(path: Path, tokenizer: Any, limit: int | None = None) -> list[Prompt]:
    """Prompts of a JSONL file, in its order. A row has `prompt` (text or token ids) or `messages`, of which the first turn counts.

    Raises ValueError for a row that has neither, naming it.
    """
    prompts: list[Prompt] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if limit is not None and len(prompts) >= limit:
                break
            if line.strip():
                prompts.append(_read_row(line, f"{path.name}:{number}", tokenizer))
    if not prompts:
        raise ValueError(f"{path} has no prompts")
    return prompts


def spread(prompts: list[Prompt], n: int) -> list[Prompt]:
    """n of them, evenly over all: a file may be sorted by what it asks for."""
    return prompts if n >= len(prompts) else [prompts[i * len(prompts) // n] for i in range(n)]


def _read_row(line: str, where: str, tokenizer: Any) -> Prompt:
    row = json.loads(line)
    if not isinstance(row, dict) or not (row.get("prompt") or row.get("messages")):
        raise ValueError(f"{where}: a row must have `prompt` (text or token ids) or `messages`")
    name = str(row.get("id", where))
    if row.get("messages"):
        return Prompt(name, encode_chat(first_turn(row["messages"]), tokenizer))
    prompt = row["prompt"]
    return Prompt(name, list(prompt) if isinstance(prompt, list) else tokenizer(prompt)["input_ids"])


def first_turn(messages: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Messages up to and with the user's first, role and content only."""
    turn = []
    for message in messages:
        turn.append({"role": message["role"], "content": str(message.get("content") or "")})
        if message["role"] == "user":
            break
    return turn


def encode_chat(messages: list[dict[str, str]], tokenizer: Any) -> list[int]:
    """Token ids of a conversation that waits for the assistant. Raises ValueError where the model has no chat template."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def library_prompts(tokenizer: Any) -> list[Prompt]:
    """Without a file of prompts: the standard library's functions to be completed and, where the model chats, to be edited."""
    prompts = []
    for function in (textwrap.shorten, heapq.merge, shutil.which, fnmatch.filter):
        source = inspect.getsource(function)
        (definition,) = ast.parse(source).body
        assert isinstance(definition, ast.FunctionDef)
        head = "".join(source.splitlines(keepends=True)[: definition.body[1].lineno - 1])  # up to the end of the docstring
        prompts.append(Prompt(f"complete/{function.__name__}", tokenizer(head)["input_ids"]))
        if getattr(tokenizer, "chat_template", None):
            request = f"Add type annotations to this function and print all of it.\n\n```python\n{source}```"
            prompts.append(Prompt(f"edit/{function.__name__}", encode_chat([{"role": "user", "content": request}], tokenizer)))
    return prompts


def candidates(completion: Completion) -> dict[str, list[list[Any]]]:
    """The model's most likely tokens at each token of an output, and their log-probabilities, most likely first."""
    top = [each.top for each in completion.choices[0].logprobs or ()]
    ids = [[token for token, _ in row] for row in top]
    return {"top_ids": ids, "top_logprobs": [[round(logprob, 3) for _, logprob in row] for row in top]}


def random_prompts(tokenizer: Any, count: int, seed: int = 0, length: int = 200) -> list[Prompt]:
    """Prompts of `length` different random words: text that never repeats."""
    ids = sorted(set(tokenizer.get_vocab().values()))
    special = set(tokenizer.all_special_ids)
    pieces = [(i, piece) for i, piece in zip(ids, tokenizer.batch_decode([[i] for i in ids]), strict=True) if i not in special]
    words = [i for i, piece in pieces if piece[:1] == " " and len(piece) > 3 and piece[1:].isalpha()] or [i for i, _ in pieces]
    rng = random.Random(seed)
    return [Prompt(f"random/{n}", rng.sample(words, min(length, len(words)))) for n in range(count)]


def turns(contenders: list[str], count: int) -> Iterator[list[str]]:
    """The order of the contenders in each of `count` rounds: each comes first in its turn."""
    for n in range(count):
        shift = n % len(contenders)
        yield contenders[shift:] + contenders[:shift]


def in_turns(measures: Mapping[str, Callable[[], T]], repeat: int, warm_up: int = 1) -> dict[str, list[T]]:
    """What `repeat` calls of each measure return, one of each a round, after rounds that do not count."""
    results: dict[str, list[T]] = {name: [] for name in measures}
    for n, order in enumerate(turns(list(measures), repeat + warm_up), 1 - warm_up):
        for name in order:
            value = measures[name]()
            if n > 0:
                results[name].append(value)
        say(f"round {n} of {repeat}")
    return results


def interleaved_medians(measures: Mapping[str, Callable[[], float]], repeat: int) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in in_turns(measures, repeat).items()}


def timed(work: Callable[[], object], device: str = "cpu") -> float:
    """Milliseconds until the work is done, on the device too."""
    wait_for(device)
    start = time.perf_counter()
    work()
    wait_for(device)
    return (time.perf_counter() - start) * 1e3


class Kept:
    """Results by the settings that they depend on, in a file that each is appended to: a later call goes on from there."""

    def __init__(self, path: Path | None, *, fresh: bool = False) -> None:
        """`path` None: kept in memory alone. A line that was not finished goes."""
        self.path, self.known = path, dict[str, Any]()
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() and not fresh else b""
        for row in map(json.loads, whole.splitlines()):
            self.known[_name(row["key"])] = row
        path.write_bytes(whole + b"\n" if whole else b"")

    def get(self, key: dict[str, Any]) -> Any:
        """The row with this key, None where there is none."""
        return self.known.get(_name(key))

    def add(self, row: dict[str, Any]) -> None:
        """Its key is `row["key"]`."""
        self.known[_name(row["key"])] = row
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def _name(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def digest(outputs: Iterable[list[int]]) -> str:
    """Names a list of outputs, so that runs can be compared."""
    return hashlib.sha256(json.dumps(list(outputs)).encode()).hexdigest()[:16]


def device_name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: *(.*)", info.read_text(), re.MULTILINE) if info.exists() else []
    isa = torch.backends.cpu.get_cpu_capability()
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores, {isa}"


def environment(device: str, threads: int) -> dict[str, Any]:
    """The machine and what runs on it, for the JSON document."""
    versions = {"python": platform.python_version(), "ngramspec": ngramspec.__version__}
    versions |= {package: importlib.metadata.version(package) for package in PACKAGES}
    if device.startswith("cuda"):
        versions |= {"triton": importlib.metadata.version("triton"), "cuda": str(torch.version.cuda), "driver": driver_version()}
    return {"device": device_name(device), "threads": threads, "platform": platform.platform(), "versions": versions}


def driver_version() -> str:
    """NVIDIA's driver, "unknown" where nvidia-smi does not say."""
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def print_table(header: list[str], rows: list[list[Any]]) -> None:
    """First column to the left, the others to the right; None is a dash."""
    cells = [header] + [["–" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip())


def print_document(document: dict[str, Any]) -> None:
    """The last line: one JSON document."""
    print(json.dumps(document, ensure_ascii=False), flush=True)


def say(message: str) -> None:
    """Progress."""
    print(message, file=sys.stderr, flush=True)
