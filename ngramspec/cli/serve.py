"""`ngramspec serve`: options, files and the environment enter, a running server leaves. What is served is `ngramspec.server`'s business.

Everything that takes time to import is imported when the command runs.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ngramspec.cli import common, drafts
from ngramspec.cli.common import BadInputError, check_text, option, to_printable
from ngramspec.cli.environment import PREFIX, add_environment
from ngramspec.cli.flags import ENGINE, MODEL_HELP, SPECULATION, name_flag, with_options
from ngramspec.cli.interrupts import keep_interrupts
from ngramspec.cli.serve_options import ServerOptions
from ngramspec.config import EngineConfig
from ngramspec.datastore.cache_dir import expand_home

if TYPE_CHECKING:
    from ngramspec.engine.llm_engine import Engine
    from ngramspec.server.settings import ServerSettings


@with_options("serve", drafters=drafts.DrafterOptions, server_settings=ServerOptions, engine_settings=EngineConfig)
def serve(
    *,
    model: Annotated[str, option(ENGINE, MODEL_HELP, "--model", "-m", envvar="NGRAMSPEC_MODEL")] = "smollm2",
    hf_repo: Annotated[
        str | None,
        option(
            ENGINE,
            "Download a GGUF file of a Hugging Face repository once, and serve it; without QUANT its Q4_K_M, else Q4_0 or Q8_0.",
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
            "Draft from this datastore, a folder that build-datastore made. Requests call it NAME, by default its folder. May be repeated.",
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
            "Draft from this working tree. Its datastore is built in the user's cache while the server runs, and updated after every saved "
            "file. May be repeated: then each tree has an address of its own.",
            "--repo",
            metavar="[NAME=]PATH",
            envvar="NGRAMSPEC_REPOS",
        ),
    ] = None,
    with_installed: Annotated[
        bool, option(SPECULATION, "With --repo: also draft from the packages in the tree's virtual environment.", "--with-installed")
    ] = False,
    max_repo_files: Annotated[
        int | None,
        option(SPECULATION, "Most text files of a --repo; a larger tree is not read. Default: 100000.", "--max-repo-files", min=1),
    ] = None,
    drafters: drafts.DrafterOptions,
    share_candidates: Annotated[
        bool,
        option(
            SPECULATION,
            "With several keys, or a file of keys: keep drafting next-best tokens of earlier passes, which reveal a little of what other "
            "keys wrote.",
            "--share-candidates",
        ),
    ] = False,
    server_settings: ServerOptions,
    engine_settings: dict[str, Any],
) -> None:
    """Serve a model over HTTP: the APIs of OpenAI, Anthropic and Ollama, llama.cpp's for editors, and a page to try it at /.

    It listens at once, and /health returns 503 until the model is loaded. Ctrl-C or SIGTERM stops it after running requests have ended;
    a second one stops it at once. Every setting can also be a variable, such as NGRAMSPEC_PORT; docs/settings.md lists them.

    Examples:

      ngramspec serve -hf Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M --repo .

      ngramspec serve --model ./my-model --repo . --with-installed

      ngramspec serve --model ./my-model --datastore ~/.stores/project

      ngramspec serve --host 0.0.0.0 --api-key-file keys.json --log-format json
    """
    add_environment(engine_settings, "serve")
    settings = _make_settings(server_settings)
    may_be_several = len(settings.api_keys) > 1 or settings.api_key_file is not None  # to which keys may be added while the server runs
    if may_be_several and not share_candidates:
        engine_settings["recycle"] = False
    engine = engine_settings | drafts.draft_settings(**drafters)
    engine["datastore"] = parse_stores(datastore or ())
    if repo and "alone" in drafters:
        raise BadInputError("--repo: a drafter that drafts alone has no datastore beside it; leave out --alone")
    if with_installed and not repo:
        raise BadInputError("--with-installed: name the working tree whose packages are meant, with --repo PATH")
    trees = parse_workspaces(repo or (), engine["datastore"])
    if hf_repo is not None and is_fetched(model, hf_repo):
        model = str(fetch_file(hf_repo))
    _run_server(model, engine, settings, trees, with_installed, max_repo_files)


def is_fetched(model: str, hf_repo: str) -> bool:
    """Return whether `-hf` counts rather than `--model`: the one of the command line goes before the other's variable."""
    of_variable = model == os.environ.get("NGRAMSPEC_MODEL"), hf_repo == os.environ.get("NGRAMSPEC_HF_REPO")
    if model != "smollm2" and of_variable[0] == of_variable[1]:
        raise BadInputError("give either --model or -hf, not both")
    return model == "smollm2" or of_variable[0]


