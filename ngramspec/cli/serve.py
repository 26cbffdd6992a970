"""`ngramspec serve`: options, files and the environment enter, a running server leaves. What is served is `ngramspec.server`'s business.

Everything that takes time to import is imported when the command runs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ngramspec.cli import drafts as cli_drafts
from ngramspec.cli.datastore import _size

if TYPE_CHECKING:
    from ngramspec.engine import Engine
    from ngramspec.server.settings import ServerSettings

_MODEL, _DRAFTS, _NET, _KEYS, _LOAD, _LOG = "Model and device", "Speculation", "Address", "Keys", "Load", "Log"


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def serve(
    model: Annotated[
        str,
        _option(
            _MODEL,
            "A folder with safetensors, a .gguf file, a hub name (org/name), or smollm2; random:SHAPE to measure.",
            "--model",
            "-m",
            envvar="NGRAMSPEC_MODEL",
        ),
    ] = "smollm2",
    device: Annotated[str, _option(_MODEL, "cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str, _option(_MODEL, "float32; on CUDA bfloat16, float16 or float32. auto: the first of these.")] = "auto",
    gpu_memory_utilization: Annotated[
        float | None,
        _option(_MODEL, "Share of a CUDA device's memory that may be used, keys and values included. Default: 0.9.", metavar="F"),
    ] = None,
    threads: Annotated[int | None, _option(_MODEL, "Processor threads. Default: all cores.", min=1)] = None,
    max_model_len: Annotated[int | None, _option(_MODEL, "Most tokens of prompt and output. Default: the model's own.", min=1)] = None,
    max_seqs: Annotated[int | None, _option(_MODEL, "Sequences that run at a time. Default: 64.", min=1)] = None,
    kv_memory: Annotated[
        str | None,
        _option(
            _MODEL,
            "Memory for keys and values, such as 2G. Default: a quarter of what is free, at most 4G; on CUDA all that may be used.",
            metavar="SIZE",
        ),
    ] = None,
    prefix_cache: Annotated[
        bool, _option(_MODEL, "Use again what was computed for a prompt that begins alike.", "--prefix-cache/--no-prefix-cache")
    ] = True,
    datastore: Annotated[
        list[str] | None,
        _option(
            _DRAFTS,
            "Draft from this datastore; requests call it NAME, by default as its folder. May be repeated.",
            "--datastore",
            "-d",
            metavar="[NAME=]STORE",
            envvar="NGRAMSPEC_DATASTORES",
        ),
    ] = None,
    no_spec: Annotated[bool, _option(_DRAFTS, "One token per pass, without drafts.", "--no-spec")] = False,
    spec_length: Annotated[int | None, _option(_DRAFTS, "Longest draft. What pays decides below it.", min=1)] = None,
    spec_rows: Annotated[int | None, _option(_DRAFTS, "Most draft tokens verified in one pass.", min=1)] = None,
    max_order: Annotated[int | None, _option(_DRAFTS, "Longest n-gram looked up.", min=2)] = None,
    history: Annotated[int | None, _option(_DRAFTS, "Tokens of a sequence that its n-gram tables remember.", min=1)] = None,
    answers: Annotated[int | None, _option(_DRAFTS, "Tokens of finished answers to draft from, 0: none. Never across keys.", min=0)] = None,
    no_similar: Annotated[
        bool, _option(_DRAFTS, "Do not draft from the datastores' files that are most like the prompt.", "--no-similar")
    ] = False,
    no_recycle: Annotated[bool, _option(_DRAFTS, "Do not draft from the model's own candidates.", "--no-recycle")] = False,
    draft_model: cli_drafts.DraftModel = None,
    draft_layers: cli_drafts.DraftLayers = None,
    drafter: cli_drafts.Drafters = None,
    alone: cli_drafts.Alone = False,
    acceptance: cli_drafts.Acceptance = None,
    lenience: cli_drafts.Lenience = None,
    share_candidates: Annotated[
        bool,
        _option(
            _DRAFTS,
            "Share the model's own candidates between keys. They tell a little of what others wrote, so with several keys they are off.",
            "--share-candidates",
        ),
    ] = False,
    host: Annotated[str | None, _option(_NET, "Address to listen at. Default: 127.0.0.1, this machine only.")] = None,
    port: Annotated[int | None, _option(_NET, "0: any that is free; the log says which. Default: 8000.")] = None,
    allowed_host: Annotated[
        list[str] | None, _option(_NET, "Without keys: a further name that requests may call this server. May be repeated.", metavar="NAME")
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        _option(_NET, "A site whose pages may use this server, such as https://editor.example. May be repeated.", metavar="URL"),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        _option(
            _KEYS,
            "A key that requests must carry. Other users of this machine see it in the list of processes: prefer a file, or "
            "NGRAMSPEC_API_KEYS. May be repeated.",
            metavar="[NAME:]KEY",
        ),
    ] = None,
    admin_key: Annotated[
        list[str] | None,
        _option(_KEYS, "The same, for an administrator, who may change datastores and see where drafts come from.", metavar="[NAME:]KEY"),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        _option(
            _KEYS,
            'A file of keys: a line KEY or NAME:KEY each, or JSON: [{"name": "ci", "key": "…", "admin": false, "stores": ["project"]}].',
        ),
    ] = None,
    max_queue: Annotated[int | None, _option(_LOAD, "Sequences that wait; more are refused at once, with 429. Default: 64.")] = None,
    drain_timeout: Annotated[
        float | None, _option(_LOAD, "Seconds for running requests after SIGTERM or Ctrl-C. Default: 30.", metavar="S")
    ] = None,
    send_timeout: Annotated[
        float | None, _option(_LOAD, "Seconds until a client that does not read is dropped. Default: 20.", metavar="S")
    ] = None,
    receive_timeout: Annotated[
        float | None, _option(_LOAD, "Seconds that a client may take to send a request. Default: 30.", metavar="S")
    ] = None,
    pad_stream: Annotated[
        float | None,
        _option(
            _LOAD,
            "Answers leave at this many milliseconds a token, so that their pace does not tell what was drafted; hides it if a plain pass "
            "takes no longer. Default: 0, as soon as they are there.",
            metavar="MS",
        ),
    ] = None,
    log_format: Annotated[str | None, _option(_LOG, "text or json, one line a request, on standard error. Default: text.")] = None,
) -> None:
    """Serve a model over HTTP: OpenAI's routes, those of llama.cpp that editors use, and a page to try it at /.

    Listens at once; /health says 503 until the model is there. SIGTERM or Ctrl-C ends it when running requests are done, a second one at
    once. What has no option here is set by NGRAMSPEC_… variables, such as NGRAMSPEC_LIMITS__BODY_BYTES; an option goes before its variable.

    Examples:

      ngramspec serve --model ./my-model --datastore ~/.stores/project

      ngramspec serve --host 0.0.0.0 --api-key-file keys.json --log-format json
    """
    settings = _settings(
        host=host,
        port=port,
        allowed_hosts=allowed_host,
        cors_origins=cors_origin,
        api_keys=api_key,
        admin_keys=admin_key,
        api_key_file=api_key_file,
        max_queue=max_queue,
        drain_timeout=drain_timeout,
        send_timeout=send_timeout,
        receive_timeout=receive_timeout,
        pad_stream=pad_stream,
        log_format=log_format,
    )
    bounds = {
        "threads": threads,
        "gpu_memory_utilization": gpu_memory_utilization,
        "max_model_len": max_model_len,
        "max_seqs": max_seqs,
        "kv_memory": _size(kv_memory, "--kv-memory"),
        "spec_length": spec_length,
        "spec_rows": spec_rows,
        "max_order": max_order,
        "history": history,
        "answers": answers,
    }
    tenants = {key.name for key in settings.api_keys}
    engine = {name: value for name, value in bounds.items() if value is not None} | {
        "device": device,
        "dtype": dtype,
        "speculation": not no_spec,
        "similar": not no_similar,
        "recycle": not no_recycle and (share_candidates or len(tenants) < 2),
        "prefix_cache": prefix_cache,
        "datastore": named_stores(datastore or ()),
        **cli_drafts.draft_settings(draft_model, draft_layers, drafter, alone, acceptance, lenience),
    }
    _run(model, engine, settings)


def _settings(**given: Any) -> ServerSettings:
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from ngramspec.cli import main as cli
    from ngramspec.server.settings import ServerSettings

    try:
        return ServerSettings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))  # values are not repeated: they may be keys
        raise cli.BadInputError(f"{place}: {first['msg']}" if place else first["msg"]) from None
    except SettingsError as error:
        raise cli.BadInputError(str(error)) from None


def named_stores(given: Sequence[str]) -> dict[str, str]:
    """Folders by name from `NAME=STORE` and `STORE`, which is called as its folder is, with a number behind it where that is taken."""
    from ngramspec.cli import main as cli

    stores: dict[str, str] = {}
    for text in given:
        name, folder = match.groups() if (match := re.fullmatch(r"([\w.-]+)=(.+)", text)) else ("", text)
        if name in stores:
            raise cli.BadInputError(f"--datastore: the name {name} is given twice")
        base = re.sub(r"[^\w.-]", "_", Path(folder).expanduser().resolve().name) or "datastore"
        names = itertools.chain([base], (f"{base}-{i}" for i in itertools.count(2)))
        stores[name or next(each for each in names if each not in stores)] = str(Path(folder).expanduser())
    return stores


def _run(model: str, engine: dict[str, Any], settings: ServerSettings) -> None:
    from ngramspec.cli import main as cli
    from ngramspec.server import logs
    from ngramspec.server.serve import run

    log = logs.configure(settings.log_format)

    def make_engine() -> Engine:
        return cli._open(model, progress=lambda stage: logs.event("loading", stage), **engine)

    try:
        run(make_engine, settings)
    finally:
        log.stop()


def register(top: typer.Typer) -> None:
    """Add the command to the command line."""
    top.command("serve")(serve)
