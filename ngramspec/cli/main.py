"""The `ngramspec` command: arguments and files enter, calls of `Engine` and an exit code leave.

Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted. An error is one message on standard error. Standard output
carries the text (or JSON) and nothing else. What things look like is `screen`'s business. The engine is imported
when a command runs, so that `--help` is quick.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ngramspec import __version__
from ngramspec.cli import beam as cli_beam
from ngramspec.cli import datastore as cli_datastore
from ngramspec.cli import drafts as cli_drafts
from ngramspec.cli import plan as cli_plan
from ngramspec.cli import serve as cli_serve

if TYPE_CHECKING:
    from ngramspec.batch.params import SamplingParams
    from ngramspec.batch.types import Completion, Delta
    from ngramspec.cli.screen import View
    from ngramspec.engine import Engine, Hints

INTERRUPTED = 130

app = typer.Typer(
    name="ngramspec",
    help="Language model completions sooner, token for token the same: drafts come from text that is already there.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
cli_beam.register(app)
cli_datastore.register(app)
cli_plan.register(app)
cli_serve.register(app)


class BadInputError(Exception):
    """What the user gave cannot be worked with. The message says what could."""


def main() -> NoReturn:
    """Run the command and end the process with its exit code."""
    with contextlib.suppress(AttributeError):  # a captured stream
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        code = app(standalone_mode=False)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:  # the reader has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception as error:
        if (code := _exit_code(error)) is None:
            raise
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        if message:  # without arguments typer shows the help and has nothing to add
            print(f"ngramspec: {message}", file=sys.stderr)
    sys.exit(code or 0)


def _exit_code(error: Exception) -> int | None:
    """1 or 2 for an error that is to be told, None for a defect, which shows its traceback."""
    from ngramspec.batch import errors

    if hasattr(error, "format_message"):  # typer's own: unknown option, missing value
        return 2
    if isinstance(error, (errors.OutOfMemoryError, errors.EngineClosedError)):
        return 1
    if isinstance(error, (errors.NgramspecError, BadInputError)):
        return 2
    return 1 if isinstance(error, OSError) else None


def _version(asked: bool) -> None:
    if asked:
        print(f"ngramspec {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    pass


_PROMPT, _SAMPLING, _SPECULATION, _ENGINE, _OUTPUT = "Prompt", "Sampling", "Speculation", "Model and device", "Output"


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


@app.command()
def complete(
    prompt: Annotated[str | None, typer.Argument(help="Text to complete; - reads it from standard input, as does a pipe.")] = None,
    file: Annotated[Path | None, _option(_PROMPT, "Take the prompt from this file.", "--file", "-f")] = None,
    chat: Annotated[
        bool, _option(_PROMPT, "Wrap the prompt as a user's message in the model's chat template, or continue it as it is.", "--chat/--raw")
    ] = False,
    model: Annotated[
        str,
        _option(
            _ENGINE, "A folder with safetensors, a .gguf file, a hub name (org/name), or smollm2; random:SHAPE to measure.", "--model", "-m"
        ),
    ] = "smollm2",
    device: Annotated[str, _option(_ENGINE, "cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str, _option(_ENGINE, "float32; on CUDA bfloat16, float16 or float32. auto: the first of these.")] = "auto",
    gpu_memory_utilization: Annotated[
        float | None,
        _option(_ENGINE, "Share of a CUDA device's memory that may be used, keys and values included. Default: 0.9.", metavar="F"),
    ] = None,
    threads: Annotated[int | None, _option(_ENGINE, "Processor threads. Default: all cores.", min=1)] = None,
    max_model_len: Annotated[int | None, _option(_ENGINE, "Most tokens of prompt and output. Default: the model's own.", min=1)] = None,
    max_tokens: Annotated[int, _option(_SAMPLING, "Most tokens to write.", "--max-tokens")] = 128,
    min_tokens: Annotated[int, _option(_SAMPLING, "Fewest tokens before anything may end the text.")] = 0,
    temperature: Annotated[float, _option(_SAMPLING, "0 takes the most likely token; above, samples.", "--temperature", "-t")] = 0.0,
    top_k: Annotated[int, _option(_SAMPLING, "Sample among the k most likely tokens; 0: all.")] = 0,
    top_p: Annotated[float, _option(_SAMPLING, "Sample among the fewest tokens that hold this share of the probability.")] = 1.0,
    min_p: Annotated[float, _option(_SAMPLING, "Drop tokens less likely than this share of the most likely one.")] = 0.0,
    repetition_penalty: Annotated[float, _option(_SAMPLING, "Above 1: tokens of prompt and output become less likely.")] = 1.0,
    presence_penalty: Annotated[float, _option(_SAMPLING, "Above 0: tokens of the output become less likely.")] = 0.0,
    frequency_penalty: Annotated[float, _option(_SAMPLING, "As presence, for every occurrence.")] = 0.0,
    seed: Annotated[int | None, _option(_SAMPLING, "The same seed gives the same text. Default: a fresh one, reported.")] = None,
    n: Annotated[int, _option(_SAMPLING, "How many samples to write.", "--n")] = 1,
    stop: Annotated[list[str] | None, _option(_SAMPLING, "Text that ends the output; may be given several times.", "--stop", "-s")] = None,
    ignore_eos: Annotated[bool, _option(_SAMPLING, "Go on past the model's own end of text.", "--ignore-eos")] = False,
    no_spec: Annotated[bool, _option(_SPECULATION, "One token per pass, without drafts.", "--no-spec")] = False,
    show_drafts: Annotated[bool, _option(_SPECULATION, "Colour accepted draft tokens by their source.", "--show-drafts")] = False,
    spec_length: Annotated[int | None, _option(_SPECULATION, "Longest draft. What pays decides below it.", min=1)] = None,
    spec_rows: Annotated[int | None, _option(_SPECULATION, "Most draft tokens verified in one pass.", min=1)] = None,
    max_order: Annotated[int | None, _option(_SPECULATION, "Longest n-gram looked up.", min=2)] = None,
    datastore: Annotated[
        list[Path] | None, _option(_SPECULATION, "Draft from this datastore too; may be given several times.", "--datastore", "-d")
    ] = None,
    no_similar: Annotated[
        bool, _option(_SPECULATION, "Do not draft from the datastores' files that are most like the prompt.", "--no-similar")
    ] = False,
    no_recycle: Annotated[bool, _option(_SPECULATION, "Do not draft from the model's own candidates.", "--no-recycle")] = False,
    draft_model: cli_drafts.DraftModel = None,
    draft_layers: cli_drafts.DraftLayers = None,
    drafter: cli_drafts.Drafters = None,
    alone: cli_drafts.Alone = False,
    acceptance: cli_drafts.Acceptance = None,
    lenience: cli_drafts.Lenience = None,
    prediction: Annotated[Path | None, _option(_SPECULATION, "A file with the text that is expected, such as the unedited one.")] = None,
    history: Annotated[int | None, _option(_SPECULATION, "Tokens of a sequence that its n-gram tables remember.", min=1)] = None,
    logprobs: Annotated[int | None, _option(_OUTPUT, "Report log-probabilities of each token and of this many others.")] = None,
    as_json: Annotated[bool, _option(_OUTPUT, "Print one JSON document instead of the text.", "--json")] = False,
    quiet: Annotated[bool, _option(_OUTPUT, "No progress and no statistics.", "--quiet", "-q")] = False,
) -> None:
    """Complete a text, and say how much sooner it came.

    The text is streamed to standard output, statistics go to standard error. Ctrl-C ends the text where it is.

    Examples:

      ngramspec complete "def fibonacci(n):" --show-drafts

      ngramspec complete --chat "Why is the sky blue?" --temperature 0.7 --seed 1

      git diff | ngramspec complete - --model ./my-model --json
    """
    from ngramspec.batch.params import SamplingParams

    text = _read_prompt(prompt, file)
    expected = _read_file(prediction, "the prediction") if prediction is not None else None
    try:
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
            n=n,
            stop=tuple(stop or ()),
            ignore_eos=ignore_eos,
            logprobs=logprobs,
        )
    except ValueError as error:
        raise BadInputError(str(error)) from error
    bounds = {"spec_length": spec_length, "spec_rows": spec_rows, "max_order": max_order, "history": history}
    sources: dict[str, Any] = {"datastore": datastore or (), "similar": not no_similar, "recycle": not no_recycle}
    sources |= cli_drafts.draft_settings(draft_model, draft_layers, drafter, alone, acceptance, lenience)
    limits = {"threads": threads, "max_model_len": max_model_len, "gpu_memory_utilization": gpu_memory_utilization}
    settings: dict[str, Any] = {name: value for name, value in (bounds | limits).items() if value is not None}

    from ngramspec.cli import screen

    with screen.progress(quiet) as say:
        engine = _open(model, device=device, dtype=dtype, speculation=not no_spec, progress=say, **sources, **settings)
    with engine:
        ids = _tokens(engine, text, chat, model)
        view = screen.View(engine.tokenizer, ids, params, drafts=show_drafts, silent=as_json)
        done, interrupted = _stream(engine, ids, params, view, expected)
    if as_json:
        print(json.dumps(_document(done, model)))
    if not quiet:
        view.summary(done)
    if interrupted:
        raise KeyboardInterrupt


def _open(model: str, **settings: Any) -> Engine:
    """`Engine`, but for `drafters` by their names, see `drafters.make_drafter`; `alone`: there is one, and nothing beside it."""
    from ngramspec.drafters.names import make_drafter
    from ngramspec.engine import Engine

    try:
        made = [make_drafter(name) for name in settings.pop("drafters", ())]
        settings |= {"alone": made[0]} if settings.pop("alone", False) else {"drafters": made}
        return Engine(model, **settings)
    except ValueError as error:
        raise BadInputError(str(error)) from error


def _stream(engine: Engine, ids: list[int], params: SamplingParams, view: View, prediction: str | None) -> tuple[Completion, bool]:
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


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise BadInputError("give either a PROMPT or --file, not both")
    if file is not None:
        text = _read_file(file, "the prompt")
    elif prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        text = _read_file(None, "the prompt")
    elif prompt is not None:
        text = prompt
    else:
        raise BadInputError("there is no prompt: give a PROMPT, --file FILE, or - and text on standard input")
    if not text:
        raise BadInputError("the prompt is empty")
    return text


def _read_file(file: Path | None, what: str) -> str:
    """The text of a file, or of standard input."""
    try:
        return (file.read_bytes() if file is not None else sys.stdin.buffer.read()).decode()
    except OSError as error:
        raise BadInputError(f"{what} cannot be read from {file or 'standard input'}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"{what} in {file or 'standard input'} is not UTF-8 text: byte {error.start} is invalid") from error


def _tokens(engine: Engine, text: str, chat: bool, model: str) -> list[int]:
    if chat and not engine.tokenizer.chat_template:
        raise BadInputError(f"--chat: {model} has no chat template; leave --chat out, or use an instruction-tuned model")
    try:
        if not chat:
            return engine.encode(text).tolist()
        message = [{"role": "user", "content": text}]
        return list(engine.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))
    except ValueError as error:
        raise BadInputError(str(error)) from error


def _document(done: Completion, model: str) -> dict[str, Any]:
    document = {"model": model, **dataclasses.asdict(done)}
    for made, choice in zip(document["choices"], done.choices, strict=True):
        made["stats"] = _with_rates(choice.stats)
    document["stats"] = _with_rates(done.stats)
    document["tok_s"] = done.stats.tokens / done.duration_s if done.duration_s else None
    return document


def _with_rates(stats: Any) -> dict[str, Any]:
    rates = {name: round(getattr(stats, name), 4) for name in ("acceptance_rate", "tokens_per_pass", "rows_per_pass")}
    return dataclasses.asdict(stats) | rates
