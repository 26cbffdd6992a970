"""`ngramspec complete`: a prompt enters, its completion leaves on standard output as it is written, or as one JSON document.

What it looks like in a terminal is `screen`'s business. The engine is imported when the command runs.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import queue
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ngramspec.cli import common, drafts
from ngramspec.cli.common import BadInputError, check_text, decode_text, option, read_file
from ngramspec.cli.environment import add_environment
from ngramspec.cli.flags import OUTPUT, PROMPT, SAMPLING, SPECULATION, Model, Prompt, PromptFile, with_options
from ngramspec.config import EngineConfig
from ngramspec.datastore.cache_dir import expand_home
from ngramspec.datastore.garbage import pause_collector
from ngramspec.errors import GrammarError, UnsupportedModelError
from ngramspec.grammar.constraint import Grammar
from ngramspec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ngramspec.cli.screen import CompletionView
    from ngramspec.engine.llm_engine import Engine, Hints
    from ngramspec.outputs import Completion, Delta, Stats


@with_options("complete", sampling=SamplingParams, drafters=drafts.DrafterOptions, engine_settings=EngineConfig)
def complete(
    *,
    prompt: Prompt = None,
    file: PromptFile = None,
    chat: Annotated[
        bool,
        option(
            PROMPT,
            "--chat: send the prompt as a user's message in the model's chat template. --raw: continue the text as it is.",
            "--chat/--raw",
        ),
    ] = False,
    suffix: Annotated[
        str | None,
        option(
            PROMPT, "Fill in the middle between the prompt and this text; the model must be trained for that.", "--suffix", metavar="TEXT"
        ),
    ] = None,
    model: Model = "smollm2",
    grammar: Annotated[
        str | None,
        option(SAMPLING, "Only write what this grammar allows: llama.cpp's GBNF (root ::= …) or Lark (start: …).", metavar="FILE|TEXT"),
    ] = None,
    json_schema: Annotated[str | None, option(SAMPLING, "Only write JSON that fits this JSON schema.", metavar="FILE|TEXT")] = None,
    show_drafts: Annotated[
        bool, option(SPECULATION, "Colour the tokens that came from drafts, by the source of the draft.", "--show-drafts")
    ] = False,
    datastore: Annotated[
        list[Path] | None,
        option(SPECULATION, "Also draft from this datastore, a folder that build-datastore made. May be repeated.", "--datastore", "-d"),
    ] = None,
    drafters: drafts.DrafterOptions,
    prediction: Annotated[
        Path | None, option(SPECULATION, "A file with text that the output will resemble, such as the unedited file: a source of drafts.")
    ] = None,
    as_json: Annotated[bool, option(OUTPUT, "Print one JSON document instead of the text.", "--json")] = False,
    quiet: Annotated[bool, option(OUTPUT, "Print neither progress nor statistics.", "--quiet", "-q")] = False,
    sampling: dict[str, Any],
    engine_settings: dict[str, Any],
) -> None:
    """Complete a text, and report how many tokens came from drafts.

    The text is streamed to standard output; statistics and progress go to standard error. Ctrl-C stops and keeps what was written.

    Examples:

      ngramspec complete "def fibonacci(n):" --show-drafts

      ngramspec complete --chat "Why is the sky blue?" --temperature 0.7 --seed 1

      git diff | ngramspec complete - --model ./my-model --json

      ngramspec complete "def add(a, b):" --suffix "    return total" --model ./qwen2.5-coder-1.5b.gguf

      ngramspec complete --chat "A small animal" --json-schema animal.json
    """
    add_environment(engine_settings, "complete")
    if chat and suffix is not None:
        raise BadInputError("give either --chat or --suffix, not both")
    suffix = None if suffix is None else common.decode_text(suffix)
    common.check_text(suffix, "--suffix")
    text = common.read_prompt(prompt, file)
    expected = common.read_file(prediction, "the prediction") if prediction is not None else None
    params = SamplingParams(**sampling, grammar=make_grammar(grammar, json_schema))
    sources = drafts.draft_settings(**drafters)
    stores = [common.open_store(folder) for folder in datastore or ()]

    from ngramspec.cli import screen

    with screen.show_progress(quiet) as progress, pause_collector():
        engine = common.open_engine(model, datastore=stores, progress=progress, **sources, **engine_settings)
        gc.freeze()  # what a start makes stays: to look for cycles in it takes 0.05 s before the first token
    with engine:
        if suffix is None:
            ids = _encode_chat(engine, text, params, model) if chat else _encode_text(engine, text)
        else:
            ids, params = _make_infill(engine, text, suffix, params)
        view = screen.CompletionView(engine.tokenizer, ids, params, drafts=show_drafts, silent=as_json)
        done, interrupted = _show_stream(engine, ids, params, view, expected)
        if as_json:
            print(json.dumps(_to_json(done, model)), flush=True)
        if not quiet:
            view.print_statistics(done)
        if not interrupted:  # what a short text has not waited for would be compiled again at every start
            with screen.show_progress(quiet) as progress:
                engine.finish_compiling(progress)
    gc.unfreeze()
    if interrupted:
        raise KeyboardInterrupt


def _show_stream(
    engine: Engine, ids: list[int], params: SamplingParams, view: CompletionView, prediction: str | None
) -> tuple[Completion, bool]:
    """Show the text as it comes. Returns what there is, and whether the user ended it."""
    pieces: queue.SimpleQueue[Delta | Exception] = queue.SimpleQueue()
    hints: Hints = {} if prediction is None else {"prediction": prediction}
    request = engine.submit(ids, params, deliver=pieces.put, **hints)
    interrupted = False
    try:
        while True:
            piece = pieces.get()
            if isinstance(piece, Exception):
                raise piece
            view.add(piece)
            if piece.completion is not None:
                break
    except KeyboardInterrupt:
        interrupted = True
    finally:
        request.cancel()
    done = request.result()
    view.finish(done)
    return done, interrupted


def _encode_text(engine: Engine, text: str) -> list[int]:
    try:
        return engine.encode(text).tolist()
    except ValueError as error:
        raise BadInputError(str(error)) from error


def _encode_chat(engine: Engine, text: str, params: SamplingParams, model: str) -> list[int]:
    """Return the prompt that `Engine.chat` makes of the text as a user's message."""
    try:
        ids, _ = engine.make_chat_prompt([{"role": "user", "content": text}], dataclasses.replace(params, n=1))
    except UnsupportedModelError:
        why = f"--chat: {model} has no chat template; leave --chat out, or use an instruction-tuned model"
        raise BadInputError(why) from None
    except ValueError as error:
        raise BadInputError(str(error)) from error
    return ids


