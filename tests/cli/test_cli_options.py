"""Options that tables of settings declare: which commands have them, what is handed over, and what an addition to a table changes."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import typer
from playback import PlaybackEngine, run
from typer.testing import CliRunner

from ngramspec import config, foreign_names, sampling_params
from ngramspec.cli import common
from ngramspec.cli import complete as complete_module
from ngramspec.cli.common import BadInputError, parse_size
from ngramspec.cli.drafts import draft_settings
from ngramspec.cli.flags import with_options
from ngramspec.cli.main import app
from ngramspec.cli.serve_options import ServerOptions
from ngramspec.config import EngineConfig
from ngramspec.options import ChoiceOf, Flag, Integer, Number, TextList, option, options_of
from ngramspec.sampling_params import SamplingParams

FLAGS = {
    "complete": "--file -f --chat --raw --model -m --device --dtype --precision --kv-dtype --quantize --gpu-memory-utilization --threads "
    "--max-model-len --max-tokens --min-tokens --temperature -t --top-k --top-p --min-p --repetition-penalty --presence-penalty "
    "--frequency-penalty --seed --n --stop -s --ignore-eos --no-spec --show-drafts --spec-length --spec-rows --max-order --datastore -d "
    "--no-similar --no-recycle --no-syntax --draft-model --draft-layers --drafter --alone --acceptance --lenience --prediction --history "
    "--logprobs --json --quiet -q --grammar --json-schema",
    "serve": "--model -m --device --dtype --precision --kv-dtype --quantize --gpu-memory-utilization --threads --max-model-len "
    "--max-seqs --kv-memory --prefix-cache --no-prefix-cache --datastore -d --no-spec --spec-length --spec-rows --max-order --history "
    "--repo --with-installed --max-repo-files "
    "--answers --no-similar --no-recycle --no-syntax --draft-model --draft-layers --drafter --alone --acceptance --lenience "
    "--share-candidates --host --port --allowed-host --cors-origin --api-key --admin-key --api-key-file --max-queue --drain-timeout "
    "--send-timeout --receive-timeout --pad-stream --log-format",
    "beam": "--file -f --model -m --device --threads --width -w --max-tokens --length-penalty --early-stopping --no-spec --json --quiet -q",
}


def parameters(command: str) -> list[Any]:
    return typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]


def flags(command: str) -> list[str]:
    return [flag for each in parameters(command) for flag in [*each.opts, *each.secondary_opts]]


@pytest.mark.parametrize("command", FLAGS)
def test_flags_stay(command: str) -> None:
    assert not set(FLAGS[command].split()) - set(flags(command))
    assert len(flags(command)) == len(set(flags(command)))


@pytest.mark.parametrize(("command", "table"), [("complete", SamplingParams), ("complete", EngineConfig), ("serve", EngineConfig)])
def test_every_setting_is_an_option_with_its_default(command: str, table: type) -> None:
    declared = {each.name: each for each in parameters(command)}
    for each in options_of(table).values():
        if each.name == "grammar":  # an object in Python; on the command line a file or a text of the command's own
            assert declared[each.name].opts == ["--grammar"]
        elif each.flags is None or (each.only and command not in each.only):
            assert each.name not in declared
        elif each.default is True:
            assert any(flag.startswith("--no-") for flag in [*declared[each.name].opts, *declared[each.name].secondary_opts])
        else:
            shown = declared[each.name].default
            default = parse_size(shown, each.flag) if each.metavar == "SIZE" else shown
            assert default == (None if isinstance(each.kind, TextList) else each.default)


def test_the_commands_have_the_same_options_on_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    of = {name: {each.name: each.opts for each in parameters(name)} for name in ("complete", "serve")}
    for name in ("draft_model", "draft_layers", "drafter", "alone", "acceptance", "lenience"):
        assert of["complete"][name] == of["serve"][name]
    assert draft_settings() == {}
    assert draft_settings(draft_model="m", draft_layers=3, drafter=["x"]) == {"drafters": ["model:m", "layers:3", "x"]}
    assert draft_settings(draft_layers=3, alone=True) == {"drafters": ["layers:3"], "alone": True}
    with pytest.raises(BadInputError, match="got 2"):
        draft_settings(draft_model="m", draft_layers=3, alone=True)
    opened: list[dict[str, Any]] = []

    def open_engine(model: str, **settings: Any) -> None:
        opened.append(settings)
        raise BadInputError(model)

    monkeypatch.setattr(common, "open_engine", open_engine)
    assert run(monkeypatch, "complete", "x", "--draft-layers", 3, "--alone", "--acceptance", "rejection", "--lenience", 0.5, "-q") == 2
    assert {"drafters": ["layers:3"], "alone": True, "acceptance": "rejection", "lenience": 0.5}.items() <= opened[0].items()
    assert run(monkeypatch, "complete", "x", "-q") == 2
    assert not {"drafters", "alone", "acceptance", "lenience", "spec_rows", "device"} & opened[1].keys(), "the engine knows its defaults"


def test_precision_is_handed_on(engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "complete", "x", "--precision", "float32", "--kv-dtype", "float16", "--quantize", "q8_0", "-q") == 0
    assert {"precision": "float32", "kv_dtype": "float16", "quantize": "q8_0"}.items() <= engine.made.items()
    capsys.readouterr()
    assert run(monkeypatch, "complete", "x", "--precision", "int4", "-q") == 2
    assert "--precision" in (told := capsys.readouterr().err)
    assert "int8" in told


def test_variables_set_what_no_option_does(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"THREADS": "3", "SPEC_ROWS": "9", "RECYCLE": "off", "MAX_SEQS": "5", "PORT": "80", "LIMITS__DEPTH": "9"}.items():
        monkeypatch.setenv(f"NGRAMSPEC_{name}", value)
    assert run(monkeypatch, "complete", "x", "--spec-rows", 7, "-q") == 0
    assert {"threads": 3, "spec_rows": 7, "recycle": False}.items() <= engine.made.items()
    assert "max_seqs" not in engine.made, "`complete` has no such option"
    for command in ("complete", "beam", "serve"):
        monkeypatch.setenv("NGRAMSPEC_THREAD", "3")
        assert run(monkeypatch, command, *(["x", "-q"] if command != "serve" else [])) == 2
        assert "NGRAMSPEC_THREAD is no setting; NGRAMSPEC_THREADS is one" in capsys.readouterr().err
        monkeypatch.delenv("NGRAMSPEC_THREAD")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["serve", "-c", "4096"], "No such option: -c; use --max-model-len\n"),
        (["serve", "--ctx-size=4096"], "No such option: --ctx-size=4096; use --max-model-len\n"),
        (["serve", "-ngl", "99"], "No such option: -ngl; use --device cuda"),
        (["serve", "--max-num-seqs", "8"], "No such option: --max-num-seqs; use --max-seqs\n"),
        (["complete", "--n-predict", "8", "x"], "No such option: --n-predict; use --max-tokens"),
        (["complete", "--max-token", "8", "x"], "No such option: --max-token (Possible options: "),
        (["serve", "model.gguf"], "unexpected extra argument(s) (model.gguf); name the model with --model"),
        (["complete", "def", "f():"], "unexpected extra argument(s) (f():); put the prompt in quotes"),
    ],
)
def test_what_other_programs_take_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert run(monkeypatch, *arguments) == 2
    assert told in capsys.readouterr().err


def test_explained_options_are_ours() -> None:
    known = {flag for command in FLAGS for flag in flags(command)}
    for names, ours in foreign_names.FLAGS.items():
        assert set(re.findall(r"--[a-z][a-z-]+", ours)) <= known
        assert not set(names.split()) & set(flags("serve"))


@pytest.fixture
def more_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`SamplingParams` and `EngineConfig` with one setting more, and `complete` made of them."""
    warmth = ("warmth", float, option(0.5, Number(0, 1), "How warm."))
    careful = ("careful", bool, option(True, Flag(), "Look twice.", panel="Speculation"))
    monkeypatch.setattr(
        sampling_params, "SamplingParams", dataclasses.make_dataclass("More", [warmth], bases=(SamplingParams,), frozen=True)
    )
    monkeypatch.setattr(config, "EngineConfig", dataclasses.make_dataclass("More", [careful], bases=(EngineConfig,), frozen=True))
    importlib.reload(complete_module)
    yield
    monkeypatch.undo()
    importlib.reload(complete_module)


