"""Texts that a model wrote, read from files, and an engine that writes them again whatever its own model would have written.

A trace file and a tokenizer enter, prompts with their outputs leave. In an engine that accepts by `Recital` every pass runs and takes its
time, and the tokens are those of the recording. Drafts are verified against the recording as they would be against the model
that wrote it. What the model itself would say, its own candidates for a next token among it, has no bearing on the recording, so an engine
that replays is opened with `recycle=False`.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import inspect
import re
import shutil
import statistics
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from benchmarks.common import Prompt, RowError, get_reference, iterate_rows
from ngramspec import SamplingParams
from ngramspec.backends.base import Output
from ngramspec.engine.acceptance import AcceptedTokens, ExactMatch
from ngramspec.engine.sequence import Sequence
from ngramspec.sampling.batch import Span
from ngramspec.sampling.verify import match_draft


@dataclass(frozen=True, slots=True)
class RecordedText:
    """What a model was asked, and what it wrote."""

    prompt: list[int]
    output: list[int]
    prediction: list[int] | None = None
    top: tuple[np.ndarray, np.ndarray] | None = None
    """The model's own most likely tokens at each output position [n, KEPT] int64 and their logits [n, KEPT] float32, if recorded."""


def find_edited_text(row: dict[str, Any]) -> str:
    """Return the text that an edit request carries: the first fenced block of its last user message, "" if there is none."""
    asked = [str(m.get("content") or "") for m in row.get("messages") or () if m["role"] == "user"] or [str(row.get("prompt", ""))]
    block = re.search(r"^```[^\n]*\n(.*?)^```", asked[-1], re.DOTALL | re.MULTILINE)
    return block[1] if block else ""


def read_traces(path: Path, tokenizer: Any, limit: int | None, max_out: int, predicted: bool = False) -> list[RecordedText]:
    """Read the traces of a JSONL file. A row has `prompt_ids` and `output_ids`; or `messages`, whose last assistant message is the output,
    else `model_output` or `reference` (of several the first) is; or `prompt` and one of these two. Outputs of fewer than 8 tokens are left
    out.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    traces: list[RecordedText] = []
    for _, row in iterate_rows(path):
        if limit is not None and len(traces) >= limit:
            break
        if "output_ids" in row:
            prompt, output = list(row["prompt_ids"]), list(row["output_ids"])
        elif "messages" in row:
            messages = [{"role": str(m["role"]), "content": str(m.get("content") or "")} for m in row["messages"]]
            replies = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
            text = messages[replies[-1]]["content"] if replies else str(row.get("model_output") or get_reference(row))
            asked = messages[: replies[-1]] if replies else messages
            prompt = encode(tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))
            output = encode(text)
        else:
            prompt, output = encode(row["prompt"]), encode(str(row.get("model_output") or get_reference(row)))
        if len(output) >= 8:
            top = (np.array(row["top_ids"], np.int64), np.array(row["top_logprobs"], np.float32)) if "top_ids" in row else None
            traces.append(RecordedText(prompt, output[:max_out], encode(find_edited_text(row)) if predicted else None, top))
    if not traces:
        raise RowError(f"{path} has no usable traces")
    return traces


class Recital(ExactMatch):
    """Accepts along the recorded outputs of prompts, and along the model's own tokens for others.

    A device that samples tokens and moves the accepted KV within the pass does so for its own samples: what lies in the KV is another text
    then, and the work is the same.
    """

    matches_by_pass = False

    def __init__(self, prompts: list[Prompt]) -> None:
        """Take the prompts that have their output."""
        self.outputs = {tuple(prompt.ids): np.array(prompt.output, np.int32) for prompt in prompts if prompt.output}
        self._known: WeakKeyDictionary[Sequence, np.ndarray | None] = WeakKeyDictionary()

    def make_params(self, params: SamplingParams, prompt: list[int]) -> SamplingParams:
        """Return the parameters with which the prompt's recorded output is written to its end."""
        output = self.outputs.get(tuple(prompt))
        return params if output is None else dataclasses.replace(params, max_tokens=len(output), ignore_eos=True)

    def iterate_accepted(self, seq: Sequence, output: Output, span: Span) -> AcceptedTokens:
        if seq not in self._known:
            self._known[seq] = self.outputs.get(tuple(seq.tokens[: seq.n_prompt].tolist()))
        text = self._known[seq]
        if text is None:
            return super().iterate_accepted(seq, output, span)
        by_pass = span.sampler is not None and span.sampler.needs_only_logits
        rows = None if by_pass else output.get_logits(span.root_logits, span.end_logits)

        def sample(row: int) -> int:
            if rows is not None:
                seq.sampler.sample(rows[row], seq.n_output)  # for the time that it takes
            return int(text[seq.n_output])

        return ((token, node, None) for token, node in match_draft(seq.tree, sample))


def read_recorded_prompts(path: Path | None, tokenizer: Any, vocab_size: int, limit: int | None, max_tokens: int) -> list[Prompt]:
    """Return prompts with their recorded outputs, cut to `max_tokens`, in the file's order; of several for one prompt the first.

    Without a file, edits of the standard library. Raises ValueError for a file without traces, and for ids that the model does not have.
    """
    traces = make_library_edits(tokenizer) if path is None else read_traces(path, tokenizer, None, max_tokens)
    prompts: dict[tuple[int, ...], Prompt] = {}
    for n, trace in enumerate(traces):
        key = tuple(trace.prompt)
        if key and key not in prompts and (limit is None or len(prompts) < limit):
            prompts[key] = Prompt(f"{path.stem if path else 'edit'}/{n}", trace.prompt, trace.output[:max_tokens])
    top = max(max(prompt.ids + (prompt.output or [])) for prompt in prompts.values())
    if top >= vocab_size:
        raise ValueError(f"the traces have token {top}, the model {vocab_size} tokens; accepted: a tokenizer of at most that many")
    return list(prompts.values())


def make_library_edits(tokenizer: Any) -> list[RecordedText]:
    """Make, not record: functions of the standard library in which a parameter is renamed, all of the function written anew."""
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
            traces.append(RecordedText(*(list(tokenizer(t, add_special_tokens=False)["input_ids"]) for t in (text, edited))))
    return traces