def _make_infill(engine: Engine, prefix: str, suffix: str, params: SamplingParams) -> tuple[list[int], SamplingParams]:
    try:
        return engine.make_infill_prompt(prefix, suffix, params)
    except UnsupportedModelError as error:
        raise BadInputError(f"--suffix: {error}") from error


def _to_json(done: Completion, model: str) -> dict[str, Any]:
    document = {"model": model, **dataclasses.asdict(done)}
    for made, choice in zip(document["choices"], done.choices, strict=True):
        made["stats"] = add_rates(choice.stats)
    document["stats"] = add_rates(done.stats)
    document["tok_s"] = done.stats.tokens / done.duration_s if done.duration_s else None
    return document


def add_rates(stats: Stats) -> dict[str, Any]:
    """Return statistics as JSON has them, with the rates that follow from them."""
    rates = {name: round(getattr(stats, name), 4) for name in ("acceptance_rate", "tokens_per_pass", "rows_per_pass")}
    return dataclasses.asdict(stats) | rates


def make_grammar(grammar: str | None, json_schema: str | None) -> Grammar | None:
    """Return what --grammar or --json-schema say; None of neither. Raises BadInputError, which names the option."""
    if grammar is not None and json_schema is not None:
        raise BadInputError("give either --grammar or --json-schema, not both: a text has one form")
    if json_schema is not None:
        text, origin = _read(json_schema, "--json-schema")
        return _make_grammar(Grammar.json_schema, text, f"--json-schema: {origin}")
    if grammar is None:
        return None
    text, origin = _read(grammar, "--grammar")
    return _make_grammar(Grammar.from_text, text, f"--grammar: {origin}")


def _read(given: str, option: str) -> tuple[str, str]:
    """Return (the text, where it is from)."""
    text = decode_text(given)
    check_text(text, option)
    try:
        is_file = expand_home(given).exists()
    except (OSError, ValueError):  # no path: too long, or with a NUL
        is_file = False
    if is_file:
        return read_file(expand_home(given), option), given
    shown = text if len(text) <= 40 else f"{text[:40]}…"
    return text, f"there is no file {shown!r}, and as a text it"


def _make_grammar(make: Callable[[str], Grammar], text: str, origin: str) -> Grammar:
    try:
        return make(text)
    except GrammarError as error:
        raise BadInputError(f"{origin} cannot be used: {error}") from error
