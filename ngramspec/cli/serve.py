"""`ngramspec serve`: options, files and the environment enter, a running server leaves. What is served is `ngramspec.server`'s business.

Everything that takes time to import is imported when the command runs.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ngramspec.cli import common, drafts
from ngramspec.cli.common import BadInputError, check_text, option
from ngramspec.cli.environment import check_names, read_environment
from ngramspec.cli.flags import ENGINE, MODEL_HELP, SAMPLING, SPECULATION, with_options
from ngramspec.cli.hub_file import fetch_file
from ngramspec.config import EngineConfig
from ngramspec.options import options_of

if TYPE_CHECKING:
    from ngramspec.engine.llm_engine import Engine
    from ngramspec.server.settings import ServerSettings

_NET, _KEYS, _LOAD, _LOG = "Address", "Keys", "Load", "Log"


@with_options("serve", engine_settings=EngineConfig)
def serve(
    engine_settings: dict[str, Any],
    model: Annotated[str, option(ENGINE, MODEL_HELP, "--model", "-m", envvar="NGRAMSPEC_MODEL")] = "smollm2",
    hf_repo: Annotated[
        str | None,
        option(
            ENGINE,
            "A GGUF file of a hub repository, fetched once; without QUANT its Q4_K_M.",
            "--hf-repo",
            "-hf",
            metavar="ORG/NAME[:QUANT]",
            envvar="NGRAMSPEC_HF_REPO",
        ),
    ] = None,
    datastore: Annotated[
        list[str] | None,
        option(
            SPECULATION,
            "Draft from this datastore; requests call it NAME, by default as its folder. May be repeated.",
            "--datastore",
            "-d",
            metavar="[NAME=]STORE",
            envvar="NGRAMSPEC_DATASTORES",
        ),
    ] = None,
    repo: Annotated[
        list[str] | None,
        option(
            SPECULATION,
            "Draft from this working tree: its datastore is built in the user's cache while the server serves, and follows every file that "
            "is saved. Of several trees, each has an address of its own. May be repeated.",
            "--repo",
            metavar="[NAME=]PATH",
            envvar="NGRAMSPEC_REPOS",
        ),
    ] = None,
    with_installed: Annotated[
        bool, option(SPECULATION, "With --repo: also from the packages in the tree's own virtual environment.", "--with-installed")
    ] = False,
    max_repo_files: Annotated[
        int | None, option(SPECULATION, "Files of text that a --repo may have. Default: 100000.", "--max-repo-files", min=1)
    ] = None,
    draft_model: drafts.DraftModel = None,
    draft_layers: drafts.DraftLayers = None,
    drafter: drafts.Drafters = None,
    alone: drafts.Alone = False,
    share_candidates: Annotated[
        bool,
        option(
            SPECULATION,
            "Share the model's own candidates between keys. They tell a little of what others wrote, so with several keys they are off.",
            "--share-candidates",
        ),
    ] = False,
    alias: Annotated[
        list[str] | None,
        option(
            ENGINE,
            "The name under which the model is listed and answers; several with commas between them, the first in answers. Default: the "
            "model's own.",
            "--alias",
            "-a",
            metavar="NAME[,NAME]",
        ),
    ] = None,
    strict_model: Annotated[
        bool, option(ENGINE, "Refuse requests that name another model, with 404. Else they are answered.", "--strict-model")
    ] = False,
    chat_template: Annotated[
        str | None,
        option(
            ENGINE,
            "Jinja, a file of it, or a name such as chatml, in place of the model's chat template.",
            "--chat-template",
            "--chat-template-file",
        ),
    ] = None,
    chat_template_kwargs: Annotated[
        str | None,
        option(
            ENGINE,
            "Variables of the chat template of requests that do not say, such as '{\"enable_thinking\": false}'.",
            "--chat-template-kwargs",
            "--default-chat-template-kwargs",
            metavar="JSON",
        ),
    ] = None,
    reasoning_format: Annotated[
        str | None,
        option(
            ENGINE,
            "none: a model's thoughts stay in the text of chats. auto: they are reasoning_content, if its template has marks for them. "
            "Default: auto.",
            "--reasoning-format",
            metavar="FORMAT",
        ),
    ] = None,
    prefill_assistant: Annotated[
        bool,
        option(
            ENGINE,
            "An answer goes on with a conversation's last message if that is the assistant's, as in llama.cpp.",
            "--prefill-assistant",
        ),
    ] = False,
    return_tokens_as_token_ids: Annotated[
        bool,
        option(ENGINE, "Log-probabilities name tokens as token_id:17, unless a request says otherwise.", "--return-tokens-as-token-ids"),
    ] = False,
    sampling: Annotated[
        list[str] | None,
        option(
            SAMPLING, "A sampling parameter of requests that do not say, such as temperature=0.2. May be repeated.", metavar="NAME=VALUE"
        ),
    ] = None,
    host: Annotated[
        str | None,
        option(
            _NET,
            "Address to listen at, or several with commas; or the path of a Unix socket, NAME.sock. Default: 127.0.0.1, this machine.",
        ),
    ] = None,
    port: Annotated[int | None, option(_NET, "0: any that is free; the log says which. Default: 8000.")] = None,
    api_prefix: Annotated[str | None, option(_NET, "The path under which all routes are, such as /llm.", metavar="/PATH")] = None,
    root_path: Annotated[
        str | None,
        option(_NET, "Where a proxy shows the server, such as /llm: requests may have this path in front, or not.", metavar="/PATH"),
    ] = None,
    no_playground: Annotated[bool, option(_NET, "Without the page at / to try the model.", "--no-playground", "--no-ui")] = False,
    no_metrics: Annotated[bool, option(_NET, "Without /metrics, for Prometheus.", "--no-metrics")] = False,
    force_include_usage: Annotated[
        bool, option(_NET, "Every piece of a stream tells the usage so far, asked for or not.", "--force-include-usage")
    ] = False,
    per_request_metrics: Annotated[
        bool, option(_NET, "Answers tell their times, as vLLM's do.", "--per-request-metrics", "--enable-per-request-metrics")
    ] = False,
    no_slots: Annotated[bool, option(_NET, "Without /slots, which tells how many sequences run.", "--no-slots")] = False,
    slot_save_path: Annotated[
        Path | None,
        option(_NET, "A folder for slots that clients save by /slots/ID, each key's apart.", "--slot-save-path", metavar="FOLDER"),
    ] = None,
    allowed_host: Annotated[
        list[str] | None, option(_NET, "Without keys: a further name that requests may call this server. May be repeated.", metavar="NAME")
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        option(
            _NET,
            "A site whose pages may use this server, such as https://editor.example, or * for every one. May be repeated.",
            metavar="URL",
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        option(
            _KEYS,
            "A key that requests must carry. Other users of this machine see it in the list of processes: prefer a file, or "
            "NGRAMSPEC_API_KEYS. May be repeated.",
            metavar="[NAME:]KEY",
        ),
    ] = None,
    admin_key: Annotated[
        list[str] | None,
        option(_KEYS, "The same, for an administrator, who may change datastores and see where drafts come from.", metavar="[NAME:]KEY"),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        option(
            _KEYS,
            'A file of keys: a line KEY or NAME:KEY each, or JSON: [{"name": "ci", "key": "…", "admin": false, "stores": ["project"]}].',
        ),
    ] = None,
    admin_on_loopback: Annotated[
        bool,
        option(
            _KEYS,
            "Without keys: requests from this machine may use /admin. So may, then, whoever a proxy on this machine lets in.",
            "--admin-on-loopback",
        ),
    ] = False,
    max_queue: Annotated[int | None, option(_LOAD, "Sequences that wait; more are refused at once, with 429. Default: 64.")] = None,
    drain_timeout: Annotated[
        float | None, option(_LOAD, "Seconds for running requests after SIGTERM or Ctrl-C. Default: 30.", metavar="S")
    ] = None,
    send_timeout: Annotated[
        float | None, option(_LOAD, "Seconds until a client that does not read is dropped. Default: 20.", metavar="S")
    ] = None,
    receive_timeout: Annotated[
        float | None, option(_LOAD, "Seconds that a client may take to send a request. Default: 30.", metavar="S")
    ] = None,
    parse_special: Annotated[
        bool | None,
        option(
            _LOAD,
            "Control tokens such as <|fim_prefix|> are spelled out in prompts of /v1/completions and /completion, unless a request says "
            "parse_special. Default: they are control tokens, as in llama.cpp and vLLM; in messages they never are.",
            "--parse-special/--no-parse-special",
        ),
    ] = None,
    fim_order: Annotated[
        str | None,
        option(
            _LOAD,
            "What stands first in prompts to fill in the middle: prefix-first, as models are trained, or suffix-first, with which a key "
            "changes only the prompt's end and suggestions come much sooner. Default: prefix-first.",
            metavar="ORDER",
        ),
    ] = None,
    fim_window: Annotated[
        str | None,
        option(
            _LOAD,
            "Lines before the cursor that an editor sends, llama.vim's n_prefix. A prefix of as many lines begins with a line that stays "
            "the same while the cursor goes down, so that the prefix cache has the prompt's beginning. Default: 256; any: every prefix of "
            "32 lines or more does; 0: none.",
            metavar="LINES",
        ),
    ] = None,
    pad_stream: Annotated[
        float | None,
        option(
            _LOAD,
            "Answers leave at this many milliseconds a token, so that their pace does not tell what was drafted; hides it if a plain pass "
            "takes no longer. Default: 0, as soon as they are there.",
            metavar="MS",
        ),
    ] = None,
    log_format: Annotated[str | None, option(_LOG, "text or json, one line a request, on standard error. Default: text.")] = None,
) -> None:
    """Serve a model over HTTP: OpenAI's routes, those of llama.cpp that editors use, and a page to try it at /.

    Listens at once; /health says 503 until the model is there. SIGTERM or Ctrl-C ends it when running requests are done, a second one at
    once. What has no option here is set by NGRAMSPEC_… variables, such as NGRAMSPEC_LIMITS__BODY_BYTES; an option goes before its variable.

    Examples:

      ngramspec serve -hf Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M --repo .

      ngramspec serve --model ./my-model --repo . --with-installed

      ngramspec serve --model ./my-model --datastore ~/.stores/project

      ngramspec serve --host 0.0.0.0 --api-key-file keys.json --log-format json
    """
    settings = _make_settings(
        host=host,
        port=port,
        chat_template=chat_template,
        chat_template_kwargs=None if chat_template_kwargs is None else parse_object(chat_template_kwargs, "--chat-template-kwargs"),
        reasoning_format=reasoning_format,
        prefill_assistant=prefill_assistant or None,
        per_request_metrics=per_request_metrics or None,
        force_include_usage=force_include_usage or None,
        metrics=False if no_metrics else None,
        sampling=None if sampling is None else parse_sampling(sampling),
        api_prefix=api_prefix,
        root_path=root_path,
        return_tokens_as_token_ids=return_tokens_as_token_ids or None,
        playground=False if no_playground else None,
        slots=False if no_slots else None,
        slot_save_path=slot_save_path,
        allowed_hosts=allowed_host,
        cors_origins=cors_origin,
        api_keys=api_key,
        admin_keys=admin_key,
        api_key_file=api_key_file,
        admin_on_loopback=admin_on_loopback or None,
        alias=None if alias is None else ",".join(alias),
        strict_model=strict_model or None,
        max_queue=max_queue,
        drain_timeout=drain_timeout,
        send_timeout=send_timeout,
        receive_timeout=receive_timeout,
        parse_special=parse_special,
        fim_order=fim_order,
        fim_window=fim_window,
        pad_stream=pad_stream,
        log_format=log_format,
    )
    _add_environment(engine_settings, type(settings))
    tenants = {key.name for key in settings.api_keys}
    engine_settings["recycle"] &= share_candidates or len(tenants) < 2
    engine = engine_settings | drafts.draft_settings(draft_model, draft_layers, drafter, alone)
    engine["datastore"] = parse_stores(datastore or ())
    if repo and alone:
        raise BadInputError("--repo: a drafter that drafts alone has no datastore beside it; leave out --alone")
    if with_installed and not repo:
        raise BadInputError("--with-installed: name the working tree whose packages are meant, with --repo PATH")
    if hf_repo is not None:
        if model != "smollm2":
            raise BadInputError("give either --model or -hf, not both")
        model = str(fetch_file(hf_repo))
    trees = parse_workspaces(repo or (), engine["datastore"])
    _run_server(model, engine, settings, trees, with_installed, max_repo_files)


def _add_environment(given: dict[str, Any], server: type[ServerSettings]) -> None:
    """Add the engine's settings that variables give and no option does. Raises BadInputError, also for a variable that is no setting."""
    check_names(os.environ, [*options_of(EngineConfig), *server.model_fields])
    for name, value in read_environment(EngineConfig, os.environ).items():
        if given.get(name, options_of(EngineConfig)[name].default) == options_of(EngineConfig)[name].default:
            given[name] = value


