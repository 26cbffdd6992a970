"""Settings from the environment, from options, from a file of keys; what they come to for the engine."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from ngramspec.cli import main as cli
from ngramspec.cli import serve as cli_serve
from ngramspec.server import logs
from ngramspec.server.settings import Key, ServerSettings, read_keys


def opened(settings: ServerSettings) -> dict[str, tuple[str, bool, list[str] | None]]:
    """name: (key, admin, stores)."""
    return {
        key.name: (key.key.get_secret_value(), key.admin, None if key.stores is None else sorted(key.stores)) for key in settings.api_keys
    }


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any], ServerSettings]]:
    """What `serve` would run."""
    calls: list[tuple[str, dict[str, Any], ServerSettings]] = []
    monkeypatch.setattr(cli_serve, "_run_server", lambda *call: calls.append(call))
    return calls


def serve(*options: str) -> Any:
    return CliRunner().invoke(cli.app, ["serve", *options])


def test_defaults_are_for_one_person_on_one_machine() -> None:
    settings = ServerSettings()
    assert (settings.host, settings.api_keys, settings.cors_origins, settings.pad_stream) == ("127.0.0.1", (), (), 0)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PORT": "1234",
        "API_KEYS": "editor:first-key, second-key\nthird-key",
        "ADMIN_KEYS": "boss:fourth-key",
        "CORS_ORIGINS": "https://a.example https://b.example",
        "LIMITS__BODY_BYTES": "5000",
        "LOG_FORMAT": "json",
    }.items():
        monkeypatch.setenv(f"NGRAMSPEC_{name}", value)
    settings = ServerSettings()
    assert (settings.port, settings.limits.body_bytes, settings.log_format) == (1234, 5000, "json")
    assert settings.cors_origins == ("https://a.example", "https://b.example")
    assert opened(settings) == {
        "editor": ("first-key", False, None),
        "key2": ("second-key", False, None),
        "key3": ("third-key", False, None),
        "boss": ("fourth-key", True, None),
    }
    monkeypatch.setenv("NGRAMSPEC_API_KEYS", json.dumps([{"name": "ci", "key": "json-key-1", "stores": ["x"]}]))
    assert opened(ServerSettings())["ci"] == ("json-key-1", False, ["x"])


def test_files_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# for the team\nfirst-key\n\nci:second-key\n")
    assert [(key.name, key.key.get_secret_value()) for key in read_keys(file)] == [("", "first-key"), ("ci", "second-key")]
    file.write_text(json.dumps([{"key": "third-key", "admin": True, "stores": []}]))
    assert opened(ServerSettings(api_key_file=file)) == {"key1": ("third-key", True, [])}
    file.write_text("# none\n")
    with pytest.raises(ValidationError, match="no key"):
        ServerSettings(api_key_file=file)
    with pytest.raises(ValidationError, match="cannot be read"):
        ServerSettings(api_key_file=tmp_path / "missing")


@pytest.mark.parametrize("key", ["short", "with blank here", "nön-ascii-key", "line\nend-of-key", "", "a:b:c" + "\x00" * 8])
def test_keys_that_cannot_be_sent(key: str) -> None:
    with pytest.raises(ValidationError) as error:
        Key(key=key)  # type: ignore[arg-type]
    assert not key or key not in str(error.value.errors()[0]["msg"])


def test_the_same_key_twice() -> None:
    with pytest.raises(ValidationError, match="twice"):
        ServerSettings(api_keys=("a:the-same-key", "b:the-same-key"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["first-key-1", "key1:second-key"], "'key1'"),
        (["key2:first-key-1", "second-key"], "'key2'"),
        (["a:first-key-1", "b:second-key", "a:third-key-1"], "number 1 and 3"),
        ([":first-key-1"], "empty name"),
        ([{"name": "", "key": "first-key-1"}], "name"),
        ([{"name": "a", "key": "first-key-1", "stores": []}, {"name": "a", "key": "second-key", "stores": ["x"]}], "'a'"),
    ],
)
def test_no_two_keys_share_a_tenant(tmp_path: Path, keys: list[Any], told: str) -> None:
    file = tmp_path / "keys"
    file.write_text("\n".join(keys) if isinstance(keys[0], str) else json.dumps(keys))
    for given in ({"api_key_file": file}, {"api_keys": tuple(keys)}, {"api_keys": keys[:1], "admin_keys": keys[1:]}):
        with pytest.raises(ValidationError) as error:
            ServerSettings(**given)  # type: ignore[arg-type]
        message = str(error.value.errors()[0]["msg"]) + str(error.value.errors()[0]["loc"])
        assert told in message
        assert "first-key" not in message


def test_keys_are_not_shown(tmp_path: Path) -> None:
    settings = ServerSettings(api_keys=("a:very-secret-key",))  # type: ignore[arg-type]
    assert "very-secret" not in repr(settings) + str(settings.model_dump())


def test_options_reach_the_server_and_the_engine(ran: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NGRAMSPEC_PORT", "1")
    monkeypatch.setenv("NGRAMSPEC_MAX_QUEUE", "7")
    monkeypatch.setenv("NGRAMSPEC_MODEL", "from-the-environment")
    monkeypatch.setenv("NGRAMSPEC_MAX_ORDER", "7")
    monkeypatch.setenv("NGRAMSPEC_SPEC_LENGTH", "8")
    stores = ["-d", f"code={tmp_path}/one", "-d", f"{tmp_path}/code", "-d", f"{tmp_path}/odd name"]
    options = ["--port", "2", "--api-key", "a:first-key-1", "--api-key", "second-key", "--kv-memory", "2G", "--no-prefix-cache", *stores]
    result = serve(*options, "--pad-stream", "25", "--spec-rows", "9", "--spec-length", "64", "--cors-origin", "https://a.example")
    assert result.exit_code == 0, result.output
    ((model, engine, settings, trees, with_installed, _),) = ran
    assert (trees, with_installed) == ({}, False)
    assert model == "from-the-environment"
    assert (settings.port, settings.max_queue, settings.pad_stream) == (2, 7, 25)
    assert opened(settings) == {"a": ("first-key-1", False, None), "key2": ("second-key", False, None)}
    assert engine["datastore"] == {"code": f"{tmp_path}/one", "code-2": f"{tmp_path}/code", "odd_name": f"{tmp_path}/odd name"}
    assert (engine["kv_memory"], engine["spec_rows"], engine["prefix_cache"], engine["recycle"]) == (2 << 30, 9, False, False)
    assert (engine["max_order"], engine["spec_length"]) == (7, 64), "an option goes before its variable, also with the default's value"
    assert "max_seqs" not in engine, "the engine knows its own defaults"


@pytest.mark.parametrize(
    ("options", "recycle"),
    [
        ([], True),
        (["--api-key", "a:one-key-only"], True),
        (["--api-key", "a:the-key-of-a", "--api-key", "b:the-key-of-b"], False),
        (["--api-key", "a:the-key-of-a", "--admin-key", "b:the-key-of-b"], False),
        (["--api-key", "a:the-key-of-a", "--api-key", "b:the-key-of-b", "--share-candidates"], True),
        (["--share-candidates", "--no-recycle"], False),
        (["--api-key-file", "FILE"], False),
        (["--api-key-file", "FILE", "--share-candidates"], True),
    ],
)
def test_candidates_are_shared_among_one(ran: list[Any], options: list[str], recycle: bool, tmp_path: Path) -> None:
    """A file has one key now, and may have more later."""
    (tmp_path / "keys").write_text("a:one-key-only", "utf-8")
    assert serve(*(option.replace("FILE", str(tmp_path / "keys")) for option in options)).exit_code == 0
    assert ran[0][1].get("recycle", True) is recycle


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--port", "70000"], "--port: must be at most 65535"),
        (["--api-key", "short"], "--api-key: key: a key must be 8 or more"),
        (["--api-key", "a b:good-long-key"], "--api-key: name: "),
        (["--api-key-file", "/nowhere/keys"], "/nowhere/keys"),
        (["--drain-timeout", "-1"], "--drain-timeout: must be"),
        (["--log-format", "xml"], "--log-format: must be 'text' or 'json'"),
        (["--fim-window", "some"], "number of lines, or any"),
        (["--root-path", "/llm/"], "--root-path: must be a path such as /llm"),
        (["--api-prefix", "llm"], "--api-prefix: must be a path such as /llm"),
        (["--kv-memory", "lots"], "--kv-memory"),
        (["-d", "a=x", "-d", "a=y"], "given twice"),
    ],
)
def test_bad_options(ran: list[Any], options: list[str], told: str) -> None:
    result = serve(*options)
    assert isinstance(result.exception, cli.BadInputError)
    assert told in str(result.exception)
    assert "good-long-key" not in str(result.exception)
    assert not ran


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ('[{"key": "good-long-key"}, {"key": "short"}]', "key 2: key: a key must be 8 or more"),
        ('[{"key": "good-long-key", "nam": "ci"}]', "key 1: nam: is no field"),
        ('{"key": "good-long-key", "name": "a b"}', "key 1: name: must match"),
        ("ci:good-long-key\nshort", "key 2: key: a key must be 8 or more"),
    ],
)
def test_errors_of_a_file_of_keys_name_the_file_and_the_entry(ran: list[Any], tmp_path: Path, keys: str, told: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(keys)
    message = str(serve("--api-key-file", str(file)).exception)
    assert message.startswith(f"{file}: {told}")
    assert "good-long-key" not in message
    assert not ran


def test_errors_name_the_variable_that_a_setting_comes_from(ran: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in (("NGRAMSPEC_MAX_QUEUE", "-3"), ("NGRAMSPEC_LIMITS__BODY_BYTES", "0")):
        with monkeypatch.context() as environment:
            environment.setenv(variable, value)
            assert str(serve().exception).startswith(f"{variable}: must be at least")
    assert not ran


class Stuck(io.StringIO):
    """A log that nobody reads any more."""

    def __init__(self) -> None:
        super().__init__()
        self.read = threading.Event()

    def write(self, text: str) -> int:
        assert self.read.wait(60)
        return super().write(text)


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores what `configure` changes. A busy machine has time to write the log."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    monkeypatch.setattr(logs, "FLUSH_S", 60)
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.mark.usefixtures("root")
def test_a_log_that_nobody_reads_holds_nobody_up() -> None:
    stream = Stuck()
    log = logs.configure("json", stream=stream)
    n = logs.WAITING_LINES + 100
    for i in range(n):
        logs.log_request({"event": "request", "id": str(i), "method": "GET", "route": "/", "status": 200, "key": ""})
    stream.read.set()
    log.stop()
    written = [json.loads(line)["id"] for line in stream.getvalue().splitlines()]
    assert logs.WAITING_LINES <= len(written) < n
    assert written == [str(i) for i in range(len(written))]


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_lines_of_the_log(log_format: str) -> None:
    stream = io.StringIO()
    log = logs.configure(log_format, stream=stream)
    logs.log_event("ready", "it is served", url="http://x")
    try:
        raise RuntimeError("two\nlines")
    except RuntimeError:
        logging.getLogger("ngramspec.server").exception("it failed")
    logging.getLogger("uvicorn.error").info("chatter")
    log.stop()
    text = stream.getvalue()
    assert "chatter" not in text
    if log_format == "json":
        ready, failed = (json.loads(line) for line in text.splitlines())
        assert {"event": "ready", "url": "http://x", "level": "info"}.items() <= ready.items()
        assert failed["level"] == "error"
        assert "RuntimeError: two\nlines" in failed["message"]
    else:
        assert "INFO ngramspec.server: it is served" in text


def test_files_may_begin_with_a_mark_of_byte_order(tmp_path: Path) -> None:
    file = tmp_path / "given"
    for text in ("secret-key", '[{"name": "ci", "key": "secret-key"}]'):
        file.write_text(text, "utf-8-sig")
        assert [key.key.get_secret_value() for key in read_keys(file)] == ["secret-key"]
    file.write_text("{{ messages }}", "utf-8-sig")
    assert ServerSettings(chat_template=str(file)).chat_template == "{{ messages }}"
