"""Options of commands that a table of settings declares, and those that all commands with a model have.

Tables of settings enter, a command with an option for each of their fields leaves; what a user gave is checked against them. Knows no
setting in particular.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints, is_typeddict

import typer

from ngramspec.cli.common import BadInputError, check_text, decode_text, format_size, option, parse_size
from ngramspec.errors import InvalidInputError
from ngramspec.options import ChoiceOf, Flag, Integer, Number, Option, TextKind, TextList, options_of

PROMPT, ENGINE, SAMPLING, SEARCH, SPECULATION, OUTPUT = "Prompt", "Model and device", "Sampling", "Search", "Speculation", "Output"
# The order in which `--help` shows them; others follow as they come, and `OUTPUT` is last.
_PANELS = (PROMPT, ENGINE, SAMPLING, SEARCH, SPECULATION)
_TYPES: dict[type, Any] = {Integer: int, Number: float, Flag: bool, ChoiceOf: str, TextKind: str, TextList: list[str]}
# The metavar of numbers of bytes, which are given as 2G.
_SIZE = "SIZE"

Prompt = Annotated[str | None, typer.Argument(help="Text to complete, in quotes; - reads it from standard input, as does a pipe.")]
PromptFile = Annotated[Path | None, option(PROMPT, "Take the prompt from this file.", "--file", "-f")]
MODEL_HELP = "A folder with safetensors, a .gguf file, a hub name (org/name or org/name:Q4_K_M), or smollm2. random:NAME: random weights."
Model = Annotated[str, option(ENGINE, MODEL_HELP, "--model", "-m", envvar="NGRAMSPEC_MODEL")]


def with_options(command: str, /, **tables: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of tables of settings, which are dataclasses (see `options`), or TypedDicts of typer's options.

    Each of `tables` stands for a parameter of the decorated function, which is called with a dict of what was given, by field, for it.
    A function beside an option in a TypedDict converts what was given for it; None leaves it out.
    `--help` shows its options at the parameter's place. A value that a dataclass's field does not accept is a BadInputError that names its
    option, or an InvalidInputError of the dataclass.
    """
    options = {
        name: [each for each in options_of(table).values() if each.flags is not None and (not each.only or command in each.only)]
        for name, table in tables.items()
        if not is_typeddict(table)
    }

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        for name, own in inspect.signature(function, eval_str=True).parameters.items():
            if name in options:
                parameters += map(_make_parameter, options[name])
            elif name in tables:
                parameters += _typed_parameters(tables[name])
            else:
                parameters.append(own.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        parameters = [context, *sorted(parameters, key=_rank)]

        @functools.wraps(function)
        def run(context: typer.Context, **values: Any) -> None:
            given: dict[str, dict[str, Any]] = {}
            for name, table in tables.items():
                if name in options:
                    given[name] = _take_given(options[name], values, context)
                    table(**given[name])  # checks what depends on several values
                else:
                    typed = {field: _convert(values.pop(field), *declared[1:]) for field, declared in _read_metadata(table).items()}
                    given[name] = {field: value for field, value in typed.items() if value is not None}
            for name, value in values.items():
                if isinstance(value, float) and math.isnan(value):  # which typer 0.20 finds within any bounds
                    raise BadInputError(f"--{name.replace('_', '-')} must be a number, got nan")
            function(**values, **given)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def _read_metadata(table: type) -> dict[str, tuple[Any, ...]]:
    """Return what stands beside the types of a TypedDict's fields: an option, and perhaps a function that converts its value."""
    return {name: declared.__metadata__ for name, declared in get_type_hints(table, include_extras=True).items()}


def name_flag(table: type, field: str) -> str:
    """Return the flag that sets a field of a TypedDict of options."""
    declared = _read_metadata(table)[field][0]
    names = (declared.default, *(declared.param_decls or ()))  # typer takes the first name for a default until it makes the command
    flags = (name for name in names if isinstance(name, str) and name.startswith("--"))
    return next(flags, "--" + field.replace("_", "-")).split("/")[0]


def _convert(value: Any, convert: Callable[[Any], Any] | None = None) -> Any:
    """Return a value as a command's function gets it. No callback of typer's does this: typer makes what one returns for a list a list."""
    return value if value is None or convert is None else convert(value)


def _typed_parameters(table: type) -> list[inspect.Parameter]:
    """Return a TypedDict's fields as parameters that are None if they are not given."""
    types = get_type_hints(table)
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[types[name] | None, declared[0]])
        for name, declared in _read_metadata(table).items()
    ]


def _list_flags(each: Option) -> tuple[str, ...]:
    return each.flags or ("--no-" + each.flag.removeprefix("--") if each.default is True else each.flag,)


def _is_negative(each: Option) -> bool:
    """Return whether this is a switch that is on, and whose flag turns it off."""
    return each.default is True and "/" not in _list_flags(each)[0]


def _make_parameter(each: Option) -> inspect.Parameter:
    help_text, default = each.help, each.default
    if _is_negative(each):
        help_text, default = each.off or f"Off: {each.help}", False
    declared = option(each.panel or SAMPLING, help_text, *_list_flags(each), metavar=each.metavar)
    annotation: Any = _TYPES[type(each.kind)]
    if each.metavar == _SIZE:
        annotation, default = str, None if default is None else format_size(default)
    if default is None or isinstance(each.kind, TextList):
        annotation, default = annotation | None, None
    return inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, declared])


def _rank(parameter: inspect.Parameter) -> int:
    """Return the place where the heading of a parameter stands in `--help`."""
    declared = [each for each in getattr(parameter.annotation, "__metadata__", ()) if hasattr(each, "rich_help_panel")]
    panel = declared[0].rich_help_panel if declared else None
    if panel is None:
        return -1
    return _PANELS.index(panel) if panel in _PANELS else len(_PANELS) + (panel == OUTPUT)


def _take_given(options: list[Option], values: dict[str, Any], context: typer.Context) -> dict[str, Any]:
    """Take the values of these options out of `values`, and return those that were given."""
    given = {}
    for each in options:
        value, flag = values.pop(each.name), _list_flags(each)[0]
        if (source := context.get_parameter_source(each.name)) is None or source.name == "DEFAULT":
            continue
        if isinstance(each.kind, Flag):
            value = value != _is_negative(each)
        if each.metavar == _SIZE:
            value = parse_size(value, flag)
        if isinstance(value, list):
            value = [decode_text(item) if isinstance(item, str) else item for item in value]
        check_text(value, flag)
        try:
            each.check(value)
        except InvalidInputError as error:
            raise BadInputError(f"{flag}: {error}") from error
        given[each.name] = value
    return given