def _make_settings(**given: Any) -> ServerSettings:
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from ngramspec.server.field_errors import describe_field_error
    from ngramspec.server.settings import ServerSettings

    for name, value in given.items():
        check_text(value, name)
    try:
        return ServerSettings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))  # values are not repeated: they may be keys
        reason = describe_field_error(first)
        raise BadInputError(f"{place}: {reason}" if place else reason) from None
    except SettingsError as error:
        raise BadInputError(str(error)) from None


def parse_object(text: str, what: str) -> dict[str, Any]:
    """Return the object that a text of JSON is. Raises BadInputError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BadInputError(f'{what}: give an object as JSON, such as {{"enable_thinking": false}}')
    return found


def parse_sampling(given: Sequence[str]) -> dict[str, Any]:
    """Return parameters by name from `NAME=VALUE`, whose values are JSON or text. Raises BadInputError."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise BadInputError(f"--sampling: give NAME=VALUE, got {text}")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def parse_stores(given: Sequence[str], what: str = "--datastore", taken: Collection[str] = ()) -> dict[str, str]:
    """Return folders by name from `NAME=STORE` and `STORE`, which is called as its folder is, with a number behind it where that is taken.

    `what` the option is called in errors, `taken`: names that others have.
    """
    stores: dict[str, str] = {}
    for text in given:
        name, folder = match.groups() if (match := re.fullmatch(r"([\w.-]+)=(.+)", text)) else ("", text)
        if name in stores or name in taken:
            raise BadInputError(f"{what}: the name {name} is given twice")
        base = re.sub(r"[^\w.-]", "_", Path(folder).expanduser().resolve().name) or "datastore"
        names = itertools.chain([base], (f"{base}-{i}" for i in itertools.count(2)))
        stores[name or next(each for each in names if each not in stores and each not in taken)] = str(Path(folder).expanduser())
    return stores


