"""The command, with an engine that plays back a fixed text: what is printed where, and with which exit code."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from playback import TEXT, PlaybackEngine, PlaybackRequest, run

from ngramspec import ModelNotFoundError, OutOfMemoryError, __version__
from ngramspec.cli import main as cli
from ngramspec.cli.common import to_printable
from ngramspec.datastore import TokenizerMismatchError
from ngramspec.grammar.constraint import Grammar
from ngramspec.sampling_params import SamplingParams


@pytest.mark.parametrize("drafts", [[], ["--show-drafts"]])
def test_standard_output_is_the_text(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], drafts: list[str]
) -> None:
    assert run(monkeypatch, "complete", "def f():", *drafts) == 0
    printed = capsys.readouterr()
    assert printed.out == TEXT
    for figure in ("16 ", "8.0 tok/s", "2.00 tokens per pass", "8 accepted, 40%", "ngram", "bitwise", "7"):
        assert figure in printed.err
    assert engine.made["prompt"] == "def f():"
    assert engine.made["model"] == "smollm2"
    assert "speculation" not in engine.made, "not given, so the engine decides"


def test_drafts_are_coloured_in_a_terminal(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert run(monkeypatch, "complete", "x", "--show-drafts") == 0
    out = capsys.readouterr().out
    assert "\x1b[32mr\x1b[0me\x1b[32mt\x1b[0mu" in out
    assert out.endswith("\x1b[32mx\x1b[0m\n\n")


def test_options_reach_the_engine_and_the_request(engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    model = "random:SmolLM2-135M"
    options = f"--model {model} --no-spec --max-tokens 9 --min-tokens 2 --temperature 0.5 --top-k 5 --top-p 0.9 --min-p 0.1 --seed 3 --n 2"
    options += " --stop a --stop b --repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3 --ignore-eos --logprobs 2"
    options += " --spec-length 4 --spec-rows 8 --max-order 5 --history 99 --threads 1 --device cpu --dtype bfloat16 --max-model-len 77"
    assert run(monkeypatch, "complete", "x", *options.split()) == 0
    assert engine.made["params"] == SamplingParams(
        9, 2, 0.5, 5, 0.9, 0.1, 1.1, 0.2, 0.3, seed=3, n=2, stop=("a", "b"), ignore_eos=True, logprobs=2
    )
    wanted = {
        "model": "random:SmolLM2-135M",
        "speculation": False,
        "spec_length": 4,
        "spec_rows": 8,
        "max_order": 5,
        "history": 99,
        "threads": 1,
    }
    wanted |= {"device": "cpu", "dtype": "bfloat16", "max_model_len": 77}
    assert wanted.items() <= engine.made.items()


def test_json_is_one_document_with_all_figures(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "complete", "x", "--json", "--n", "2") == 0
    document = json.loads(capsys.readouterr().out)
    assert [choice["text"] for choice in document["choices"]] == [TEXT, TEXT]
    assert document["stats"]["tokens"] == 32
    assert document["stats"]["acceptance_rate"] == 0.4
    assert document["choices"][0]["stats"]["tokens_per_pass"] == 2.0
    assert (document["seed"], document["exactness"], document["tok_s"]) == (7, "bitwise", 16.0)


def test_several_choices_follow_each_other(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "complete", "x", "--n", "2", "-q") == 0
    printed = capsys.readouterr()
    assert printed.out == f"── 1 of 2\n{TEXT}\n── 2 of 2\n{TEXT}\n"
    assert printed.err == ""


@pytest.mark.parametrize("drafts", [[], ["--show-drafts"]])
def test_an_interrupt_prints_what_there_is(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], drafts: list[str]
) -> None:
    engine.interrupt_after = 3
    assert run(monkeypatch, "complete", "x", *drafts) == 130
    printed = capsys.readouterr()
    assert printed.out == TEXT
    assert "cancelled" in printed.err


@pytest.mark.parametrize(("source", "arguments"), [("pipe", []), ("pipe", ["-"]), ("file", [])])
def test_the_prompt_may_come_from_a_pipe_or_file(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Any, source: str, arguments: list[str]
) -> None:
    if source == "file":
        (tmp_path / "prompt").write_bytes("a\r\né".encode())
        arguments = ["--file", str(tmp_path / "prompt")]
    else:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO("a\r\né".encode())))
    assert run(monkeypatch, "complete", *arguments) == 0
    assert engine.made["prompt"] == "a\r\né"


def test_a_chat_is_a_users_message(engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "has_template", True)
    assert run(monkeypatch, "complete", "a", "--chat", "--n", "2", "--quiet") == 0
    assert engine.made["prompt"] == "[user]a"
    assert engine.made["params"].n == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["x", "--temperature", "-1"], "temperature must be a number in [0, 100], got -1.0"),
        (["x", "--max-tokens", "0"], "max_tokens"),
        (["x", "--spec-length", "0"], "--spec-length"),
        (["x", "--temperature", "101"], "--temperature: temperature must be"),
        (["x", "--lenience", "0"], "--lenience: lenience must be a number in (0, 1], got 0.0"),
        (["x", "--acceptance", "maybe"], "--acceptance: acceptance must be 'walk' or 'rejection', got 'maybe'"),
        (["x", "--stop", ""], "--stop: stop must be up to 64 non-empty strings"),
        (["x", "--min-tokens", "9", "--max-tokens", "8"], "min_tokens must be an integer from 0 to max_tokens (8), got 9"),
        (["x\udcff"], "the prompt is not valid Unicode: character 1 is \\udcff"),
        (["x\udcff", "--chat"], "the prompt is not valid Unicode"),
        (["x", "--stop", "\ud800"], "--stop is not valid Unicode: character 0 is \\ud800"),
        (["x", "--dtype", "\udcff"], "--dtype is not valid Unicode"),
        (["x", "--prediction", "no/\udcff/file"], "no/\\udcff/file"),
        (["--file", "no/\x1b[31m\nfile"], "cannot be read from no/\\x1b[31m\\nfile"),
        (["x", "--n\udcff"], "--n\\udcff"),
        (["x", "--file", "y"], "not both"),
        (["--file", "no/such/file"], "no/such/file"),
        ([], "there is no prompt"),
        ([""], "empty"),
        (["x", "--chat"], "no chat template"),
        (["x", "--unknown"], "--unknown"),
        (["x", "--seed", "one"], "--seed"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert run(monkeypatch, "complete", *arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    message = [line for line in printed.err.splitlines() if line != "ngramspec: loading"]
    assert len(message) == 1
    assert told in message[0]


@pytest.mark.parametrize(
    ("error", "code"), [(ModelNotFoundError("no model"), 2), (ValueError("dtype must be"), 2), (OutOfMemoryError("9 GiB"), 1)]
)
def test_errors_of_the_engine(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    engine.fail = error
    assert run(monkeypatch, "complete", "x", "-q") == code
    assert capsys.readouterr().err == f"ngramspec: {error}\n"


@pytest.mark.parametrize(
    ("error", "told"), [(MemoryError("1 TiB for an array"), "1 TiB for"), (MemoryError(), "Python could not")], ids=["numpy", "python"]
)
def test_memory_that_runs_out_is_one_line(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, told: str
) -> None:
    engine.fail = error
    assert run(monkeypatch, "complete", "x", "-q") == 1
    assert capsys.readouterr().err.startswith(f"ngramspec: memory ran out: {told}")


def test_an_unknown_command_names_those_there_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words, accepted in (
        (["create"], "build-datastore"),
        (["datastore", "create"], "info, verify"),
        (["serv"], "Did you mean 'serve'?"),
    ):
        assert run(monkeypatch, *words) == 2
        assert accepted in capsys.readouterr().err


def test_a_defect_shows_its_traceback(engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine.fail = ZeroDivisionError()
    monkeypatch.setattr(sys, "argv", ["ngramspec", "complete", "x"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_version_and_help() -> None:
    command = [sys.executable, "-m", "ngramspec"]
    assert subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout == f"ngramspec {__version__}\n"
    command[1:1] = ["-X", "importtime"]
    before = os.times()
    told = subprocess.run([*command, "complete", "--help"], capture_output=True, text=True, check=True)
    assert os.times().children_user - before.children_user < 5
    assert "--show-drafts" in told.stdout
    imported = {line.rpartition("|")[2].strip() for line in told.stderr.splitlines()}
    assert "ngramspec" in imported
    assert "torch" not in imported, "help must not import torch"


def test_importing_ngramspec_imports_nothing_heavy() -> None:
    """Nor does making any of the commands, as `--help` does."""
    code = "import sys, ngramspec, typer.main, ngramspec.cli.main as cli; list(typer.main.get_command(cli.app).commands.values()); "
    code += "print([m for m in ('torch', 'transformers', 'numba', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_command_does_not_wait_for_the_others_to_be_imported() -> None:
    code = "import sys, ngramspec.cli.main as cli; sys.argv = ['ngramspec', '--version']; sys.stdout = None\ntry: cli.main()\n"
    code += "except SystemExit: print(sorted(m for m in sys.modules if m.startswith('ngramspec.')), file=sys.stderr)"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    own = ["child_process", "cli", "cli.common", "cli.interrupts", "cli.main"]
    assert imported == f"{[f'ngramspec.{name}' for name in own]}\n"


LOSES_INTERRUPT = """
import signal, sys
class Dropped:
    def __del__(self): signal.raise_signal(signal.SIGINT)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP")
