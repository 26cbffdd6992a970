"""Whatever is altered, cut off or stale in the cache, a start writes the same text: from the cache if it is whole, else made anew."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
import transformers

from ngramspec import Engine, SamplingParams
from ngramspec.backends.cpu.codegen.kernels import Kernels
from ngramspec.models import gguf, start_cache

PARAMS = SamplingParams(max_tokens=24, temperature=0.0)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NGRAMSPEC_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("model") / "tiny.gguf", "qwen3", "Q4_K", std=0.1)


@pytest.fixture(scope="module")
def start(model: Path, cache: Path) -> Callable[[], tuple[str, str, bool]]:
    """`start()`: what an engine writes, its exactness, and whether it was opened from what an earlier start had kept."""

    def run() -> tuple[str, str, bool]:
        with Engine(str(model), max_seqs=2, kv_memory=1 << 22, threads=1) as engine:
            text = engine.complete("def add(a, b):", PARAMS).text
            return text, engine.runner.exactness, type(engine.runner).__name__ == "LlamaRunner"

    return run


@pytest.fixture(scope="module")
def expected(start: Callable[[], tuple[str, str, bool]]) -> str:
    text, exactness, kept = start()
    assert (exactness, kept) == ("bitwise", False)
    assert start() == (text, "bitwise", True)
    return text


def _cached(cache: Path) -> list[Path]:
    return sorted(
        path for folder in ("models", "starts") for path in (cache / folder).rglob("*") if path.is_file() and path.suffix != ".lock"
    )


def _damage(path: Path, rng: random.Random) -> None:
    """Change one digit (or one byte where there is none), cut the file off, or append to it."""
    whole = path.read_bytes()
    kind = rng.choice(["digit", "digit", "byte", "cut", "more"])
    digits = [i for i, b in enumerate(whole) if b in b"0123456789"]
    if kind == "digit" and digits:
        at = rng.choice(digits)
        path.write_bytes(whole[:at] + rng.choice(sorted({*b"0123456789"} - {whole[at]})).to_bytes() + whole[at + 1 :])
    elif kind == "cut":
        path.write_bytes(whole[: rng.randrange(len(whole))])
    elif kind == "more":
        path.write_bytes(whole + b" ")
    else:
        at = rng.randrange(len(whole))
        path.write_bytes(whole[:at] + (whole[at] ^ 1 << rng.randrange(8)).to_bytes() + whole[at + 1 :])


def test_a_damaged_cache_writes_the_same_text(start: Callable[[], tuple[str, str, bool]], expected: str, cache: Path) -> None:
    rng = random.Random(0)
    names = {path.name for path in _cached(cache)}
    assert {"config.json", "generation_config.json", "tensors.json", "tokenizer.json", "tokenizer_config.json", "derived.json"} < names
    for path in _cached(cache):
        _damage(path, rng)
        assert start()[:2] == (expected, "bitwise"), path
    assert start() == (expected, "bitwise", True), "what was damaged was made again"


def test_a_document_is_read_as_it_was_written_or_not_at_all(model: Path, cache: Path, tmp_path: Path) -> None:
    known = start_cache.find_start_record(str(model), (), tmp_path)
    assert known is not None
    document = {"recipe": {"eps": 1e-6, "layers": [1, 2, 3]}, "measured_ms": [0.25, 1.0]}
    rng = random.Random(1)
    for _ in range(200):
        known.write(document)
        assert known.read() == document
        _damage(known.path, rng)
        assert known.read() in (None, document)
    known.path.write_text("[" * 100_000)
    assert known.read() is None


@pytest.mark.parametrize(
    "change",
    [
        lambda recipe: recipe["options"].update(n_heads=2 * recipe["options"]["n_heads"]),
        lambda recipe: recipe["options"].update(head_dim=recipe["options"]["head_dim"] // 2),
        lambda recipe: recipe["layers"][1].update(matrices=recipe["layers"][0]["matrices"][::-1]),
        lambda recipe: recipe["layers"][0].update(norms=[]),
        lambda recipe: recipe.update(embedding="nothing"),
        lambda recipe: recipe["options"].pop("eps"),
        dict.clear,
    ],
)
def test_a_document_that_does_not_fit_the_file(
    start: Callable[[], tuple[str, str, bool]], expected: str, model: Path, cache: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    """Its checksum is right, and a pass would read beyond the weights."""
    assert start() == (expected, "bitwise", True)
    (path,) = (cache / "starts").glob("*.json")
    known = start_cache.StartRecord(path, gguf.read(model))
    document = known.read()
    assert document is not None
    change(document["recipe"])
    known.write(document)
    assert start() == (expected, "bitwise", False)
    assert start() == (expected, "bitwise", True)


def test_files_that_nobody_wrote_are_not_read(start: Callable[[], tuple[str, str, bool]], expected: str, cache: Path) -> None:
    """A file that transformers would read if it were there."""
    (entry,) = (path for path in (cache / "models").iterdir() if path.is_dir())
    (entry / "added_tokens.json").write_text("{}")
    assert start() == (expected, "bitwise", False)
    assert not (entry / "added_tokens.json").exists()


def test_a_kernel_that_is_wrong_at_a_later_start_is_told(model: Path, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes rows of several in another way than one row, as code may that was compiled for another processor."""
    right = Kernels.get_row_functions

    def wrong(self: Kernels, fmt: object, int8: bool, *, few: bool = False) -> dict[int, int]:
        functions = right(self, fmt, int8, few=few)  # type: ignore[arg-type]
        return {rows: address if rows == 1 else functions[min(r for r in functions if r > 1)] for rows, address in functions.items()}

    monkeypatch.setattr(Kernels, "get_row_functions", wrong)
    with Engine(str(model), max_seqs=2, kv_memory=1 << 22, threads=1) as engine:  # a text of it would read what no kernel wrote
        assert (engine.runner.exactness, type(engine.runner).__name__) == ("numerical", "LlamaRunner")


def test_a_first_start_is_without_warnings_of_others(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check against transformers makes models of a few tokens, and ids that end a text lie beyond them."""
    monkeypatch.setenv("NGRAMSPEC_CACHE", str(tmp_path))
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    monkeypatch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
    transformers.logging.set_verbosity_warning()
    transformers.utils.logging.warning_once.cache_clear()  # what was said once is not said again
    transformers.logging.add_handler(handler)
    try:
        with Engine(str(model), max_seqs=2, kv_memory=1 << 22, threads=1):
            pass
    finally:
        transformers.logging.remove_handler(handler)
    assert said == []