def parse_workspaces(given: Sequence[str], stores: Collection[str]) -> dict[str, str]:
    """Return folders of working trees by name, absolute. Nothing in them is looked at yet. Raises BadInputError."""
    check_text(list(given), "--repo")
    found: dict[str, str] = {}
    for name, folder in parse_stores(given, "--repo", stores).items():
        path = os.path.realpath(folder)
        if not Path(path).is_dir():
            raise BadInputError(f"--repo: {folder} is no folder")
        if path in found.values():
            raise BadInputError(f"--repo: {folder} is given twice")
        found[name] = path
    return found


def _run_server(
    model: str, engine: dict[str, Any], settings: ServerSettings, paths: dict[str, str], with_installed: bool, max_files: int | None
) -> None:
    common.check_model(model)
    engine |= {"datastore": {name: common.open_store(folder) for name, folder in engine["datastore"].items()}}

    from ngramspec.cli import editors
    from ngramspec.datastore.cache_dir import cache_dir
    from ngramspec.prompts.fim import Fim
    from ngramspec.server import logs
    from ngramspec.server.repositories import Repositories
    from ngramspec.server.run import run

    log = logs.configure(settings.log_format)

    def make_engine() -> Engine:
        return common.open_engine(model, progress=common.ThrottledLines(lambda stage: logs.event("loading", stage)), **engine)

    def ready(url: str, engine: Engine) -> None:
        if paths:
            infill, keys = Fim.detect(engine.tokenizer) is not None, bool(settings.api_keys)
            print(editors.format_settings(url, (settings.alias or (engine.name,))[0], paths, infill=infill, keys=keys), flush=True)

    try:
        repositories = Repositories(paths, cache_dir() / "stores", with_installed=with_installed, max_files=max_files)
        is_loading = run(make_engine, settings, repositories, ready)
    finally:
        log.stop()
    if is_loading:
        os._exit(0)  # Python's finalisation would stop the thread that loads anywhere, and extension modules would report what it holds
