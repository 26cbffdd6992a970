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
        "Number format of weights that are not quantised: float32 on the CPU; bfloat16 (auto), float16 or float32 on CUDA.",
        panel=_MODEL,
    )
    precision: str = option(
        "auto",
        ChoiceOf(("auto", "int8", "float32")),
        "On the CPU, how quantised weights (GGUF's Q2_K to Q8_0) are multiplied. int8 rounds activations to 8 bits, as llama.cpp does; "
        "float32 computes what transformers computes and takes longer. auto: int8 for quantised weights, float32 for others.",
        metavar="auto|int8|float32",
        panel=_MODEL,
    )
    kv_dtype: str = option(
        "auto",
        ChoiceOf(("auto", "float32", "float16")),
        "On the CPU, the number format of the KV cache. auto: float16 with precision int8, else float32.",
        metavar="auto|float32|float16",
        panel=_MODEL,
    )
    quantize: str = option(
        "none",
        ChoiceOf(("none", "q8_0")),
        "On the CPU, quantise weights of float32, float16 or bfloat16 to 8 bits (GGML's q8_0) while loading.",
        metavar="none|q8_0",
        panel=_MODEL,
    )
    threads: int | None = option(None, Integer(1, optional=True), "Processor threads. Default: one per performance core.", panel=_MODEL)
    max_model_len: int | None = option(
        None,
        Integer(2, optional=True),
        "Context length: most tokens of prompt and output together. Default: what the model and the memory allow.",
        panel=_MODEL,
    )
    max_seqs: int = option(64, Integer(1), "Most sequences that run at a time; others wait.", panel=_MODEL, only=("serve",))
    max_rows: int | None = option(
        None, Integer(1, optional=True), "Most rows of prompts and sequences in a pass. Default: 128, on CUDA 2,048.", flags=None
    )
    kv_memory: int | None = option(
        None,
        Integer(1, 2**63 - 1, optional=True),
        "Memory for the KV cache, such as 2G. Default: a quarter of what weights leave free, at most 4G; on CUDA all that may be used.",
        metavar="SIZE",
        panel=_MODEL,
        only=("serve",),
    )
    gpu_memory_utilization: float = option(
        0.9,
        Number(0, 1, above=True),
        "Share of a CUDA device's memory that may be used, KV cache included.",
        metavar="F",
        panel=_MODEL,
    )
    keep_blocks: str = option(
        "auto",
        ChoiceOf(("auto", "always", "never")),
        "On CUDA, whether a GGUF file's weights stay quantised: about a third of the memory, and a pass takes some 1.3 times as long. "
        "auto: only if the dequantised weights would fill more than half of the memory. Changes no token.",
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
        "Reuse what was computed for an earlier prompt with the same beginning.",
        panel=_MODEL,
        only=("serve",),
        off="Compute every prompt from its beginning, without the prefix cache.",
    )
    prefix_cache_path: str | None = option(
        None,
        TextKind(optional=True),
        "A folder in which the prefix cache survives restarts. It reveals what prompts say, so only this user can open it.",
        flags=("--prefix-cache",),
        metavar="FOLDER",
        panel=_MODEL,
        only=("serve",),
    )
    prefix_cache_size: int = option(
        4 << 30,
        Integer(1, 2**63 - 1),
        "Largest size of the --prefix-cache folder, such as 4G; what was used least recently is deleted first.",
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
    spec_length: int = option(
        SPEC_LENGTH,
        Integer(1, 4096),
        "Most tokens of a draft from its first to its last; usually fewer are worth verifying.",
        panel=_SPECULATION,
    )
    spec_rows: int = option(
        SPEC_ROWS,
        Integer(1, 4096),
        "Most draft tokens, branches included, that are verified for a sequence in one pass.",
        panel=_SPECULATION,
        only=_DECODING,
    )
    max_order: int = option(MAX_ORDER, Integer(2, MAX_ORDER), "Longest n-gram looked up.", panel=_SPECULATION, only=_DECODING)
    history: int = option(
        HISTORY, Integer(16, MAX_HISTORY), "Tokens of a sequence that its n-gram tables remember.", panel=_SPECULATION, only=_DECODING
    )
    answers: int = option(
        ANSWERS,
        Integer(0, MAX_HISTORY),
        "Tokens of earlier outputs to draft from; 0: none. Keys never share them.",
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
        "Draft the model's own next-best tokens of earlier passes.",
        panel=_SPECULATION,
        only=_DECODING,
        off="Do not draft the model's own next-best tokens of earlier passes.",
    )
    syntax: bool = option(
        True,
        Flag(),
        "Draft what usually follows in source code, by the table of syntax that the package ships.",
        panel=_SPECULATION,
        only=_DECODING,
        off="Do not draft by the table of syntax.",
    )
    mtp: bool = option(
        True,
        Flag(),
        "Draft with the model's own multi-token prediction head (MTP), if its file has one. On the CPU.",
        panel=_SPECULATION,
        only=_DECODING,
        off="Do not draft with the model's own multi-token prediction head (MTP).",
    )
    acceptance: str = option(
        "walk",
        ChoiceOf(("walk", "rejection")),
        "walk: the same text as without drafts. rejection, only with --alone: another text from the same distribution (Leviathan et al.).",
        metavar="walk|rejection",
        panel=_SPECULATION,
        only=_DECODING,
    )
    lenience: float = option(
        1.0,
        Number(0, 1, above=True),
        "Below 1: also accept draft tokens that are a little less likely; changes the text (Leviathan et al.).",
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
