"""`ngramspec beam`: a prompt enters, the texts that beam search finds leave, best first, on standard output. Knows not how it searches."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

from ngramspec.cli import common
from ngramspec.cli.common import BadInputError, option
from ngramspec.cli.environment import add_environment
from ngramspec.cli.flags import OUTPUT, SEARCH, Model, Prompt, PromptFile, with_options
from ngramspec.config import EngineConfig


@with_options("beam", engine_settings=EngineConfig)
def run_beam_search(
    *,
    prompt: Prompt = None,
    file: PromptFile = None,
    model: Model = "smollm2",
    width: Annotated[int, option(SEARCH, "Number of beams, and of texts that are printed.", "--width", "-w", min=1)] = 4,
    max_tokens: Annotated[int, option(SEARCH, "Most tokens of a text.", min=1)] = 64,
    length_penalty: Annotated[
        float,
        option(SEARCH, "A text's score is the sum of its log-probabilities, divided by its length to this power.", min=-10, max=10),
    ] = 1.0,
    early_stopping: Annotated[bool, option(SEARCH, "Stop as soon as as many texts as beams have ended.", "--early-stopping")] = False,
    as_json: Annotated[bool, option(OUTPUT, "Print one JSON document instead of the texts.", "--json")] = False,
    quiet: Annotated[bool, option(OUTPUT, "Print no progress.", "--quiet", "-q")] = False,
    engine_settings: dict[str, Any],
) -> None:
    """Find the most likely completions of a text by beam search, in fewer passes of the model thanks to drafts."""
    add_environment(engine_settings, "beam")
    text = common.read_prompt(prompt, file)

    from ngramspec.cli import screen

    with screen.show_progress(quiet) as progress:
        engine = common.open_engine(model, max_seqs=max(width, 1), progress=progress, **engine_settings)
    with engine:
        try:
            beams = engine.beam_search(text, width, max_tokens, length_penalty=length_penalty, early_stopping=early_stopping)
        except ValueError as error:
            raise BadInputError(str(error)) from error
        passes = engine.status().passes
    if as_json:
        print(json.dumps({"model": model, "beams": [dataclasses.asdict(each) for each in beams], "passes": passes}))
        return
    for i, each in enumerate(beams):
        print(f"── {i + 1} of {len(beams)}, score {each.score:.4f}, {len(each.token_ids)} tokens\n{each.text}")
