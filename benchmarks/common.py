"""What all benchmarks share: options, prompts, measuring in turns, results kept on disk, and the document at the end.

Command lines and JSONL rows enter; token ids, tables and JSON documents leave. Knows tokenizers, nothing of peers.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import hashlib
import heapq
import importlib
import importlib.metadata
import inspect
import itertools
import json
import math
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
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import ngramspec
from ngramspec.outputs import Completion
from ngramspec.prompts.fim import Fim

if TYPE_CHECKING:
    from ngramspec.engine.llm_engine import Engine

# Cost of a row as a share of a pass: a large GPU, a CPU of two cores.
SLOPES = {"flat": 0.005, "steep": 0.04}
PACKAGES = ("torch", "transformers", "numpy", "numba")  # whose versions a document names
DTYPES = ("float32", "bfloat16", "float16")
PRECISIONS = ("auto", "int8", "float32")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that contenders are given."""

    name: str
    ids: list[int]
    output: list[int] | None = None
    """The output that is to be written, if that is known."""


class WordTokenizer:
    """Stands in for a missing tokenizer: a word, a run of blanks or a sign is a token, its id a hash. Nothing decodes it."""

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


def add_model_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add `--model` or `--random-weights`, either as `args.model`, and how it runs. See `settle_dtype` and `get_engine_options`."""
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
    parser.add_argument("--device", type=parse_device, default="cpu", metavar="cpu|cuda:N")
    parser.add_argument("--dtype", choices=DTYPES, help="default float32 on the CPU, bfloat16 on CUDA")
    parser.add_argument("--threads", type=parse_positive, metavar="N", help="of each contender; default one per performance core")
    text = "of products with quantised weights; auto, the default: int8 where weights were quantised in blocks"
    parser.add_argument("--precision", choices=PRECISIONS, default="auto", help=text)


def get_engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return what `add_model_options` says to an engine beside its model."""
    options = {name: getattr(args, name) for name in ("device", "dtype", "threads")}
    return options if args.precision == "auto" else options | {"precision": args.precision}


def add_linears_option(parser: argparse.ArgumentParser) -> None:
    choices = ("exact", "unpacked", "vendor")
    parser.add_argument("--linears", choices=choices, default="exact", help="unpacked: keep weights as float32; vendor: not exact, on CUDA")


def make_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of `python -m benchmarks.NAME`, described by the first line of its module."""
    return argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=(doc or "").split("\n")[0])


# Values of a command line, for argparse's `type`. They raise argparse.ArgumentTypeError.


def parse_device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or cuda:N, got {text!r}")
    return "cuda:0" if text == "cuda" else text


def parse_positive(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer from 1, got {text!r}")
    return int(text)


def parse_number(text: str) -> float:
    """Parse a finite number from 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number from 0, got {text!r}")
    return number


def parse_counts(text: str) -> list[int]:
    """Parse positive integers and ranges of them (1,4,8-12) with commas between, and sort them."""
    found = set[int]()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        span = range(parse_positive(first), parse_positive(last if dash else first) + 1)
        if not span:
            raise argparse.ArgumentTypeError(f"a range rises, got {part!r}")
        found.update(span)
    return sorted(found)


def parse_file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return Path(text)


