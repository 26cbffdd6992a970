"""Sampling parameters are declared once: what `SamplingParams` has, every route of completions takes, within its bounds."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError, create_model
from starlette.testclient import TestClient
from tiny_server import fim_tokenizer, tiny_engine

import ngramspec
from ngramspec import sampling_params
from ngramspec.engine.llm_engine import Engine
from ngramspec.options import MAX_INT, ChoiceOf, Flag, Integer, Kind, Number, TextKind, TextList, TokenIds, TokenNumbers, option
from ngramspec.server.request_fields import OWN_SHAPE, SHARED, StrictModel, make_strict_type
from ngramspec.server.settings import ServerSettings

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/completion": {"prompt": "a", "n_predict": 1},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 1},
}


@dataclass(frozen=True, slots=True)
class Longer(sampling_params.SamplingParams):
    """The table with one more line."""

    patience: int = option(3, Integer(1, 9), "How long to wait.")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, list[Any]]]:
    """An engine, and the parameters of all that was submitted to it."""
    with tiny_engine(tokenizer=fim_tokenizer(), max_model_len=64, kv_memory=16 << 20) as engine:
        submitted: list[Any] = []
        submit = engine.submit

        def noted(prompt: Any, params: Any, **more: Any) -> Any:
            submitted.append(params)
            return submit(prompt, params, **more)

        monkeypatch.setattr(engine, "submit", noted)
        yield engine, submitted


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, engine: tuple[Engine, list[Any]]) -> Iterator[FastAPI]:
    """The server as it is where the table is longer: imported anew."""
    monkeypatch.setattr(sampling_params, "SamplingParams", Longer)
    monkeypatch.setattr(ngramspec, "server", sys.modules["ngramspec.server"])
    as_before = {name: module for name, module in sys.modules.items() if name.startswith("ngramspec.server")}
    for name in as_before:
        del sys.modules[name]
    try:
        yield importlib.import_module("ngramspec.server.app").create_app(engine[0], ServerSettings())
    finally:
        for name in [name for name in sys.modules if name.startswith("ngramspec.server")]:
            del sys.modules[name]
        sys.modules.update(as_before)


def test_a_parameter_that_is_added_to_the_table_is_there_on_every_route(app: FastAPI, engine: tuple[Engine, list[Any]]) -> None:
    _, submitted = engine
    schemas = app.openapi()["components"]["schemas"]
    for name in ("CompletionRequest", "ChatRequest", "LlamaCompletionBody", "InfillBody"):
        field = schemas[name]["properties"]["patience"]
        assert field["description"] == "How long to wait."
        assert {"type": "integer", "minimum": 1, "maximum": 9} in field["anyOf"]
    with TestClient(app, base_url="http://localhost") as client:
        for path, body in ROUTES.items():
            for more, expected in (({}, 3), ({"patience": None}, 3), ({"patience": 5}, 5), ({"patience": 5.0}, 5)):
                answer = client.post(path, json=body | more)
                assert answer.status_code == 200, answer.text
                assert submitted.pop().patience == expected
                if "generation_settings" in answer.json():
                    assert answer.json()["generation_settings"]["patience"] == expected
            for wrong in (0, 10, "5", True, 1.5, 10.0, []):
                refused = client.post(path, json=body | {"patience": wrong})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "patience"), wrong
        assert client.get("/props").json()["default_generation_settings"]["params"]["patience"] == 3
    assert not submitted


def test_every_parameter_is_either_shared_or_a_dialects_own() -> None:
    assert not OWN_SHAPE & SHARED.keys()
    assert {*OWN_SHAPE, *SHARED} == set(sampling_params.SamplingParams.__dataclass_fields__)


KINDS: tuple[Kind, ...] = (
    Integer(-1),
    Integer(0, 5),
    Number(0, 1),
    Number(0, 1, above=True),
    Number(-2, 2),
    Flag(),
    ChoiceOf(("a", "b")),
    TextKind(),
    TextList(2),
    TokenIds(),
    TokenIds(optional=True),
)
NUMBERS = st.integers(-3, 7) | st.sampled_from([MAX_INT, MAX_INT + 1, 2**63]) | st.floats()
VALUES = NUMBERS | st.booleans() | st.text("ab", max_size=2) | st.none()


def is_taken(model: Any, value: Any) -> bool:
    """Return whether the model, with a field `value`, takes a value."""
    try:
        model(value=value)
    except ValidationError:
        return False
    return True


def read_integers(value: Any) -> Any:
    """Return a value with 1 in place of 1.0, as fields that take integers read it."""
    if isinstance(value, list):
        return [read_integers(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(VALUES | st.lists(VALUES, max_size=3) | st.dictionaries(st.text("a1", max_size=1), NUMBERS, max_size=1))
def test_a_field_takes_what_its_option_takes(kind: Kind, value: Any) -> None:
    taken = is_taken(create_model("model", __base__=StrictModel, value=(make_strict_type(kind), ...)), value)
    if isinstance(kind, Integer | TokenIds):
        value = read_integers(value)
    assert taken == (kind.is_valid(value) and value is not None)  # null stands for the default, whatever the kind


def list_models(model: type[StrictModel]) -> Iterator[type[StrictModel]]:
    for each in model.__subclasses__():
        yield each
        yield from list_models(each)


def test_every_field_of_integers_takes_whole_floats() -> None:
    n_fields = 0
    for model in list_models(StrictModel):
        for name, field in model.model_fields.items():
            alone: Any = create_model(name, __base__=StrictModel, value=(Annotated[field.annotation, *field.metadata, "alone"], ...))
            for number, whole in ((1, 1.0), ([1], [1.0]), ([[1]], [[1.0]])):
                if is_taken(alone, number):
                    n_fields += 1
                    assert is_taken(alone, whole), (model, name)
                    assert alone(value=whole).value == alone(value=number).value
    assert n_fields > 100


def test_what_a_type_cannot_say() -> None:
    with pytest.raises(TypeError, match="declare it itself"):
        make_strict_type(TokenNumbers(-1, 1))
