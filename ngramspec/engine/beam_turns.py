"""Run a beam search (`papers.beam`) between the steps of an engine: it takes turns with other requests, pass by pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

from ngramspec.engine.thread import StepThread
from ngramspec.errors import InvalidInputError
from ngramspec.grammar.constraint import Constraint
from ngramspec.kv_cache.blocks import BlockHashes
from ngramspec.papers.beam import BeamOptions, BeamSearch, Ended
from ngramspec.speculative.drafter import DraftOptions, Speculator
from ngramspec.speculative.proposer import TreeProposer
from ngramspec.tokenizer.detokenizer import TextStream


def search_beams(
    thread: StepThread, ids: np.ndarray, options: BeamOptions, block_hashes: BlockHashes, constraint: Constraint | None, *,
    speculation: bool, should_stop: Callable[[], bool],
) -> list[Ended]:  # fmt: skip
    """Return the best continuations of a prompt [n] int32, best first. `should_stop` is called before each pass, in the engine's thread.

    Raises InvalidInputError, and what `BeamSearch.step` and `StepThread.call` raise.
    """
    core = thread.core
    runner, width = core.runner, options.width
    most = min(len(runner.pool.n_blocks_of), runner.max_rows)
    if not 1 <= width <= most:
        raise InvalidInputError(f"width must be 1 to {most}, what max_seqs and max_rows allow, got {width}")
    if options.limit < 1:
        raise InvalidInputError(f"max_tokens must be 1 or more, got {options.limit}")
    if not -10 <= options.length_penalty <= 10:
        raise InvalidInputError(f"length_penalty must be -10 to 10, got {options.length_penalty}")
    drafts = Speculator()
    if speculation and core.speculator.active:
        drafts = TreeProposer(
            DraftOptions(vocab_size=runner.vocab_size, spec_length=core.speculator.spec_length, max_seqs=width, answers=0)
        )
    search = BeamSearch(
        ids,
        options,
        runner=runner,
        free_slots=core.scheduler.free_slots,
        block_hashes=block_hashes,
        speculator=drafts,
        cost_ms=core.cost.table,
        constraint=constraint,
    )
    over = False

    def run_search_step() -> None:
        nonlocal over
        try:
            search.stopped |= should_stop()
            if not search.done:
                core.n_passes += search.step()
            over = search.done
        except Exception:
            over = True
            raise
        finally:
            if over:
                search.close()

    try:
        thread.call(run_search_step, until=lambda: over)
    except BaseException:
        search.stopped = True  # if the caller was interrupted, it goes no further
        raise
    return search.ended


def decode_output(tokenizer: Any, prompt: Iterable[int], tokens: list[int], stop_ids: Collection[int]) -> list[str]:
    """Return what each token of an output adds to its text: a stop token at its end nothing, and none anything without a tokenizer."""
    if tokenizer is None:
        return [""] * len(tokens)
    stream = TextStream(tokenizer, list(prompt))
    worded = tokens[:-1] if tokens[-1] in stop_ids else tokens
    texts = [*map(stream.push, worded), *([""] * (len(tokens) - len(worded)))]
    texts[-1] += stream.finish()
    return texts
