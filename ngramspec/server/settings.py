"""What a server is told at its start: by options, by `NGRAMSPEC_…` variables of the environment, by a file of keys.

Strings enter, checked values leave. Knows nothing of models; the engine has its own settings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import jinja2
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from ngramspec.datastore.cache_dir import expand_home
from ngramspec.options import options_of
from ngramspec.prompts.fim import MIDDLE_LINES, FimOptions, Order, Window
from ngramspec.prompts.named_templates import NAMED_TEMPLATES
from ngramspec.sampling_params import SamplingParams
from ngramspec.server.field_errors import describe_field_error

# Characters of a key: a shorter one is guessed.
MIN_KEY = 8


class Key(BaseModel):
    """A key and what it opens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: SecretStr
    name: str = Field(default="", max_length=64, pattern=r"^[\w.@-]+$")
    """The name in logs, and the tenant, within which answers and cached prompts are shared: no two keys have one name. Default: key1,
    key2, … in order."""
    admin: bool = False
    stores: frozenset[str] | None = None
    """Datastores that may be used; None: all."""
    max_requests: int | None = Field(default=None, ge=1)
    """Requests that may run or wait at a time; None: as many as the server takes."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Requests in a minute, at once or spread; None: any number."""

    @field_validator("key")
    @classmethod
    def _check_sendable(cls, key: SecretStr) -> SecretStr:
        text = key.get_secret_value()
        if len(text) < MIN_KEY or not text.isascii() or not text.isprintable() or " " in text:
            raise ValueError(f"a key must be {MIN_KEY} or more visible ASCII characters")
        return key


class Limits(BaseModel):
    """The most that a request may ask for. Beyond it is a 4xx that says so."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    body_bytes: int = Field(default=2 << 20, ge=1024)
    """The data of its images is not counted."""
    image_bytes: int = Field(default=30 << 20, ge=0)
    """The data of a body's images in base64: agents send screenshots, which are left out."""
    incoming_bytes: int | None = Field(default=None, ge=3 << 10)
    """All bodies that are still coming, together, but those of up to 32 KB; a body holds up to twice `body_bytes` until its images are
    left out. None: 32 times `body_bytes`. It is no less than 3 times."""
    header_bytes: int = Field(default=32 << 10, ge=1024, le=128 << 10)
    """All header lines together."""
    depth: int = Field(default=64, ge=4, le=128)
    """Levels of nested JSON."""
    prompt_tokens: int | None = Field(default=None, ge=1)
    """None: what the model takes."""
    output_tokens: int = Field(default=1 << 18, ge=1)
    """Sequences times max_tokens, each counted up to the model's length."""
    logprobs: int = Field(default=20, ge=-1, le=100)
    """-1: also those of the whole vocabulary."""
    stops: int = Field(default=64, ge=1, le=64)
    stop_chars: int = Field(default=1000, ge=1)
    """Characters of one stop string."""
    bias: int = Field(default=1024, ge=0, le=1 << 14)
    """Entries of `logit_bias`."""

    @property
    def most_incoming(self) -> int:
        """Bytes of all bodies that are still coming: twice as many as long texts may wait to be encoded."""
        return 32 * self.body_bytes if self.incoming_bytes is None else max(self.incoming_bytes, 3 * self.body_bytes)


def _split_list(value: Any) -> Any:
    """Return `a,b` from the environment as a list."""
    return [part for part in value.replace(",", " ").split() if part] if isinstance(value, str) else value


def _parse_keys(value: Any) -> Any:
    """Return keys from the environment: JSON, or `key`s and `name:key`s with blanks, commas or line ends between them."""
    if not isinstance(value, str):
        return [_parse_key(each) if isinstance(each, str) else each for each in value] if isinstance(value, (list, tuple)) else value
    if value.lstrip().startswith(("[", "{")):
        try:
            parsed = json.loads(value)
        except ValueError as error:
            raise ValueError(f"the keys are not JSON: {error}") from None
        return parsed if isinstance(parsed, list) else [parsed]
    return [_parse_key(part) for part in value.replace(",", " ").split()]


def _parse_key(text: str) -> dict[str, str]:
    name, colon, key = text.partition(":")
    if colon and not name:
        raise ValueError("a key has an empty name before its colon: give NAME:KEY, or KEY alone")
    return {"name": name, "key": key} if colon else {"key": text}


def read_keys(path: Path) -> list[Key]:
    """Return the keys in a file: a JSON list of `Key`s, or lines `key` or `name:key`; # begins a comment. Raises OSError, ValueError."""
    text = path.read_text("utf-8-sig")  # without the mark of bytes' order that editors of Windows write
    if not text.lstrip().startswith(("[", "{")):
        text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    keys: list[Key] = []
    for place, each in enumerate(_parse_keys(text), 1):
        try:
            keys.append(Key.model_validate(each))
        except ValidationError as error:  # which names a field of the key, as if that were a setting
            first = error.errors()[0]
            field = "".join(f"{part}: " for part in first["loc"])
            raise ValueError(f"{path}: key {place}: {field}{describe_field_error(first)}") from None
    if not keys:
        raise ValueError(f"{path} holds no key")
    return keys


