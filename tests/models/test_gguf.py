"""Headers of GGUF files: what is read, what is refused, and that nothing else ever happens."""

from __future__ import annotations

import math
import os
import random
import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as reference
import pytest
import tiny_gguf

from ngramspec.errors import ModelNotFoundError, NgramspecError, UnsupportedModelError
from ngramspec.models import gguf
from ngramspec.models.tensor_source import KINDS


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, dims: tuple[int, ...] = (32, 3), kind: int = 8, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


KEYS = [
    key("general.architecture", 8, text("llama")),
    key("a", 9, struct.pack("<IQ", 8, 2) + text("xy") + text("")),
    key("n", 9, struct.pack("<IQ", 4, 3) + bytes(12)),
    key("f", 6, struct.pack("<f", 0.5)),
    key("b", 7, b"\1"),
]
TENSORS = [tensor("t"), tensor("u", (7,), 0, 128)]


def write(
    path: Path, keys: list[bytes] = KEYS, tensors: list[bytes] = TENSORS, *, version: int = 3, tail: int = 156, align: int = 32
) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    path.write_bytes(head + bytes(-len(head) % align) + bytes(tail))
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_a_header(tmp_path: Path, version: int) -> None:
    path = write(tmp_path / "a.gguf", version=version)
    read = gguf.read(path)
    assert read.metadata == {"general.architecture": "llama", "a": None, "n": None, "f": 0.5, "b": True}
    start = path.stat().st_size - 156
    assert list(read.tensors.values()) == [
        gguf.GgufTensor("t", "Q8_0", (3, 32), path, start, 102),
        gguf.GgufTensor("u", "F32", (7,), path, start + 128, 28),
    ]
    assert (read.name, read.architecture, read.n_bytes) == ("a", "llama", 130)


def test_types_are_those_of_ggml() -> None:
    assert {t.value: t.name for t in reference.GGMLQuantizationType} == gguf.TYPES
    for name, block in KINDS.items():
        assert reference.GGML_QUANT_SIZES[reference.GGMLQuantizationType[name]] == block


@pytest.mark.parametrize("number", gguf.TYPES)
def test_sizes_are_those_of_ggml(tmp_path: Path, number: int) -> None:
    per_block, n_bytes = reference.GGML_QUANT_SIZES[reference.GGMLQuantizationType(number)]
    path = write(tmp_path / "a.gguf", tensors=[tensor("t", (2 * per_block, 3), number)], tail=6 * n_bytes)
    assert gguf.read(path).tensors["t"].n_bytes == 6 * n_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_the_directory_is_that_of_ggufs_own_reader(tmp_path: Path, kind: str) -> None:
    path = tiny_gguf.write(tmp_path / "a.gguf", "qwen2", kind)
    wanted = [(t.name, t.tensor_type.name, t.data_offset, t.n_bytes, tuple(t.shape)[::-1]) for t in reference.GGUFReader(path).tensors]
    assert [(t.name, t.kind, t.offset, t.n_bytes, t.shape) for t in gguf.read(path).tensors.values()] == wanted