def make_name_parser(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a function that parses names with commas between, each once, in the order given."""

    def choose(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return list(dict.fromkeys(names))

    return choose


def parse_floats(text: str) -> list[float]:
    return [parse_number(part) for part in text.split(",")]


def settle_dtype(device: str, dtype: str | None) -> str:
    return dtype or ("bfloat16" if device.startswith("cuda") else "float32")


def wait_for(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


class RowError(ValueError):
    """A file of rows that cannot be used; the message names the file and the line."""


class Row(dict[str, Any]):
    """A row of a JSONL file. To read a field that it lacks raises RowError."""

    def __init__(self, fields: dict[str, Any], where: str) -> None:
        super().__init__(fields)
        self.where = where
        """File and line."""

    def __missing__(self, field: str) -> Any:
        raise RowError(f"{self.where}: the row has no `{field}`")


def iterate_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the number and the object of each line of a JSONL file that is not blank. Raises RowError."""
    with path.open("rb") as file:  # `splitlines` would also cut at U+2028 and others that a JSON string may hold as they are
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _parse_row(line.rstrip(), f"{path.name}:{number}")


def _parse_row(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:  # which counts lines of its own
        raise RowError(f"{where}: {error.msg}: column {error.colno}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise RowError(f"{where}: {error}") from error
    if not isinstance(row, dict):
        raise RowError(f"{where}: a row must be a JSON object, got {line.strip()[:40].decode(errors='replace')}")
    for field in ("prompt", "prompt_ids", "output_ids"):
        value = row.get(field, [])
        if not (isinstance(value, list) and all(type(token) is int for token in value)) and not (
            field == "prompt" and isinstance(value, str)
        ):
            raise RowError(f"{where}: `{field}` must be {'text or ' * (field == 'prompt')}token ids")
    messages = row.get("messages") or []
    if not (isinstance(messages, list) and all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages)):
        raise RowError(f"{where}: `messages` must be a list of objects that have a `role`")
    return Row(row, where)


def run_command(main: Callable[[], object]) -> None:
    """Run a benchmark or tool; a file of rows that cannot be used ends it with one line on standard error and code 1."""
    try:
        main()
    except RowError as error:
        raise SystemExit(str(error)) from None


def read_prompts(path: Path, tokenizer: Any, limit: int | None = None) -> list[Prompt]:
    """Read the prompts of a JSONL file, in its order. A row has `prompt` (text or token ids) or `messages`, of which the first turn counts.

    With `suffix` it asks for the text between `prompt`, which is text and may be empty, and `suffix`. Raises RowError.
    """
    prompts = [_read_row(row, tokenizer) for _, row in itertools.islice(iterate_rows(path), limit)]
    if not prompts:
        raise RowError(f"{path} has no prompts")
    return prompts


def pick_evenly(items: list[T], n: int) -> list[T]:
    """Return n of them, evenly over all: a file may be sorted by what it asks for."""
    return items if n >= len(items) else [items[i * len(items) // n] for i in range(n)]


def pick_fitting(prompts: list[Prompt], max_tokens: int, max_model_len: int) -> list[Prompt]:
    """Return the prompts that the model can hold with their output. Raises SystemExit if there are none."""
    found = [prompt for prompt in prompts if len(prompt.ids) + max_tokens <= max_model_len]
    if not found:
        raise SystemExit(f"no prompt leaves room for {max_tokens} tokens within the model's {max_model_len}")
    return found


def _read_row(row: Row, tokenizer: Any) -> Prompt:
    where = row.where
    if not (isinstance(row.get("prompt"), (str, list)) or row.get("messages")):
        raise RowError(f"{where}: a row must have `prompt` (text or token ids) or `messages`")
    prompt, messages, suffix = row.get("prompt"), row.get("messages"), row.get("suffix")
    if suffix is not None:
        if messages or not isinstance(prompt, str):
            raise RowError(f"{where}: a row with a `suffix` must have a `prompt` of text")
        if (fim := Fim.detect(tokenizer)) is None:
            raise RowError(f"{where}: the row has a `suffix`, and the model has no tokens to fill in the middle")
        ids = fim.make_prompt(prompt, suffix)
    elif messages:
        ids = encode_chat(get_first_turn(messages), tokenizer)
    else:
        ids = prompt if isinstance(prompt, list) else tokenizer(prompt)["input_ids"]
    if not ids:
        raise RowError(f"{where}: the prompt has no tokens")
    return Prompt(str(row.get("id", where)), ids)


def get_reference(row: dict[str, Any]) -> str:
    """Return the `reference` of a row: of several the first that says something, "" without one."""
    reference = row.get("reference") or ""
    return reference if isinstance(reference, str) else next(filter(None, reference), "")


def get_first_turn(messages: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the messages up to and with the user's first, role and content only."""
    turn = []
    for message in messages:
        turn.append({"role": message["role"], "content": str(message.get("content") or "")})
        if message["role"] == "user":
            break
    return turn


def encode_chat(messages: list[dict[str, str]], tokenizer: Any) -> list[int]:
    """Return the token ids of a conversation that waits for the assistant. Raises ValueError if the model has no chat template."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def make_library_prompts(tokenizer: Any) -> list[Prompt]:
    """Make prompts without a file: functions of the standard library to be completed and, if the model chats, to be edited."""
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


def get_candidates(completion: Completion) -> dict[str, list[list[Any]]]:
    """Return the model's most likely tokens at each token of an output and their log-probabilities, most likely first."""
    top = [each.top for each in completion.choices[0].logprobs or ()]
    ids = [[token for token, _ in row] for row in top]
    return {"top_ids": ids, "top_logprobs": [[round(logprob, 3) for _, logprob in row] for row in top]}


def make_random_prompts(tokenizer: Any, count: int, seed: int = 0, length: int = 200) -> list[Prompt]:
    """Make prompts of `length` different random words: text that never repeats."""
    ids = sorted(set(tokenizer.get_vocab().values()))
    special = set(tokenizer.all_special_ids)
    pieces = [(i, piece) for i, piece in zip(ids, tokenizer.batch_decode([[i] for i in ids]), strict=True) if i not in special]
    words = [i for i, piece in pieces if piece[:1] == " " and len(piece) > 3 and piece[1:].isalpha()] or [i for i, _ in pieces]
    rng = random.Random(seed)
    return [Prompt(f"random/{n}", rng.sample(words, min(length, len(words)))) for n in range(count)]


def order_turns(contenders: list[str], count: int) -> Iterator[list[str]]:
    """Yield the order of the contenders in each of `count` rounds: each comes first in its turn."""
    for n in range(count):
        shift = n % len(contenders)
        yield contenders[shift:] + contenders[:shift]


def run_in_turns(measures: Mapping[str, Callable[[], T]], repeat: int, warm_up: int = 1) -> dict[str, list[T]]:
    """Return what `repeat` calls of each measure return, one of each a round, after rounds that do not count."""
    results: dict[str, list[T]] = {name: [] for name in measures}
    for n, order in enumerate(order_turns(list(measures), repeat + warm_up), 1 - warm_up):
        for name in order:
            value = measures[name]()
            if n > 0:
                results[name].append(value)
        print_progress(f"round {n} of {repeat}")
    return results


def measure_medians(measures: Mapping[str, Callable[[], float]], repeat: int) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in run_in_turns(measures, repeat).items()}


def time_ms(work: Callable[[], object], device: str = "cpu") -> float:
    """Return the milliseconds until the work is done, on the device too."""
    wait_for(device)
    start = time.perf_counter()
    work()
    wait_for(device)
    return (time.perf_counter() - start) * 1e3


class ResultLog:
    """Results by the settings that they depend on, in a file that each is appended to: a later call goes on from there."""

    def __init__(self, path: Path | None, *, fresh: bool = False) -> None:
        """Read what is there; a line that was not finished goes. `path` None: results are kept in memory alone."""
        self.path, self.known = path, dict[str, Any]()
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() and not fresh else b""
        path.write_bytes(whole + b"\n" if whole else b"")
        for _, row in iterate_rows(path):
            self.known[_to_name(row["key"])] = row

    def get(self, key: dict[str, Any]) -> Any:
        """Return the row with this key, None if there is none."""
        return self.known.get(_to_name(key))

    def add(self, row: dict[str, Any]) -> None:
        """Append a row, whose key is `row["key"]`."""
        self.known[_to_name(row["key"])] = row
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def _to_name(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def hash_outputs(outputs: Iterable[list[int]]) -> str:
    """Return a name of a list of outputs, so that runs can be compared."""
    return hashlib.sha256(json.dumps(list(outputs)).encode()).hexdigest()[:16]


def digest_code(device: str) -> str:
    """Return a name of the code that is measured: the package's files but for the server, and on the CPU but for the CUDA path."""
    digest, left_out = hashlib.sha256(), {"server"} if device.startswith("cuda") else {"server", "cuda"}
    for package in ("ngramspec", "ngramspec.datastore"):
        root = Path(str(importlib.import_module(package).__file__)).parent
        for path in sorted((*root.rglob("*.py"), *root.rglob("*.npz"))):
            if not left_out & set(path.relative_to(root).parts):
                digest.update(path.read_bytes())
    return f"{ngramspec.__version__}-{digest.hexdigest()[:12]}"


def get_device_name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: *(.*)", info.read_text(), re.MULTILINE) if info.exists() else []
    isa = torch.backends.cpu.get_cpu_capability()
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores, {isa}"


def describe_machine(device: str, threads: int) -> dict[str, Any]:
    """Return the machine and the versions of what runs on it, for the JSON document."""
    versions = {"python": platform.python_version(), "ngramspec": ngramspec.__version__}
    versions |= {package: importlib.metadata.version(package) for package in PACKAGES}
    if device.startswith("cuda"):
        versions |= {"triton": importlib.metadata.version("triton"), "cuda": str(torch.version.cuda), "driver": read_driver_version()}
    return {"device": get_device_name(device), "threads": threads, "platform": platform.platform(), "versions": versions}


def read_driver_version() -> str:
    """Return the version of NVIDIA's driver, "unknown" if nvidia-smi does not say."""
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def finish_start(engine: Engine) -> None:
    """Do now what an engine does in the background after its start: at a first one it drafts nothing until drafting is compiled."""
    engine.finish_compiling(print_progress)
    while engine.runner.enlarge_page():
        pass


def print_table(header: list[str], rows: list[list[Any]]) -> None:
    """Print the first column to the left, the others to the right; None is a dash."""
    cells = [header] + [["–" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip())


def print_document(document: dict[str, Any]) -> None:
    """Print the last line: one JSON document."""
    print(json.dumps(document, ensure_ascii=False), flush=True)


def print_progress(message: str) -> None:
    """Print a line about the progress to standard error."""
    print(message, file=sys.stderr, flush=True)
