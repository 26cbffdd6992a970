"""benchmarks.server tools: an agent's turns against a server of a tiny model, and what it says of them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import tiny_gguf

from benchmarks.agent import Project, check_calls
from benchmarks.server import main
from benchmarks.server_process import TEMPLATE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    metadata: dict[str, str | int | float | None] = {"llama.context_length": 4096, "tokenizer.chat_template": TEMPLATE}
    return str(tiny_gguf.write_started(tmp_path_factory.mktemp("agent") / "m.gguf", metadata=metadata))


def test_every_turn_is_a_call(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["tools", "--model", model, "--turns", "3"])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["turns"], document["parsed"], document["valid"], document["grows"]) == (3, 3, 3, True)
    assert 0.5 < document["cached"] < 1
    assert document["acceptance_length"] > 1


def test_a_turn_may_be_a_call_or_a_text(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["tools", "--model", model, "--turns", "2", "--auto"])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["tool_choice"], document["turns"], document["leaked"]) == ("auto", 2, 0)
    assert document["parsed"] + document["text"] == 2


def test_tools_work_on_files() -> None:
    project = Project()
    assert project.run("write_file", {"path": "a.py", "content": "x = 1\ny = 2\n"}).startswith("wrote 12")
    assert project.run("count_lines", {"path": "a.py"}) == "2"
    assert "a.py: y = 2" in project.run("find_text", {"text": "y ="})
    assert project.run("read_file", {"path": "nothing"}).startswith("error")


@pytest.mark.parametrize(
    ("name", "arguments", "fits"),
    [
        ("look_up", '{"word": "a"}', True),
        ("look_up", '{"word": 1}', False),
        ("look_up", "{", None),
        ("nobody", "{}", None),
    ],
)
def test_what_fits(name: str, arguments: str, fits: bool | None) -> None:
    call = SimpleNamespace(function=SimpleNamespace(name=name, arguments=arguments))
    assert check_calls([call]) is fits
    assert check_calls([call, call]) is check_calls([]) is check_calls(None) is None
