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
        except ValueError:
            found[name] = value
    return found


class ServerOptions(TypedDict, total=False):
    """Options by the field of `ServerSettings` that each sets; those that were given."""

    alias: Annotated[
        list[str],
        option(
            ENGINE,
            "The name under which the model is listed and answers; several with commas between them, the first in answers. Default: the "
            "model's own.",
            "--alias",
            "-a",
            metavar="NAME[,NAME]",
        ),
        ",".join,
    ]
    strict_model: Annotated[
        bool, option(ENGINE, "Refuse requests that name another model, with 404. Else they are answered.", "--strict-model")
    ]
    chat_template: Annotated[
        str,
        option(
            ENGINE,
            "Jinja, a file of it, or a name such as chatml, in place of the model's chat template.",
            "--chat-template",
            "--chat-template-file",
        ),
    ]
    chat_template_kwargs: Annotated[
        str,
        option(
            ENGINE,
            "Variables of the chat template of requests that do not say, such as '{\"enable_thinking\": false}'.",
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
            "none: a model's thoughts stay in the text of chats. auto: they are reasoning_content, if its template has marks for them. "
            "Default: auto.",
            "--reasoning-format",
            metavar="FORMAT",
        ),
    ]
    prefill_assistant: Annotated[
        bool,
        option(
            ENGINE,
            "An answer goes on with a conversation's last message if that is the assistant's, as in llama.cpp.",
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
            "A sampling parameter of requests that do not say, such as temperature=0.2. May be repeated.",
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
    port: Annotated[int, option(_NET, "0: any that is free; the log says which. Default: 8000.")]
    api_prefix: Annotated[str, option(_NET, "The path under which all routes are, such as /llm.", metavar="/PATH")]
    root_path: Annotated[
        str,
        option(_NET, "Where a proxy shows the server, such as /llm: requests may have this path in front, or not.", metavar="/PATH"),
    ]
    playground: Annotated[bool, option(_NET, "Without the page at / to try the model.", "--no-playground", "--no-ui"), _turn_off]
    metrics: Annotated[bool, option(_NET, "Without /metrics, for Prometheus.", "--no-metrics"), _turn_off]
    force_include_usage: Annotated[
        bool, option(_NET, "Every piece of a stream tells the usage so far, asked for or not.", "--force-include-usage")
    ]
    per_request_metrics: Annotated[
        bool, option(_NET, "Answers tell their times, as vLLM's do.", "--per-request-metrics", "--enable-per-request-metrics")
    ]
    slots: Annotated[bool, option(_NET, "Without /slots, which tells how many sequences run.", "--no-slots"), _turn_off]
    slot_save_path: Annotated[
        Path,
        option(_NET, "A folder for slots that clients save by /slots/ID, each key's apart.", "--slot-save-path", metavar="FOLDER"),
    ]
    allowed_hosts: Annotated[
        list[str],
        option(_NET, "Without keys: a further name that requests may call this server. May be repeated.", "--allowed-host", metavar="NAME"),
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
            "The same, for an administrator, who may change datastores and see where drafts come from.",
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
            "Without keys: requests from this machine may use /admin. So may, then, whoever a proxy on this machine lets in.",
            "--admin-on-loopback",
        ),
    ]
    max_queue: Annotated[int, option(_LOAD, "Sequences that wait; more are refused at once, with 429. Default: 64.")]
    drain_timeout: Annotated[float, option(_LOAD, "Seconds for running requests after SIGTERM or Ctrl-C. Default: 30.", metavar="S")]
    send_timeout: Annotated[float, option(_LOAD, "Seconds until a client that does not read is dropped. Default: 20.", metavar="S")]
    receive_timeout: Annotated[float, option(_LOAD, "Seconds that a client may take to send a request. Default: 30.", metavar="S")]
    parse_special: Annotated[
        bool,
        option(
            _LOAD,
            "Control tokens such as <|fim_prefix|> are spelled out in prompts of /v1/completions and /completion, unless a request says "
            "parse_special. Default: they are control tokens, as in llama.cpp and vLLM; in messages they never are.",
            "--parse-special/--no-parse-special",
        ),
    ]
    fim_order: Annotated[
        str,
        option(
            _LOAD,
            "What stands first in prompts to fill in the middle: prefix-first, as models are trained, or suffix-first, with which a key "
            "changes only the prompt's end and suggestions come much sooner. Default: prefix-first.",
            metavar="ORDER",
        ),
    ]
    fim_window: Annotated[
        str,
        option(
            _LOAD,
            "Lines before the cursor that an editor sends, llama.vim's n_prefix. A prefix of as many lines begins with a line that stays "
            "the same while the cursor goes down, so that the prefix cache has the prompt's beginning. Default: 256; any: every prefix of "
            "32 lines or more does; 0: none.",
            metavar="LINES",
        ),
    ]
    fim_middle_lines: Annotated[
        int,
        option(
            _LOAD,
            "With --fim-order prefix-first, the middle begins at one of the last lines before the cursor, of this many, so that a key "
            "changes only the prompt's end. Default: 8; 0: at the cursor, and the text after it is computed again at every key.",
            metavar="LINES",
        ),
    ]
    fim_suffix_tokens: Annotated[
        int,
        option(
            _LOAD,
            "Most tokens after the cursor in prompts of --fim-order prefix-first. Default: 512, as in llama.cpp's server; 0: all.",
            metavar="N",
        ),
    ]
    fim_ahead: Annotated[
        bool,
        option(
            _LOAD,
            "While nothing else runs, compute the prompt that follows if a suggestion is accepted, and that of a window which begins "
            "elsewhere soon. Default: yes; on a battery it may not be worth the power.",
            "--fim-ahead/--no-fim-ahead",
        ),
    ]
    pad_stream: Annotated[
        float,
        option(
            _LOAD,
            "Answers leave at this many milliseconds a token, so that their pace does not tell what was drafted; hides it if a plain pass "
            "takes no longer. Default: 0, as soon as they are there.",
            metavar="MS",
        ),
    ]
    log_format: Annotated[str, option(_LOG, "text or json, one line a request, on standard error. Default: text.")]
