"""Settings from NGRAMSPEC_… variables, and files of the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from ngramspec.cli import hub_file
from ngramspec.cli.common import BadInputError
from ngramspec.cli.environment import check_names, read_environment
from ngramspec.config import EngineConfig
from ngramspec.options import Flag, Integer, Number, options_of
from ngramspec.server.settings import ServerSettings

KNOWN = [*options_of(EngineConfig), *ServerSettings.model_fields]


def test_every_setting_of_the_engine_has_a_variable() -> None:
    for name, option in options_of(EngineConfig).items():
        value = {Integer: 20, Number: 0.5, Flag: False}.get(type(option.kind), option.default or "folder")
        text = "off" if value is False else str(value)
        assert read_environment(EngineConfig, {f"NGRAMSPEC_{name.upper()}": text, "PATH": "x"}) == {name: value}
    assert read_environment(EngineConfig, {"NGRAMSPEC_KV_MEMORY": "2G", "NGRAMSPEC_DEVICE": " "}) == {"kv_memory": 2 << 30}


@pytest.mark.parametrize(
    ("variable", "value"),
    [("THREADS", "many"), ("THREADS", "0"), ("KV_MEMORY", "x"), ("PRECISION", "int3"), ("RECYCLE", "maybe"), ("LENIENCE", "nan")],
)
def test_a_wrong_value_names_its_variable(variable: str, value: str) -> None:
    with pytest.raises(BadInputError, match=f"NGRAMSPEC_{variable}"):
        read_environment(EngineConfig, {f"NGRAMSPEC_{variable}": value})


def test_an_unknown_variable_is_refused() -> None:
    check_names({"NGRAMSPEC_THREADS": "1", "NGRAMSPEC_LIMITS__BODY_BYTES": "1", "NGRAMSPEC_MODEL": "m", "HOME": "/"}, KNOWN)
    check_names({"NGRAMSPEC_API_KEY": "of a client, Zed's"}, KNOWN)
    with pytest.raises(BadInputError, match="NGRAMSPEC_THREADS is one"):
        check_names({"NGRAMSPEC_THREAD": "1"}, KNOWN)
    with pytest.raises(BadInputError, match="enableServiceLinks"):
        check_names({"NGRAMSPEC_SERVICE_HOST": "10.0.0.1"}, KNOWN)


FILES = [
    "README.md",
    "model-q4_k_m.gguf",
    "model-Q8_0-00001-of-00002.gguf",
    "model-Q8_0-00002-of-00002.gguf",
    "model-f16.gguf",
    "mmproj-model-Q4_K_M.gguf",
]


@pytest.mark.parametrize(
    ("quant", "expected"),
    [("", FILES[1:2]), ("Q4_K_M", FILES[1:2]), ("q8_0", FILES[2:4]), ("F16", FILES[4:5])],
)
def test_a_file_is_chosen_by_its_quantisation(quant: str, expected: list[str]) -> None:
    assert hub_file.choose_files(FILES, quant, "org/name") == expected


def test_what_is_not_there_is_told() -> None:
    with pytest.raises(BadInputError, match=r"no file for 'Q4'; it has model-"):
        hub_file.choose_files(FILES, "Q4", "org/name")
    with pytest.raises(BadInputError, match=r"no \.gguf file"):
        hub_file.choose_files(["model.safetensors"], "", "org/name")
    for name in ("name", "org/name/file.gguf", "", "org/na me"):
        with pytest.raises(BadInputError, match="-hf: must be"):
            hub_file.fetch_file(name)


def test_all_parts_are_fetched_and_the_first_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    fetched: list[str] = []
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda name: FILES)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda name, file: fetched.append(file) or f"/cache/{name}/{file}")
    assert hub_file.fetch_file("org/name:Q8_0") == Path("/cache/org/name") / FILES[2]
    assert fetched == FILES[2:4]
