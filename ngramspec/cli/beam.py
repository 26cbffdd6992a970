"""`ngramspec beam`: a prompt enters, the texts that beam search finds leave, best first, on standard output. See `beam`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

_PROMPT, _SEARCH, _ENGINE, _OUTPUT = "Prompt", "Search", "Model and device", "Output"


def beam(
    prompt: Annotated[str | None, typer.Argument(help="Text to complete; - reads it from standard input, as does a pipe.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Take the prompt from this file.", rich_help_panel=_PROMPT)] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="A folder with safetensors, a .gguf file, a hub name, or smollm2.", rich_help_panel=_ENGINE)
    ] = "smollm2",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.", rich_help_panel=_ENGINE)] = "cpu",
    threads: Annotated[int | None, typer.Option(help="Processor threads. Default: all cores.", min=1, rich_help_panel=_ENGINE)] = None,
    width: Annotated[int, typer.Option("--width", "-w", help="Beams, and texts that are printed.", rich_help_panel=_SEARCH)] = 4,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a text.", rich_help_panel=_SEARCH)] = 64,
    length_penalty: Annotated[
        float,
        typer.Option(help="A text's score is the sum of its log-probabilities over its length to this power.", rich_help_panel=_SEARCH),
    ] = 1.0,
    early_stopping: Annotated[
        bool, typer.Option("--early-stopping", help="End as soon as that many texts have ended.", rich_help_panel=_SEARCH)
    ] = False,
    no_spec: Annotated[
        bool, typer.Option("--no-spec", help="One step per pass, without drafts: the same texts and scores.", rich_help_panel=_SEARCH)
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the texts.", rich_help_panel=_OUTPUT)] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=_OUTPUT)] = False,
) -> None:
    """Find the likeliest completions of a text by beam search, with drafts: the same ones, in fewer passes."""
    from ngramspec.cli import main as cli
    from ngramspec.cli import screen

    text = cli._read_prompt(prompt, file)
    with screen.progress(quiet) as say:
        settings = {} if threads is None else {"threads": threads}
        engine = cli._open(model, device=device, speculation=not no_spec, max_seqs=max(width, 1), progress=say, **settings)
    with engine:
        try:
            beams = engine.beam_search(text, width, max_tokens, length_penalty=length_penalty, early_stopping=early_stopping)
        except ValueError as error:
            raise cli.BadInputError(str(error)) from error
        passes = engine.status().passes
    if as_json:
        print(json.dumps({"model": model, "beams": [dataclasses.asdict(each) for each in beams], "passes": passes}))
        return
    for i, each in enumerate(beams):
        print(f"── {i + 1} of {len(beams)}, score {each.score:.4f}, {len(each.token_ids)} tokens\n{each.text}")


def register(top: typer.Typer) -> None:
    """Add the command to the command line."""
    top.command("beam")(beam)