@pytest.mark.usefixtures("more_settings")
def test_a_setting_that_is_added_to_a_table_is_an_option(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(monkeypatch, "complete", "x", "--warmth", 0.75, "--no-careful", "-q") == 0
    assert (engine.made["params"].warmth, engine.made["careful"]) == (0.75, False)
    assert run(monkeypatch, "complete", "x", "-q") == 0
    assert engine.made["params"].warmth == 0.5
    assert "careful" not in engine.made, "the engine knows its defaults"
    capsys.readouterr()
    assert run(monkeypatch, "complete", "x", "--warmth", 2) == 2
    assert capsys.readouterr().err == "ngramspec: --warmth: warmth must be a number in [0, 1], got 2.0\n"
    assert run(monkeypatch, "complete", "--help") == 0
    told = capsys.readouterr().out
    assert "How warm. [default: 0.5]" in told
    assert "Off: Look twice." in told


@dataclass(frozen=True)
class Settings:
    depth: int | None = option(None, Integer(1, optional=True), "Deepest.")
    room: int = option(100, Integer(1), "Room.", metavar="SIZE", panel="Model and device")
    name: str = option("a", ChoiceOf(("a", "b")), "Name.", flags=("--name", "-x"))
    words: tuple[str, ...] = option((), TextList(2), "Words.")
    loud: bool = option(False, Flag(), "Loud.")
    quick: bool = option(True, Flag(), "Quick.", off="Slow.")
    both: bool = option(True, Flag(), "Both.", flags=("--both/--no-both",))
    elsewhere: int = option(1, Integer(1), "Elsewhere.", only=("other",))
    inside: int = option(1, Integer(1), "Inside.", flags=None)


def given(*arguments: str) -> dict[str, Any]:
    """What a command is handed over, and its own option."""
    handed: list[dict[str, Any]] = []

    @with_options("this", settings=Settings)
    def command(settings: dict[str, Any], own: int = 3) -> None:
        handed.append(settings | {"own": own})

    this = typer.Typer()
    this.command()(command)
    CliRunner().invoke(this, list(arguments), catch_exceptions=False)
    return handed[0]


@pytest.mark.parametrize(
    ("arguments", "handed"),
    [
        ([], {}),
        (["--depth", "1", "--own", "4"], {"depth": 1, "own": 4}),
        (["--room", "100", "--both"], {"room": 100, "both": True}),
        (["--room", "2K"], {"room": 2048}),
        (["--room", "100"], {"room": 100}),
        (["-x", "a"], {"name": "a"}),
        (["--words", "one", "--words", "two"], {"words": ["one", "two"]}),
        (["--loud", "--no-quick", "--no-both"], {"loud": True, "quick": False, "both": False}),
    ],
)
def test_what_is_given_is_handed_over(arguments: list[str], handed: dict[str, Any]) -> None:
    assert given(*arguments) == {"own": 3} | handed


def test_options_of_the_server_are_handed_over_as_its_settings_are() -> None:
    handed: list[dict[str, Any]] = []

    @with_options("serve", settings=ServerOptions)
    def command(settings: dict[str, Any]) -> None:
        handed.append(settings)

    this = typer.Typer()
    this.command()(command)
    given = "--alias a,b -a c --sampling temperature=0 --sampling stop=x --no-slots --allowed-host h --chat-template-kwargs {}"
    for line in (given, ""):
        CliRunner().invoke(this, line.split(), catch_exceptions=False)
    wanted = {"alias": "a,b,c", "sampling": {"temperature": 0, "stop": "x"}, "slots": False, "allowed_hosts": ["h"]}
    assert handed == [wanted | {"chat_template_kwargs": {}}, {}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--depth", "0"], "--depth: depth must be None or an integer from 1, got 0"),
        (["--room", "much"], "--room must be a size"),
        (["--name", "c"], "--name: name must be 'a' or 'b', got 'c'"),
        (["--words", "a", "--words", "b", "--words", "c"], "--words: words must be up to 2"),
        (["--words", "\udcff"], "--words is not valid Unicode"),
    ],
)
def test_values_out_of_bounds_name_their_option(arguments: list[str], message: str) -> None:
    with pytest.raises(BadInputError, match=message.replace("(", r"\(")):
        given(*arguments)


def test_options_of_other_commands_and_of_none() -> None:
    @with_options("this", settings=Settings)
    def command(settings: dict[str, Any]) -> None: ...

    names = list(inspect.signature(command).parameters)
    assert names == ["context", "room", "depth", "name", "words", "loud", "quick", "both"], "by heading"
