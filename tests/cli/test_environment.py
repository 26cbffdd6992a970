"""Settings from NGRAMSPEC_… variables, and files of the hub."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from playback import PlaybackEngine, run
from typer.testing import CliRunner

from ngramspec.cli import serve
from ngramspec.cli.common import BadInputError
from ngramspec.cli.environment import check_names, read_environment
from ngramspec.cli.main import app
from ngramspec.config import EngineConfig
from ngramspec.errors import ModelNotFoundError
from ngramspec.models import hub
from ngramspec.options import Flag, Integer, Number, options_of


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


@pytest.mark.parametrize("name", ["SAMPLING", "CHAT_TEMPLATE_KWARGS", "LIMITS"])
@pytest.mark.parametrize("value", ["temperature=0", "[1]"])
def test_a_variable_that_is_no_object_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"NGRAMSPEC_{name}", value)
    result = CliRunner().invoke(app, ["serve", "--model", "none.gguf"])
    assert str(result.exception).startswith(f"NGRAMSPEC_{name}: must be an object")


def test_a_model_is_warmed_up_with_the_settings_of_variables(engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ngramspec.engine.background_compiler.compile_all", lambda _: None)
    monkeypatch.setattr("ngramspec.cli.common.check_model", lambda _: None)
    for name, value in (("PRECISION", "float32"), ("PREFIX_CACHE_PATH", "of the server")):
        monkeypatch.setenv(f"NGRAMSPEC_{name}", value)
    assert run(monkeypatch, "warm-up", "--model", "any", "-q") == 0
    assert engine.made == {"model": "any", "drafters": [], "precision": "float32"}
    monkeypatch.setenv("NGRAMSPEC_PRECISION", "int3")
    assert run(monkeypatch, "warm-up", "--model", "any") == 2


def test_an_unknown_variable_is_refused() -> None:
    check_names({"NGRAMSPEC_THREADS": "1", "NGRAMSPEC_LIMITS__BODY_BYTES": "1", "NGRAMSPEC_MODEL": "m", "HOME": "/"})
    check_names({"NGRAMSPEC_API_KEY": "of a client, Zed's"})
    with pytest.raises(BadInputError, match="NGRAMSPEC_THREADS is one"):
        check_names({"NGRAMSPEC_THREAD": "1"})
    for variable, near in (("LIMITS__BODY_BYTE", "LIMITS__BODY_BYTES"), ("SAMPLING__TEMPERATURE", "SAMPLING")):
        with pytest.raises(BadInputError, match=f"NGRAMSPEC_{variable} is no setting; NGRAMSPEC_{near} is one"):
            check_names({f"NGRAMSPEC_{variable}": "1"})
    with pytest.raises(BadInputError, match="enableServiceLinks"):
        check_names({"NGRAMSPEC_SERVICE_HOST": "10.0.0.1"})


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
    [(None, FILES[1:2]), ("Q4_K_M", FILES[1:2]), ("q8_0", FILES[2:4]), ("F16", FILES[4:5])],
)
def test_a_file_is_chosen_by_its_quantisation(quant: str | None, expected: list[str]) -> None:
    assert hub.select_files(hub.GgufName("org/name", quant, None), FILES) == expected


def test_without_a_preferred_file_the_first_is_chosen() -> None:
    wanted = hub.GgufName("org/name", None, None)
    assert hub.select_files(wanted, FILES[4:]) == FILES[4:5]
    with pytest.raises(ModelNotFoundError, match="'org/name' has no GGUF file; its GGUF files: none"):
        hub.select_files(wanted, ["model.safetensors"])


@pytest.mark.parametrize("name", ["name", "org/name/file.gguf", "", "org/na me"])
def test_what_names_no_repository_is_told(name: str) -> None:
    with pytest.raises(BadInputError, match="-hf: must be"):
        serve.fetch_file(name)


def test_the_command_line_goes_before_the_other_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInputError, match="either --model or -hf"):
        serve.is_fetched("./model", "org/name")
    monkeypatch.setenv("NGRAMSPEC_MODEL", "./model")
    assert serve.is_fetched("./model", "org/name")
    monkeypatch.setenv("NGRAMSPEC_HF_REPO", "org/name")
    with pytest.raises(BadInputError, match="either --model or -hf"):
        serve.is_fetched("./model", "org/name")
    assert not serve.is_fetched("./other", "org/name")
    assert serve.is_fetched("smollm2", "org/name")


def test_a_wrong_tree_is_told_before_a_model_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "fetch_file", lambda name: pytest.fail("the hub is asked"))
    told = CliRunner().invoke(app, ["serve", "-hf", "org/name", "--repo", "/no/tree"]).exception
    assert str(told) == "--repo: /no/tree is no folder"


def test_all_parts_are_fetched_and_the_first_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []
    about = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in FILES])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, name, timeout: about)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda name, file, **_: fetched.append(file) or f"/cache/{name}/{file}")
    assert serve.fetch_file("org/name:Q8_0") == Path("/cache/org/name") / FILES[2]
    assert fetched == FILES[2:4]


def test_without_a_connection_the_cache_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Name or service not known")

    def find_cached(name: str, *, local_files_only: bool) -> str:
        if name != "org/cached":
            raise huggingface_hub.errors.LocalEntryNotFoundError("not in the cache")
        return str(tmp_path)

    def download_cached(name: str, file: str, *, local_files_only: bool, **_: Any) -> str:
        assert local_files_only, "the client would ask the hub again, for as long"
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", find_cached)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download_cached)
    (tmp_path / FILES[1]).touch()
    assert serve.fetch_file("org/cached") == tmp_path / FILES[1]
    with pytest.raises(ModelNotFoundError, match="Name or service not known"):
        serve.fetch_file("org/other:Q4_K_M")
