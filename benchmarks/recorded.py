"""Replaying recorded text through the engine: every pass runs and takes its time, and the walk's tokens are those of the recording.

A trace file and a tokenizer enter, prompts with their outputs leave; a `ReplayEngine` that knows the outputs writes them, whatever its
model would have written. Drafts are verified against the recording as they would be against the model that wrote it. What the model
itself would say, its own candidates for a next token among it, has no bearing on the recording, so an engine that replays is opened
with `recycle=False`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from benchmarks.common import Prompt
from benchmarks.replay import Trace, read_traces
from ngramspec import Engine
from ngramspec.batch.pack import depths
from ngramspec.batch.types import TokenLogprob
from ngramspec.core.request import Request
from ngramspec.core.sequence import Sequence

Outputs = Mapping[tuple[int, ...], list[int]]
"""What was written, by prompt."""


class ReplayEngine(Engine):
    """An engine that writes the recorded output of each prompt it knows, to its end. Set `outputs` before the first of them.

    A device that picks tokens and moves the accepted KV within the pass does so for its own picks: what lies in the KV is another text
    then, and the work is the same.
    """

    outputs: Outputs = MappingProxyType({})

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._recorded: WeakKeyDictionary[Sequence, list[int]] = WeakKeyDictionary()
        follow = self.core._follow
        self.core._follow = lambda seq, sampled: follow(seq, self._recite(seq, sampled))  # type: ignore[method-assign]

    def _add(self, request: Request) -> None:
        output = self.outputs.get(tuple(request.completion.prompt_token_ids))
        if output is not None:
            for seq in request._seqs:
                self._recorded[seq] = output
                seq.limit = min(seq.limit, seq.n_prompt + len(output))
                seq.stop_ids = frozenset()
                seq.sample = partial(_pick, seq, output)  # type: ignore[method-assign]
        super()._add(request)

    def _recite(self, seq: Sequence, sampled: np.ndarray) -> np.ndarray:
        """In place of what the device picked after each row [1 + nodes] int32: the recorded token at the row's depth."""
        output = self._recorded.get(seq)
        if output is None:
            return sampled
        depth = np.zeros(1, np.int64)
        if seq.tree is not None:
            depth = np.concatenate([depth, depths(seq.tree.parents)])
        return np.array(output, np.int32)[np.minimum(seq.n_output + depth, len(output) - 1)]


def _pick(seq: Sequence, output: list[int], row: np.ndarray) -> tuple[int, TokenLogprob | None]:
    """`Sequence.sample` as it takes its time, and the recorded token."""
    seq.sampler.sample(row, seq.n_output)
    return output[seq.n_output], None


def recorded_prompts(path: Path | None, tokenizer: Any, vocab_size: int, limit: int | None, max_tokens: int) -> list[Prompt]:
    """Prompts with their recorded outputs, cut to `max_tokens`, in the file's order; of several for one prompt the first.

    Without a file, edits of the standard library. Raises ValueError for a file without traces, and for ids that the model does not have.
    """
    traces = library_edits(tokenizer) if path is None else read_traces(path, tokenizer, None, max_tokens)
    prompts: dict[tuple[int, ...], Prompt] = {}
    for n, trace in enumerate(traces):
        key = tuple(trace.prompt)
        if key and key not in prompts and (limit is None or len(prompts) < limit):
            prompts[key] = Prompt(f"{path.stem if path else 'edit'}/{n}", trace.prompt, trace.output[:max_tokens])
    top = max(max(prompt.ids + (prompt.output or [])) for prompt in prompts.values())
    if top >= vocab_size:
        raise ValueError(f"the traces have token {top}, the model {vocab_size} tokens; accepted: a tokenizer of at most so many")
    return list(prompts.values())


def outputs_of(prompts: list[Prompt]) -> Outputs:
    return {tuple(prompt.ids): prompt.output for prompt in prompts if prompt.output}


def library_edits(tokenizer: Any) -> list[Trace]:
    """Made, not recorded: functions of the standard library in which a parameter is renamed, all of the function written anew."""
    import argparse
    import heapq
    import shutil
    import statistics
    import textwrap

    modules: tuple[ModuleType, ...] = (textwrap, heapq, shutil, statistics, argparse)
    traces = []
    for module in modules:
        for _, function in inspect.getmembers(module, inspect.isfunction):
            names = list(inspect.signature(function).parameters)
            source = inspect.getsource(function)
            if function.__module__ != module.__name__ or not names or not 300 < len(source) < 4000:
                continue
            request = f"Call the parameter {names[0]} of this function new_{names[0]}, and print all of it.\n\n```python\n{source}```"
            text = tokenizer.apply_chat_template([{"role": "user", "content": request}], tokenize=False, add_generation_prompt=True)
            edited = "```python\n" + re.sub(rf"\b{names[0]}\b", f"new_{names[0]}", source) + "```"
            traces.append(Trace(*(list(tokenizer(t, add_special_tokens=False)["input_ids"]) for t in (text, edited))))
    return traces