def _check_route_prefix(path: str) -> str:
    if not re.fullmatch(r"(/[\w.~-]+)*", path):
        raise ValueError("must be a path such as /llm, which begins with a slash and does not end in one")
    return path


# A statement of transformers alone; it marks what a model writes, and changes no prompt.
_GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")


def _read_template(value: Any) -> Any:
    """Return a template, the one of this name, or that in the file of this name. Raises ValueError, also for what is no Jinja."""
    if not isinstance(value, (str, Path)) or not str(value):
        return value
    if str(value) in NAMED_TEMPLATES:
        return NAMED_TEMPLATES[str(value)]
    try:
        text = str(value) if "{" in str(value) else expand_home(value).read_text("utf-8-sig")
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", text))
        return text
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"is no Jinja: line {error.lineno}: {error.message}") from None
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(NAMED_TEMPLATES)
        raise ValueError(f"is neither Jinja, nor a file that can be read ({error}), nor one of {names}") from None


# Sampling parameters that a server may have defaults of.
DEFAULTS = frozenset(options_of(SamplingParams)) - {
    "n",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "grammar",
    "logprobs",
    "prompt_logprobs",
    "healed",
}


def _check_sampling(given: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError."""
    if unknown := sorted(given.keys() - DEFAULTS):
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(sorted(DEFAULTS))}")
    SamplingParams(**given)
    return given


def _read_window(value: Any) -> Any:
    if value != "any" and not re.fullmatch(r"\d{1,9}", str(value)):
        raise ValueError(f"must be a number of lines, or any, got {value!r:.80}")
    return value if value == "any" else int(value)


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_list)]


class ServerSettings(BaseSettings):
    """Everything about serving. `NGRAMSPEC_PORT=8080` sets `port`; nested ones are `NGRAMSPEC_LIMITS__BODY_BYTES`."""

    model_config = SettingsConfigDict(env_prefix="NGRAMSPEC_", env_nested_delimiter="__", frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    """A name or address, or several with commas between them; or the path of a Unix socket, which ends in .sock."""
    port: int = Field(default=8000, ge=0, le=65535)
    api_keys: Annotated[tuple[Key, ...], NoDecode, BeforeValidator(_parse_keys)] = ()
    admin_keys: Annotated[tuple[Key, ...], NoDecode, BeforeValidator(_parse_keys)] = ()
    """Keys of administrators; with them, `api_keys` holds all."""
    api_key_file: Path | None = None
    """Its keys are added. It is read again when it changes, so that keys can be exchanged while the server runs."""
    admin_on_loopback: bool = False
    """If there are no keys, requests from this machine may administer. Whatever forwards requests from it (a proxy, a tunnel) can then,
    too."""
    alias: Names = ()
    """Names under which the model is listed and answers, the first one first. None: the model's own."""
    tags: Names = ()
    """Words that the list of models says of it, as llama.cpp's does; they change nothing."""
    strict_model: bool = False
    """Refuse requests that name another model, with 404. Else any name is answered by the one model, as llama.cpp does."""
    api_prefix: Annotated[str, AfterValidator(_check_route_prefix)] = ""
    """All routes are under this path, such as /llm."""
    root_path: Annotated[str, AfterValidator(_check_route_prefix)] = ""
    """The path at which a proxy shows the server, such as /llm: requests may have it in front, or not."""
    chat_template: Annotated[str, BeforeValidator(_read_template)] = ""
    """Jinja, a file of it, or a name of llama.cpp's such as chatml, in place of the model's own template."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, such as {"enable_thinking": false}, of requests that do not say; a request's own are added."""
    reasoning_format: Literal["auto", "none"] = "auto"
    """`none`: a model's thoughts stay in the text of chats. `auto`: they are `reasoning_content` if the template has marks for them."""
    prefill_assistant: bool = False
    """An answer goes on with a conversation's last message if that is the assistant's, as in llama.cpp. Else it is a message of its own,
    unless a request says `continue_final_message`."""
    sampling: Annotated[dict[str, Any], AfterValidator(_check_sampling)] = {}
    """Sampling parameters of requests that do not say, by their names in `SamplingParams`."""
    playground: bool = True
    """The page at /, to try the model."""
    return_tokens_as_token_ids: bool = False
    """Log-probabilities name tokens as `token_id:17`, unless a request says otherwise."""
    slots: bool = True
    """/slots, which tells how many sequences run."""
    slot_save_path: Path | None = None
    """A folder for slots that clients save by llama.cpp's /slots/ID, each key's apart. It holds the tokens of their prompts. None: no
    slot is saved."""
    allowed_hosts: Names = ()
    """Names that a `Host` header may say while there are no keys, beside those of this machine."""
    cors_origins: Names = ()
    """Sites whose pages may ask, such as https://editor.example; `localhost`: any page of this machine; `*`: any page."""
    force_include_usage: bool = False
    """Every piece of a stream tells the usage so far, whether a request asks for it or not."""
    per_request_metrics: bool = False
    """Answers tell their times, as vLLM's do."""
    metrics: bool = True
    """/metrics, for Prometheus."""
    limits: Limits = Limits()
    max_queue: int = Field(default=64, ge=0)
    """Sequences that wait beyond those that run; more are refused at once."""
    max_connections: int = Field(default=2048, ge=1)
    send_timeout: float = Field(default=20, gt=0)
    """Seconds that a client may leave what was sent to it unread."""
    receive_timeout: float = Field(default=30, gt=0)
    """Seconds that a client may take to send a request."""
    drain_timeout: float = Field(default=30, ge=0)
    """Seconds that running requests have to end when the server is told to stop."""
    parse_special: bool = True
    """Control tokens are parsed in prompts of /v1/completions and /completion, unless a request says otherwise; never in messages."""
    fim_order: Order = "auto"
    """What stands first in a prompt to fill in the middle. With the text after the cursor first, a key changes only the prompt's end, and
    all before it comes from the prefix cache. "auto": that order for models that fill in as well with it."""
    fim_window: Annotated[Window, BeforeValidator(_read_window)] = 256
    """Lines before the cursor that an editor sends of a file that has more; llama.vim's and llama.vscode's `n_prefix`. A prefix of as many
    begins with a line of its first quarter that stays the same while the cursor goes down, so that the prefix cache has the prompt's
    beginning after each new line. "any": every prefix of 32 lines or more does; 0: none."""
    fim_middle_lines: int = Field(default=MIDDLE_LINES, ge=0)
    """The middle of prompts with the prefix first begins at one of the last lines before the cursor, of this many, and a key changes the
    prompt's end alone. 0: it begins at the cursor."""
    fim_suffix_tokens: int = Field(default=512, ge=0)
    """Most tokens after the cursor in a prompt; llama.cpp's server keeps as many. 0: all."""
    fim_ahead: bool = True
    """While nothing else runs, compute into the prefix cache the prompt that follows if a suggestion is accepted, and that of the window
    which begins elsewhere soon."""
    pad_stream: float = Field(default=0, ge=0, le=10_000)
    """Milliseconds per token of every answer, so that its pace does not tell what was drafted. 0: as soon as it is there."""
    log_format: Literal["text", "json"] = "text"
    _given_keys: tuple[Key, ...] = PrivateAttr(())

    @model_validator(mode="after")
    def _complete_keys(self) -> Self:
        self._given_keys = (*self.api_keys, *(key.model_copy(update={"admin": True}) for key in self.admin_keys))
        named = self.load_keys()
        if self.admin_on_loopback and named:
            raise ValueError("admin_on_loopback: only without keys; with them, administration needs an administrator's key")
        object.__setattr__(self, "api_keys", named)
        return self

    @property
    def hosts(self) -> list[str]:
        """The addresses to listen at."""
        return [part.strip() for part in self.host.split(",")]

    @property
    def fim_options(self) -> FimOptions:
        """What prompts to fill in the middle show."""
        return FimOptions(self.fim_order, self.fim_window, self.fim_suffix_tokens, self.fim_middle_lines, heals=True)

    def load_keys(self) -> tuple[Key, ...]:
        """Return the keys that were given, and those in the file as it is now. Raises ValueError."""
        keys = list(self._given_keys)
        if self.api_key_file is not None:
            try:
                keys += read_keys(self.api_key_file)
            except OSError as error:
                raise ValueError(f"the keys cannot be read from {self.api_key_file}: {error.strerror or error}") from None
        named = tuple(key if key.name else key.model_copy(update={"name": f"key{i}"}) for i, key in enumerate(keys, 1))
        _check_distinct(named)
        return named


def _check_distinct(keys: Sequence[Key]) -> None:
    """Raises ValueError if two of the keys are one, or have one name, by which they would share a tenant. No key is repeated in it."""
    places: dict[str, int] = {}
    names: dict[str, int] = {}
    for place, key in enumerate(keys, 1):
        if (first := places.setdefault(key.key.get_secret_value(), place)) != place:
            raise ValueError(f"the same key is given twice: as number {first} ({keys[first - 1].name}) and as number {place} ({key.name})")
        if (first := names.setdefault(key.name, place)) != place:
            raise ValueError(
                f"the keys number {first} and {place} have one name, {key.name!r}, and would share a tenant: give each a name of its own; "
                "a key without a name is called key1, key2, … by its place"
            )