def _make_settings(given: Mapping[str, Any]) -> ServerSettings:
    with keep_interrupts():
        from pydantic import ValidationError
        from pydantic_settings import SettingsError

        from ngramspec.server.field_errors import describe_field_error
        from ngramspec.server.settings import ServerSettings

    for name, value in given.items():
        check_text(value, name)
    try:
        return ServerSettings(**given)
    except ValidationError as error:
        first = error.errors()[0]  # values are not repeated: they may be keys
        place, reason = _name_source(given, first["loc"]), describe_field_error(first)
        raise BadInputError(f"{place}: {reason}" if place else reason) from None
    except SettingsError as error:  # of variables whose values are objects
        field = re.search(r'field "(\w+)"', str(error))
        raise BadInputError(f"{PREFIX}{field[1].upper()}: must be an object as JSON" if field else str(error)) from None


def _name_source(given: Mapping[str, Any], place: Sequence[str | int]) -> str:
    """Return the option that a setting comes from, or else its variable; nothing if an error is about several."""
    if place and place[0] in given:
        return ": ".join([name_flag(ServerOptions, str(place[0])), *(part for part in place[1:] if isinstance(part, str))])
    names = itertools.takewhile(lambda part: isinstance(part, str), place)
    return PREFIX + "__".join(map(str, names)).upper() if place else ""


def parse_stores(given: Sequence[str], what: str = "--datastore", taken: Collection[str] = ()) -> dict[str, str]:
    """Return folders by name from `NAME=STORE` and `STORE`, which is called as its folder is, with a number behind it where that is taken.

    `what` the option is called in errors, `taken`: names that others have.
    """
    stores: dict[str, str] = {}
    for text in given:
        name, folder = match.groups() if (match := re.fullmatch(r"([\w.-]+)=(.+)", text)) else ("", text)
        if name in stores or name in taken:
            raise BadInputError(f"{what}: the name {name} is given twice")
        base = re.sub(r"[^\w.-]", "_", expand_home(folder).resolve().name) or "datastore"
        names = itertools.chain([base], (f"{base}-{i}" for i in itertools.count(2)))
        stores[name or next(each for each in names if each not in stores and each not in taken)] = str(expand_home(folder))
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

    with keep_interrupts():
        from ngramspec.cli import editors
        from ngramspec.datastore.cache_dir import cache_dir
        from ngramspec.prompts.fim import Fim
        from ngramspec.server import logs
        from ngramspec.server.repositories import Repositories
        from ngramspec.server.run import run

    log = logs.configure(settings.log_format)

    def make_engine() -> Engine:
        return common.open_engine(model, progress=common.ThrottledLines(lambda stage: logs.log_event("loading", stage)), **engine)

    def print_editor_settings(url: str, engine: Engine) -> None:
        if paths:
            infill, keys = Fim.detect(engine.tokenizer) is not None, bool(settings.api_keys)
            print(editors.format_settings(url, (settings.alias or (engine.name,))[0], paths, infill=infill, keys=keys), flush=True)

    try:
        repositories = Repositories(paths, cache_dir() / "stores", with_installed=with_installed, max_files=max_files)
        is_loading = run(make_engine, settings, repositories, print_editor_settings)
    finally:
        log.stop()
    if is_loading:
        os._exit(0)  # Python's finalisation would stop the thread that loads anywhere, and extension modules would report what it holds


def fetch_file(name: str) -> Path:
    """Return the file that `org/name[:QUANT]` names, its first part if it has several. Raises BadInputError, ModelNotFoundError."""
    repository, _, quant = name.partition(":")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise BadInputError(f"-hf: must be org/name or org/name:QUANT, such as Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M, got {name!r}")
    from ngramspec.models.hub import GgufName, download_gguf

    wanted = GgufName(repository, quant or None, None)
    return download_gguf(wanted, lambda message: typer.echo(f"ngramspec: {to_printable(message)}", err=True))
