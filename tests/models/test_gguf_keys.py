"""Every metadata key that changes what llama.cpp computes is read or refused (`tools.record_keys` recorded which do)."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_architectures

from ngramspec.errors import UnsupportedModelError
from ngramspec.models import gguf
from ngramspec.models.gguf_architectures import ARCHITECTURES, read_config
from ngramspec.models.gguf_configs import Config

RECORD: dict[str, list[tuple[str, Any]]] = json.loads((Path(__file__).parent / "llama_keys.json").read_text())
OF_EXPERTS = {"expert_count", "expert_used_count", "expert_group_count", "expert_group_used_count"}


def change_key(file: gguf.Gguf, key: str, value: object) -> gguf.Gguf:
    """Return the file with another value of a key, or without the key if it is None."""
    header, name = file.headers[0], f"{file.architecture}.{key}"
    metadata = {other: stated for other, stated in header.metadata.items() if other != name}
    spans, raw = dict(header.spans), header.raw
    if isinstance(value, list):
        kind, layout = (7, "?") if isinstance(value[0], bool) else (4, "I")
        written = struct.pack(f"<Q{len(name)}sIIQ{len(value)}{layout}", len(name), name.encode(), 9, kind, len(value), *value)
        metadata[name], spans[name], raw = None, (len(raw), len(raw) + len(written)), raw + written
    elif value is not None:
        metadata[name] = value
    return replace(file, headers=(replace(header, metadata=metadata, spans=spans, raw=raw),))


def read_or_refuse(file: gguf.Gguf) -> Config | None:
    try:
        return read_config(file)
    except UnsupportedModelError:
        return None


def is_known(case: str, key: str, value: object) -> bool:
    """Return whether llama.cpp refuses or changes something for which a config has no place."""
    _, _, stated, _ = tiny_architectures.CASES[case]
    if (key, value) == ("expert_gating_func", 0):
        return True  # the architecture's own way, where llama.cpp may want it stated
    if key == "rope.scaling.type" and key in stated and stated[key] == "longrope":
        return True  # the recorded file lacks LongRoPE's factors with it
    if key in OF_EXPERTS and "expert_count" not in stated:
        return True  # of a model without experts, which llama.cpp refuses with a part of these keys
    if key == "nextn_predict_layers":
        return True  # the layer of a head is left out, and must be there
    sizes = ("attention.key_length", "attention.value_length", "attention.head_count_kv")
    is_absorbed, is_latent = ("attention." + name in stated for name in ("key_length_mla", "kv_lora_rank"))
    # Of rows that llama.cpp keeps, told by the other sizes.
    return (is_absorbed and key in sizes) or (is_latent and key == "attention.head_count_kv")


@pytest.mark.parametrize("case", RECORD)
def test_what_changes_llama_cpps_numbers_changes_the_config_or_is_refused(case: str, tmp_path: Path) -> None:
    file = gguf.read(tiny_architectures.write(tmp_path / "model.gguf", case))
    usual = read_config(file)
    same = [(key, value) for key, value in RECORD[case] if read_or_refuse(change_key(file, key, value)) == usual]
    assert [(key, value) for key, value in same if not is_known(case, key, value)] == []


def test_every_architecture_is_recorded() -> None:
    assert ARCHITECTURES.keys() - {tiny_architectures.CASES[case][0] for case in RECORD} == {"gpt2"}
    assert min(map(len, RECORD.values())) > 15
