"""Options of `ngramspec serve` that are settings of the server: their flags, where `--help` shows them, and what it says.

What a user gave leaves as values by field of `ServerSettings`, which has their bounds and defaults. That class needs pydantic, which
`--help` does without.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypedDict

from ngramspec.cli.common import BadInputError, option
from ngramspec.cli.flags import ENGINE, SAMPLING

_NET, _KEYS, _LOAD, _LOG = "Address", "Keys", "Load", "Log"


def _turn_off(given: bool) -> bool | None:
    return False if given else None


def parse_object(text: str) -> dict[str, Any]:
    """Return the object that a text of JSON is. Raises BadInputError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BadInputError('--chat-template-kwargs: give an object as JSON, such as {"enable_thinking": false}')
    return found


def parse_sampling(given: list[str]) -> dict[str, Any]:
    """Return parameters by name from `NAME=VALUE`, whose values are JSON or text. Raises BadInputError."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise BadInputError(f"--sampling: give NAME=VALUE, got {text}")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    return found


class ServerOptions(TypedDict, total=False):
    """Options by the field of `ServerSettings` that each sets; those that were given."""

    alias: Annotated[
        list[str],
        option(
            ENGINE,
            "The model's name in /v1/models and in answers. Several with commas between them: answers have the first. Default: the name of "
            "the file, folder or repository.",
            "--alias",
            "-a",
            metavar="NAME[,NAME]",
        ),
        ",".join,
    ]
    strict_model: Annotated[
        bool,
        option(
            ENGINE,
            "Refuse requests that name another model, with 404. Default: the model answers whatever name a request has.",
            "--strict-model",
        ),
    ]
    chat_template: Annotated[
        str,
        option(
            ENGINE,
            "Use this chat template instead of the model's: Jinja, a file of it, or a name such as chatml.",
            "--chat-template",
            "--chat-template-file",
        ),
    ]
    chat_template_kwargs: Annotated[
        str,
        option(
            ENGINE,
            "Variables of the chat template, such as '{\"enable_thinking\": false}'; a request may override them.",
            "--chat-template-kwargs",
            "--default-chat-template-kwargs",
            metavar="JSON",
        ),
        parse_object,
    ]
    reasoning_format: Annotated[
        str,
        option(
            ENGINE,
            "Where a model's thoughts go in chats. none: they stay in the text. auto: into reasoning_content, if the template marks "
            "them. Default: auto.",
            "--reasoning-format",
            metavar="FORMAT",
        ),
    ]
    prefill_assistant: Annotated[
        bool,
        option(
            ENGINE,
            "Continue a conversation's last message if it is the assistant's, as llama.cpp does.",
            "--prefill-assistant",
        ),
    ]
    return_tokens_as_token_ids: Annotated[
        bool,
        option(ENGINE, "Log-probabilities name tokens as token_id:17, unless a request says otherwise.", "--return-tokens-as-token-ids"),
    ]
    sampling: Annotated[
        list[str],
        option(
            SAMPLING,
            "Default of a sampling parameter, such as temperature=0.2, for requests that do not set it. May be repeated.",
            metavar="NAME=VALUE",
        ),
        parse_sampling,
    ]
    host: Annotated[
        str,
        option(
            _NET,
            "Address to listen at, or several with commas; or the path of a Unix socket, NAME.sock. Default: 127.0.0.1, this machine.",
        ),
    ]
    port: Annotated[int, option(_NET, "Port to listen at; 0: any free one, which the log names. Default: 8000.")]
    api_prefix: Annotated[str, option(_NET, "Put all routes under this path, such as /llm.", metavar="/PATH")]
    root_path: Annotated[
        str,
        option(
            _NET,
            "The path at which a proxy shows the server, such as /llm. Requests are answered with this path in front and without it.",
            metavar="/PATH",
        ),
    ]
    playground: Annotated[
        bool, option(_NET, "Switch off the page at /, on which one can try the model.", "--no-playground", "--no-ui"), _turn_off
    ]
    metrics: Annotated[bool, option(_NET, "Switch off /metrics, which Prometheus reads.", "--no-metrics"), _turn_off]
    force_include_usage: Annotated[
        bool,
        option(
            _NET,
            "Report the token counts so far in every chunk of a stream, even if a request does not ask for them.",
            "--force-include-usage",
        ),
    ]
    per_request_metrics: Annotated[
        bool,
        option(_NET, "Report times of a request in its answer, as vLLM does.", "--per-request-metrics", "--enable-per-request-metrics"),
    ]
    slots: Annotated[bool, option(_NET, "Switch off /slots, which shows how many sequences run.", "--no-slots"), _turn_off]
    slot_save_path: Annotated[
        Path,
        option(
            _NET, "The folder in which clients save slots by /slots/ID; each key sees only its own.", "--slot-save-path", metavar="FOLDER"
        ),
    ]
    allowed_hosts: Annotated[
        list[str],
        option(
            _NET, "Without keys: also answer requests whose Host header has this name. May be repeated.", "--allowed-host", metavar="NAME"
        ),
    ]
    cors_origins: Annotated[
        list[str],
        option(
            _NET,
            "A site whose pages may use this server, such as https://editor.example, or * for every one. May be repeated.",
            "--cors-origin",
            metavar="URL",
        ),
    ]
    api_keys: Annotated[
        list[str],
        option(
            _KEYS,
            "A key that requests must carry. Other users of this machine see it in the list of processes: prefer a file, or "
            "NGRAMSPEC_API_KEYS. May be repeated.",
            "--api-key",
            metavar="[NAME:]KEY",
        ),
    ]
    admin_keys: Annotated[
        list[str],
        option(
            _KEYS,
            "A key for an administrator, who may also change datastores and see where drafts come from. May be repeated.",
            "--admin-key",
            metavar="[NAME:]KEY",
        ),
    ]
    api_key_file: Annotated[
        Path,
        option(
            _KEYS,
            'A file of keys: a line KEY or NAME:KEY each, or JSON: [{"name": "ci", "key": "…", "admin": false, "stores": ["project"]}].',
        ),
    ]
    admin_on_loopback: Annotated[
        bool,
        option(
            _KEYS,
            "Without keys: open /admin to requests from this machine, and so to everybody whom a proxy on this machine lets in.",
            "--admin-on-loopback",
        ),
    ]
    max_queue: Annotated[int, option(_LOAD, "Most sequences that wait for a place; more are refused at once, with 429. Default: 64.")]
    drain_timeout: Annotated[
        float, option(_LOAD, "Seconds that running requests have to end after SIGTERM or Ctrl-C. Default: 30.", metavar="S")
    ]
    send_timeout: Annotated[
        float, option(_LOAD, "Seconds after which a client that does not read its answer is dropped. Default: 20.", metavar="S")
    ]
    receive_timeout: Annotated[float, option(_LOAD, "Seconds that a client may take to send a request. Default: 30.", metavar="S")]
    parse_special: Annotated[
        bool,
        option(
            _LOAD,
            "Whether <|fim_prefix|> and the like in prompts of /v1/completions and /completion are control tokens, or plain text with "
            "--no-parse-special; a request's parse_special overrides this. In messages they are always text. Default: control tokens.",
            "--parse-special/--no-parse-special",
        ),
    ]
    fim_order: Annotated[
        str,
        option(
            _LOAD,
            "What comes first in fill-in-the-middle prompts: prefix-first, or suffix-first, with which a keystroke changes only the "
            "prompt's end, so that suggestions come sooner. Default: auto, suffix-first for models that fill in as well with it.",
            metavar="ORDER",
        ),
    ]
    fim_window: Annotated[
        str,
        option(
            _LOAD,
            "How many lines before the cursor the editor sends, such as llama.vim's n_prefix. Such a prefix is cut at a line that "
            "stays the same while the cursor moves down, so that the prefix cache can reuse the prompt's beginning. any: cut every prefix "
            "of 32 lines or more; 0: cut none. Default: 256.",
            metavar="LINES",
        ),
    ]
    fim_middle_lines: Annotated[
        int,
        option(
            _LOAD,
            "With the prefix first: put up to this many lines before the cursor after the suffix, so that a keystroke changes only "
            "the prompt's end. 0: none, and the text after the cursor is computed again at every keystroke. Default: 8.",
            metavar="LINES",
        ),
    ]
    fim_suffix_tokens: Annotated[
        int,
        option(
            _LOAD,
            "Most tokens after the cursor that the model sees; 0: all. Default: 512, as in llama.cpp.",
            metavar="N",
        ),
    ]
    fim_ahead: Annotated[
        bool,
        option(
            _LOAD,
            "While no request runs, compute the prompts that the editor will probably send next into the prefix cache. "
            "--no-fim-ahead saves power on a battery. Default: on.",
            "--fim-ahead/--no-fim-ahead",
        ),
    ]
    pad_stream: Annotated[
        float,
        option(
            _LOAD,
            "Send answers at an even pace of this many milliseconds per token, so that timing does not reveal what was drafted. Choose no "
            "less than a pass without drafts takes. Default: 0, at once.",
            metavar="MS",
        ),
    ]
    log_format: Annotated[str, option(_LOG, "Format of the log on standard error, one line per request: text or json. Default: text.")]