@pytest.mark.parametrize(
    ("given", "told"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "passive"}, "0")],
    ids=["the command's", "the user's", "the user's policy"],
)
def test_threads_do_not_hold_a_core_that_others_wait_for(given: dict[str, str], told: str) -> None:
    code = "import ctypes, sys; sys.argv[1:] = ['--version']\nfrom ngramspec.__main__ import run_command\n"
    code += "assert 'numba' not in sys.modules\ntry: run_command()\nfinally: ctypes.CDLL('libgomp.so.1')"
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    environment |= {"OMP_DISPLAY_ENV": "verbose", **given}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert f"GOMP_SPINCOUNT = '{told}'" in done.stderr


@pytest.mark.parametrize("module", ["typer", "tokenizers"])
@pytest.mark.parametrize("where", ["Dropped()", "signal.raise_signal(signal.SIGINT)"])
def test_an_interrupt_while_modules_are_imported_ends_the_command(tmp_path: Path, module: str, where: str) -> None:
    (tmp_path / f"{module}.py").write_text(
        f"{LOSES_INTERRUPT}\n{where}\nsys.path.remove({str(tmp_path)!r})\ndel sys.modules[__name__]\nimport {module}\n"
    )
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv[0] = 'ngramspec'\n"
    code += "from ngramspec.__main__ import run_command; run_command()"
    done = subprocess.run([sys.executable, "-c", code, "complete", "x", "-q"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert "__main__" not in done.stderr, "a traceback of the command"


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
def test_standard_streams_that_are_closed() -> None:
    code = "import os, sys; from ngramspec.cli import main as cli; sys.argv = ['ngramspec', *sys.argv[1:]]\n"
    code += "cli.main = lambda real=cli.main: (print([open(path).fileno() > 2 for path in [os.devnull] * 3]), real())\ncli.run_command()"
    command = ["sh", "-c", f'"{sys.executable}" -c "$0" complete -q <&- "$@"', code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "[True, True, True]\n",
        "ngramspec: the prompt is empty: give text as an argument in quotes, by --file FILE, or on standard input\n",
    )
    for closed in ("1", "2"):
        command = ["sh", "-c", f'"{sys.executable}" -c "$0" --version {closed}>&-', code]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert ("ngramspec" in done.stdout) == (closed == "2")


def test_the_end_of_a_command_frees_nothing_object_by_object() -> None:
    code = "import atexit, sys, ngramspec.cli.main as cli\nclass Held:\n    def __del__(self): print('freed', flush=True)\n"
    code += "held, main = Held(), cli.main\ncli.main = lambda: (atexit.register(print, 'handled'), main())\n"
    code += "sys.argv = ['ngramspec', *sys.argv[1:]]; cli.run_command()"
    for argument, status in (("--version", 0), ("--nonsense", 2)):
        done = subprocess.run([sys.executable, "-c", code, argument], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout.splitlines()[-1:]) == (status, ["handled"])
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code, "--version"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1


def test_bytes_of_the_command_line_that_are_no_text(tmp_path: Path) -> None:
    command = [sys.executable.encode(), b"-m", b"ngramspec", b"complete", b"x \xff", b"-q"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"ngramspec: the prompt is not valid Unicode: character 2 is \\udcff; UTF-8 text is accepted\n"


@pytest.mark.skipif(sys.platform != "linux", reason="macOS and Windows take arguments as UTF-8 in any locale")
def test_texts_of_the_command_line_are_utf_8_in_any_locale() -> None:
    code = "import sys; from ngramspec.cli.common import read_prompt; print(ascii(read_prompt(sys.argv[1], None)))"
    environment = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable.encode(), b"-c", code.encode(), "caf\u00e9".encode()]
    assert subprocess.run(command, env=environment, capture_output=True, check=True).stdout == b"'caf\\xe9'\n"
    command[-1] += b"\xff"
    assert b"is not valid Unicode: character 3" in subprocess.run(command, env=environment, capture_output=True, check=False).stderr


def test_warnings_begin_as_other_messages_do() -> None:
    code = "import logging, ngramspec.cli.main as cli\n"
    code += "warn = lambda **_: [logging.getLogger(name).warning('a\\nb') for name in names] and None; "
    code += "names = ['ngramspec.datastore.code_cache', 'ngramspecial']; cli.app = warn; cli.main()"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr == "ngramspec: a\nb\na\nb\n"


@pytest.mark.parametrize("kind", ["missing", "file", "damaged"])
@pytest.mark.parametrize("command", ["complete", "serve"])
def test_a_wrong_datastore_is_told_before_a_model_is_loaded(
    engine: type[PlaybackEngine],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: str,
    kind: str,
) -> None:
    monkeypatch.setitem(sys.modules, "ngramspec.server.run", SimpleNamespace(run=lambda *_: pytest.fail("it is served")))
    store = tmp_path / "a\nstore\x1b"
    if kind == "file":
        store.touch()
    elif kind == "damaged":
        store.mkdir()
        (store / "MANIFEST").write_text('{"format": 1}')
    assert run(monkeypatch, command, *(["x"] if command == "complete" else []), "-d", store) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith("ngramspec: --datastore: ")
    assert "a\\nstore\\x1b" in message
    assert not engine.made


@pytest.mark.parametrize("option", ["--host", "--cors-origin", "--api-key", "--device"])
def test_options_of_the_server_that_are_no_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert run(monkeypatch, "serve", option, "secret-\udcff-key") == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert "is not valid Unicode: character 7 is \\udcff" in message
    assert "secret" not in message


def test_an_error_of_a_datastore_that_the_engine_meets(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.fail = TokenizerMismatchError("store was made with another tokenizer")
    assert run(monkeypatch, "complete", "x", "-q") == 2
    assert capsys.readouterr().err == "ngramspec: store was made with another tokenizer\n"


def test_what_to_do_about_a_model_may_be_a_line_of_its_own(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.fail = ModelNotFoundError("install it with:\n  pip \x1b")
    assert run(monkeypatch, "complete", "x", "-q") == 2
    assert capsys.readouterr().err == "ngramspec: install it with:\n  pip \\x1b\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("été 日本 x_1.py", "été 日本 x_1.py"),
        ("a\nb\tc\x1b[0m\x7f", "a\\nb\\tc\\x1b[0m\\x7f"),
        ("\x9b31m", "\\x9b31m"),
        ("\udcff", "\\udcff"),
        ("\u202egnp.exe\u2028", "\\u202egnp.exe\\u2028"),
    ],
)
def test_names_are_printed_escaped(text: str, shown: str) -> None:
    assert to_printable(text) == shown


def test_sources_with_control_characters(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.source = "datastore:a\n\x1b[2J.py:7"
    engine.loading = "reading a\nfile"
    assert run(monkeypatch, "complete", "x", "--show-drafts") == 0
    err = capsys.readouterr().err
    assert "a\\n\\x1b[2J.py:7" in err.split("tokens", 2)[-1]
    assert err.count("a\\n\\x1b[2J.py:7") == 2, "a source, and a run of its tokens"
    assert "\x1b" not in err
    assert "ngramspec: reading a\\nfile\n" in err


def test_beams(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tiny.tiny_model("llama").save_pretrained(tmp_path)
    tiny.byte_tokenizer().save_pretrained(tmp_path)
    search = ["beam", "abcabcab", "-m", str(tmp_path), "--width", "2", "--max-tokens", "5", "--threads", "1", "-q"]
    documents = []
    for more in ([], ["--no-spec"]):
        assert run(monkeypatch, *search, *more, "--json") == 0
        documents.append(json.loads(capsys.readouterr().out))
    with_drafts, without = documents
    assert with_drafts["beams"] == without["beams"]
    assert [beam["score"] for beam in without["beams"]] == sorted((beam["score"] for beam in without["beams"]), reverse=True)
    assert run(monkeypatch, *search) == 0
    assert capsys.readouterr().out.count("── ") == 2


@pytest.mark.parametrize(
    "options",
    [("--width", "0"), ("--max-tokens", "0"), ("--length-penalty", "-11"), ("--length-penalty", "11"), ("--length-penalty", "nan")],
)
def test_beams_out_of_bounds_load_no_model(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: tuple[str, str]
) -> None:
    assert run(monkeypatch, "beam", "x", *options) == 2
    assert options[0] in capsys.readouterr().err
    assert not engine.made


# ------------------------------------------------------------------ the form of a text

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
GBNF, LARK = 'root ::= "a" | "b"', 'start: "a" | b\nb: "b"\n'


@pytest.mark.parametrize(
    ("option", "text", "expected"),
    [
        ("--json-schema", SCHEMA, Grammar.json_schema(SCHEMA)),
        ("--json-schema", "true", Grammar.json_schema("true")),
        ("--grammar", GBNF, Grammar.gbnf(GBNF)),
        ("--grammar", LARK, Grammar.lark(LARK)),
    ],
)
def test_a_form_is_given_as_text_or_file(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str, text: str, expected: Grammar
) -> None:
    (tmp_path / "form").write_text(text)
    (tmp_path / "marked").write_text(text, "utf-8-sig")
    for given in (text, tmp_path / "form", tmp_path / "marked"):
        assert run(monkeypatch, "complete", "x", option, given) == 0
        assert engine.made["params"].grammar == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--json-schema", "absent.json"], "no file"),
        (["--json-schema", "[1]"], "must be an object, true or false"),
        (["--json-schema", "{" * 5000], "must be JSON"),
        (["--json-schema", "/"], "cannot be read"),
        (["--grammar", "absent.gbnf"], "neither a rule `root ::= …`"),
        (["--grammar", 'root ::= "' + "a" * 40_000 + '"'], "at most 32768 bytes"),
        (["--grammar", GBNF, "--json-schema", SCHEMA], "not both"),
        (["--grammar", "\udcff"], "not valid Unicode"),
    ],
)
def test_what_is_no_form_is_told(
    engine: type[PlaybackEngine],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    said: str,
) -> None:
    assert run(monkeypatch, "complete", "x", *options) != 0
    printed = " ".join(capsys.readouterr().err.split())
    assert said in printed
    assert options[0] in printed
    assert not engine.made, "no model is loaded"


def test_a_wrong_model_is_one_line_before_anything_is_imported() -> None:
    models = ["./nosuch", "none.gguf", "~nosuch/none.gguf", "random:none", __file__, "a b"]
    cases = [[*command, "--model", model] for command in (["complete", "x"], ["serve"], ["beam", "x"]) for model in models]
    code = f"""
import sys
import ngramspec.cli.main as cli
for case in {cases!r}:
    sys.argv = ["ngramspec", *case]
    try:
        cli.main()
    except SystemExit as end:
        print(end.code, sorted({{"torch", "transformers", "numba", "fastapi"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "2 []\n" * len(cases), done.stderr
    for (*_, model), line in zip(cases, done.stderr.splitlines(), strict=True):
        assert line.startswith("ngramspec: ")
        assert model.removeprefix("random:") in line


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps a folder that a process works in")
def test_a_deleted_working_folder_is_named(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    assert run(monkeypatch, "complete", "x") == 2
    assert capsys.readouterr().err == "ngramspec: the current folder has been deleted; change to another one and run the command again\n"
    assert run(monkeypatch, "--version") == 0


def test_statistics_fit_into_eighty_columns(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PlaybackRequest, "seed", 2**64 - 1)
    assert run(monkeypatch, "complete", "x") == 0
    table = [line.rstrip() for line in capsys.readouterr().err.splitlines()]
    assert str(2**64 - 1) in "".join(table)
    assert [line for line in table if len(line) > 80] == []