@pytest.mark.parametrize(
    ("parts", "error", "told"),
    [
        ({"tensors": [tensor("t", kind=77)]}, UnsupportedModelError, "'t' has type 77, which is not known"),
        ({"tensors": [tensor("t", kind=4)]}, UnsupportedModelError, "type 4"),
        ({"tensors": [tensor("t", (33, 3))]}, ModelNotFoundError, "whole blocks of 32"),
        ({"tensors": [tensor("t", (32, 0))]}, ModelNotFoundError, r"\[0, 32\]"),
        ({"tensors": [tensor("t", ())]}, ModelNotFoundError, "has 0 dimensions"),
        ({"tensors": [tensor("t", (32, 1, 1, 1, 1))]}, ModelNotFoundError, "has 5 dimensions"),
        ({"tensors": [tensor("t", (1 << 63, 1 << 63, 1 << 63, 1 << 63))]}, ModelNotFoundError, "before tensor 't'"),
        ({"tensors": [tensor("t", offset=64)]}, ModelNotFoundError, "before tensor 't'"),
        ({"tensors": [tensor("t", offset=(1 << 64) - 32)]}, ModelNotFoundError, "before tensor 't'"),
        ({"tensors": [tensor("t", offset=16)]}, ModelNotFoundError, "no multiple of 32"),
        ({"tensors": [tensor("t"), tensor("u", offset=96)]}, ModelNotFoundError, "'u' lies over another"),
        ({"tensors": [tensor("t", (32, 1)), tensor("t", (32, 1), offset=64)]}, ModelNotFoundError, "'t' is there twice"),
        ({"keys": [KEYS[0], KEYS[0]]}, ModelNotFoundError, "'general.architecture' is there twice"),
        ({"keys": [key("k", 13, b"")]}, ModelNotFoundError, "value of type 13"),
        ({"keys": [key("k", 9, struct.pack("<IQ", 9, 1))]}, ModelNotFoundError, "array of 1 values of type 9"),
        ({"keys": [key("k", 9, struct.pack("<IQ", 8, 1 << 60))]}, ModelNotFoundError, "array of"),
        ({"keys": [key("k", 9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", (1 << 64) - 1))]}, ModelNotFoundError, "within its header"),
        ({"keys": [key("k", 8, struct.pack("<Q", (1 << 64) - 1))]}, ModelNotFoundError, "within its header"),
        ({"keys": [key("k", 8, struct.pack("<Q", 1) + b"\xff")]}, ModelNotFoundError, "not UTF-8"),
        ({"keys": [key("general.alignment", 4, struct.pack("<I", 0))]}, ModelNotFoundError, "general.alignment is 0"),
        ({"keys": [key("general.alignment", 4, struct.pack("<I", 48))]}, ModelNotFoundError, "general.alignment is 48"),
        ({"keys": [key("general.alignment", 8, text("32"))]}, ModelNotFoundError, "general.alignment is '32'"),
        ({"version": 4}, ModelNotFoundError, "version 4"),
        ({"version": 3 << 24}, ModelNotFoundError, "little endian"),
    ],
)
def test_what_is_wrong_with_a_header_is_told(tmp_path: Path, parts: dict[str, Any], error: type[Exception], told: str) -> None:
    path = write(tmp_path / "a.gguf", **({"tail": 128 if len(parts.get("tensors", ())) < 2 else 256} | parts))
    with pytest.raises(error, match=told) as raised:
        gguf.read(path)
    assert str(path) in str(raised.value)


def test_counts_beyond_the_file(tmp_path: Path) -> None:
    for counts in [(1 << 63, 1), (1, 1 << 63), (1000, 0), (0, 1000)]:
        (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + bytes(1000))
        with pytest.raises(ModelNotFoundError, match="too few"):
            gguf.read(tmp_path / "a.gguf")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    for size in range(path.stat().st_size - 1, -1, -1):
        os.truncate(path, size)
        with pytest.raises(ModelNotFoundError, match="not a whole GGUF"):
            gguf.read(path)


def test_an_alignment_of_its_own(tmp_path: Path) -> None:
    keys = [*KEYS, key("general.alignment", 4, struct.pack("<I", 128))]
    path = write(tmp_path / "a.gguf", keys, align=128)
    assert [t.offset % 128 for t in gguf.read(path).tensors.values()] == [0, 0]


def test_ten_thousand_flipped_bits(tmp_path: Path) -> None:
    """Either a directory in which everything has its place in the file, or a typed error, in little memory."""
    real = gguf.read(tiny_gguf.write(tmp_path / "real.gguf")).headers[0]
    keys = [real.raw[start:end] for start, end in real.spans.values()]
    tensors = [tensor(t.name, (256, 2), 12, 288 * i) for i, t in enumerate(real.tensors)]
    path = write(tmp_path / "a.gguf", keys, tensors, tail=288 * len(tensors))
    whole, size = gguf.read(path), path.stat().st_size
    n_header = len(whole.headers[0].raw)
    draw = random.Random(0)
    refused = 0
    with path.open("r+b", buffering=0) as file:
        tracemalloc.start()
        for i in range(10_000):
            if i == 1_000:  # it makes everything slow
                assert tracemalloc.get_traced_memory()[1] < 1 << 20
                tracemalloc.stop()
            flipped = [(draw.randrange(n_header), 1 << draw.randrange(8)) for _ in range(draw.choice([1, 1, 1, 2, 5]))]
            for at, bit in flipped:
                file.seek(at)
                file.write(bytes([whole.headers[0].raw[at] ^ bit]))
            try:
                read = gguf.read(path)
            except NgramspecError:
                refused += 1
            else:
                end = 0
                for t in sorted(read.tensors.values(), key=lambda t: t.offset):
                    per_block, n_bytes = KINDS.get(t.kind, (1, 0))
                    assert end <= t.offset
                    assert n_bytes == 0 or t.n_bytes == math.prod(t.shape) // per_block * n_bytes
                    end = t.offset + t.n_bytes
                assert end <= size
            for at, _ in flipped:
                file.seek(at)
                file.write(whole.headers[0].raw[at : at + 1])
    assert 1_000 < refused < 10_000
    assert gguf.read(path).tensors == whole.tensors


def test_a_large_vocabulary_is_passed_over_quickly(tmp_path: Path) -> None:
    words = b"".join(text("ab" * (i % 8)) for i in range(150_000))
    path = write(
        tmp_path / "a.gguf", [key("t", 9, struct.pack("<IQ", 8, 150_000) + words), key("m", 9, struct.pack("<IQ", 8, 150_000) + words)]
    )
    times = []
    for _ in range(3):
        start = time.process_time()
        gguf.read(path)
        times.append(time.process_time() - start)
    assert min(times) < 0.5, "0.1 s on an idle machine"


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    tiny_gguf.write(tmp_path / "model.gguf", "qwen2", "Q4_K", per_part=12)
    return sorted(tmp_path.iterdir())


def test_any_part_of_a_split_file_names_the_model(parts: list[Path], tmp_path: Path) -> None:
    assert [path.name for path in parts] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    (tmp_path / "one").mkdir()
    whole = gguf.read(tiny_gguf.write(tmp_path / "one" / "model.gguf", "qwen2", "Q4_K"))
    for path in parts:
        read = gguf.read(path)
        assert (read.name, read.path, read.architecture) == ("model", parts[0], "qwen2")
        assert {t.name: (t.kind, t.shape) for t in read.tensors.values()} == {t.name: (t.kind, t.shape) for t in whole.tensors.values()}
        assert {t.path for t in read.tensors.values()} == set(parts)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda parts: parts[1].unlink(), "model-00002-of-00003.gguf is not beside it"),
        (lambda parts: shutil.copy(parts[2], parts[1]), r"split.no, split.count are \(2, 3\)"),
        (lambda parts: os.truncate(parts[1], 100), "model-00002-of-00003.gguf is not a whole"),
        (lambda parts: parts[0].rename(parts[0].with_name("other.gguf")), "one of 3 parts"),
    ],
)
def test_what_is_wrong_with_parts_is_told(parts: list[Path], damage: Callable[[list[Path]], object], told: str) -> None:
    damage(parts)
    with pytest.raises(ModelNotFoundError, match=told):
        gguf.read(next(path for path in (parts[0], parts[0].with_name("other.gguf")) if path.exists()))
