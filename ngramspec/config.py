"""The engine's settings, each declared once: name, default, bounds and meaning.

`Engine`'s keyword arguments, the command line and the server's options are all built from `EngineConfig`. Imports nothing that takes time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ngramspec.defaults import ANSWERS, HISTORY, MAX_HISTORY, MAX_ORDER, SPEC_LENGTH, SPEC_ROWS
from ngramspec.errors import InvalidInputError
from ngramspec.field_docs import document_fields
from ngramspec.options import ChoiceOf, Flag, Integer, Number, TextKind, check, option

_MODEL, _SPECULATION = "Model and device", "Speculation"
# The commands that decode with drafts from all sources; beam search has its own.
_DECODING = ("complete", "serve")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine is to be. Raises InvalidInputError, naming the accepted range, for any value outside it."""

    device: str = option("cpu", TextKind(), "cpu, cuda or cuda:N.", panel=_MODEL)
    dtype: str = option(
        "auto",
        ChoiceOf(("auto", "float32", "bfloat16", "float16")),
        "float32; on CUDA bfloat16, float16 or float32. auto: the first of these.",
        panel=_MODEL,
    )
    precision: str = option(
        "auto",
        ChoiceOf(("auto", "int8", "float32")),
        "On the CPU, of products with weights in blocks of codes (GGUF's Q2_K to Q8_0): int8 takes activations as 8-bit codes, as "
        "llama.cpp does; float32 gives transformers' own sums and takes longer. auto: int8 for such weights, float32 for others.",
        metavar="auto|int8|float32",
        panel=_MODEL,
    )
    kv_dtype: str = option(
        "auto",
        ChoiceOf(("auto", "float32", "float16")),
        "On the CPU, how keys and values are kept. auto: float16 with int8, else float32.",
        metavar="auto|float32|float16",
        panel=_MODEL,
    )
    quantize: str = option(
        "none",
        ChoiceOf(("none", "q8_0")),
        "On the CPU, make blocks of 8-bit codes of weights that are not in blocks, while loading: q8_0, GGML's.",
        metavar="none|q8_0",
        panel=_MODEL,
    )
    threads: int | None = option(None, Integer(1, optional=True), "Processor threads. Default: one per performance core.", panel=_MODEL)
    max_model_len: int | None = option(
        None, Integer(2, optional=True), "Most tokens of prompt and output. Default: what model and memory allow.", panel=_MODEL
    )
    max_seqs: int = option(64, Integer(1), "Sequences that run at a time.", panel=_MODEL, only=("serve",))
    max_rows: int | None = option(
        None, Integer(1, optional=True), "Most rows of prompts and sequences in a pass. Default: 128, on CUDA 2,048.", flags=None
    )
    kv_memory: int | None = option(
        None,
        Integer(1, 2**63 - 1, optional=True),
        "Memory for keys and values, such as 2G. Default: a quarter of what is free, at most 4G; on CUDA all that may be used.",
        metavar="SIZE",
        panel=_MODEL,
        only=("serve",),
    )
    gpu_memory_utilization: float = option(
        0.9,
        Number(0, 1, above=True),
        "Share of a CUDA device's memory that may be used, keys and values included.",
        metavar="F",
        panel=_MODEL,
    )
    keep_blocks: str = option(
        "auto",
        ChoiceOf(("auto", "always", "never")),
        "On CUDA, whether weights stay in the blocks of a GGUF file, in which they take about a third of the memory and a pass some 1.3 "
        "times as long. auto: if they would take more than half of it otherwise. No token depends on it.",
        metavar="auto|always|never",
        panel=_MODEL,
    )
    linears: str = option(
        "exact",
        ChoiceOf(("exact", "unpacked", "vendor")),
        "For comparison: on the CPU, unpacked keeps every weight as the float32 number that it stands for; on CUDA, vendor takes the "
        "vendor's matrix products, with which rows depend on their number.",
        flags=None,
    )
    graphs: bool = option(True, Flag(), "On CUDA, replay captured passes; else every kernel is launched by itself.", flags=None)
    prefix_cache: bool = option(
        True,
        Flag(),
        "Use again what was computed for a prompt that begins alike.",
        panel=_MODEL,
        only=("serve",),
        off="Compute every prompt from its beginning.",
    )
    prefix_cache_path: str | None = option(
        None,
        TextKind(optional=True),
        "A folder that keeps what was computed for prompts across restarts. It holds what prompts say: it is made for this user alone.",
        flags=("--prefix-cache",),
        metavar="FOLDER",
        panel=_MODEL,
        only=("serve",),
    )
    prefix_cache_size: int = option(
        4 << 30,
        Integer(1, 2**63 - 1),
        "Most bytes in that folder, such as 4G; what was used least recently goes first.",
        metavar="SIZE",
        panel=_MODEL,
        only=("serve",),
    )
    speculation: bool = option(
        True,
        Flag(),
        "Draft; without, one token per pass.",
        flags=("--no-spec",),
        panel=_SPECULATION,
        off="One token per pass, without drafts.",
    )
    spec_length: int = option(SPEC_LENGTH, Integer(1, 4096), "Longest draft. What pays decides below it.", panel=_SPECULATION)
    spec_rows: int = option(
        SPEC_ROWS, Integer(1, 4096), "Most draft tokens of a sequence that are verified in one pass.", panel=_SPECULATION, only=_DECODING
    )
    max_order: int = option(MAX_ORDER, Integer(2, MAX_ORDER), "Longest n-gram looked up.", panel=_SPECULATION, only=_DECODING)
    history: int = option(
        HISTORY, Integer(16, MAX_HISTORY), "Tokens of a sequence that its n-gram tables remember.", panel=_SPECULATION, only=_DECODING
    )
    answers: int = option(
        ANSWERS,
        Integer(0, MAX_HISTORY),
        "Tokens of finished answers to draft from, 0: none. Never across keys.",
        panel=_SPECULATION,
        only=("serve",),
    )
    similar: bool = option(
        True,
        Flag(),
        "Draft from the datastores' files that are most like the prompt.",
        panel=_SPECULATION,
        only=_DECODING,
        off="Do not draft from the datastores' files that are most like the prompt.",
    )
    recycle: bool = option(
        True,
        Flag(),
        "Draft from the model's own candidates.",
        panel=_SPECULATION,
        only=_DECODING,
        off="Do not draft from the model's own candidates.",
    )
    mtp: bool = option(
        True,
        Flag(),
        "Draft with the model's own head for further tokens (multi-token prediction), if its file has one. On the CPU.",
        panel=_SPECULATION,
        only=_DECODING,
        off="Do not draft with the model's own head for further tokens.",
    )
    acceptance: str = option(
        "walk",
        ChoiceOf(("walk", "rejection")),
        "walk: the text is the same as without drafts. rejection, with --alone: sampled text is only distributed alike (Leviathan et al.).",
        metavar="walk|rejection",
        panel=_SPECULATION,
        only=_DECODING,
    )
    lenience: float = option(
        1.0,
        Number(0, 1, above=True),
        "Below 1: accept what the model holds a little less likely; the text is another (Leviathan et al.).",
        metavar="F",
        panel=_SPECULATION,
        only=_DECODING,
    )

    def __post_init__(self) -> None:
        check(self)
        n_cores = os.cpu_count() or 1
        if self.threads is not None and self.threads > n_cores:
            raise InvalidInputError(f"threads must be 1 to {n_cores}, got {self.threads}")


document_fields(__name__)
