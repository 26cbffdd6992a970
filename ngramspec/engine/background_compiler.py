"""Compile what an engine on the CPU runs, ahead of its first use: in two child processes beside the first start, or in this one.

Children write machine code to the cache on disk (`datastore.code_cache`), from where this process loads it. A model's start waits for the
few stages that plain passes need; drafting and native steps join when theirs are done. What a child could not compile, this process
compiles when it calls it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ngramspec.backends.cpu import llama_pass, tiny_pass
from ngramspec.backends.cpu.cores import count_cores
from ngramspec.child_process import ChildEndedError, ChildProcess, Message, answer_messages
from ngramspec.datastore import code_cache, lookup
from ngramspec.datastore.cache_dir import cache_dir
from ngramspec.engine import native_steps, step_functions
from ngramspec.sampling import sampler, verify
from ngramspec.speculative import datastore_drafter, draft_stats, proposer
from ngramspec.speculative.budget import cost_model

log = logging.getLogger(__name__)

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CompiledFor:
    """What code is compiled for."""

    kv_dtype: str
    """The type of keys and values, "float16" or "float32"."""
    gguf: str = ""
    """The model's file, for the formats of its weights; "" if there is none."""
    int8: bool = True
    """Whether activations may have 8 bits."""


# Stages and what each compiles or loads.
STAGES: dict[str, Callable[[CompiledFor], object]] = {
    "packing": lambda _: tiny_pass.compile_packing(),
    "batches": lambda _: verify.warmup_batches(),
    "sampling": lambda _: sampler.warmup(),
    "verification": lambda _: verify.warmup(),
    "statistics": lambda _: draft_stats.warmup(),
    "cost curve": lambda _: cost_model.compile_curve(),
    "cost": lambda _: cost_model.warmup(),
    "modules": lambda _: tiny_pass.compile_modules(_code_folder()),
    "kernels": lambda to: tiny_pass.compile_kernels(to.gguf, to.int8, _code_folder()) if to.gguf else None,
    "pass arguments": lambda to: tiny_pass.make_tiny_pass(to.kv_dtype, _code_folder()),
    "pass": lambda to: tiny_pass.run_tiny_pass(to.kv_dtype, _code_folder()),
    "accepted paths": lambda to: tiny_pass.keep_tiny_paths(to.kv_dtype, _code_folder()),
    "draft state": lambda _: proposer.get_idle_drafting(),
    "draft trees": lambda _: native_steps.find_build_trees(proposer.get_idle_drafting().draft_state),
    "learning": lambda _: native_steps.find_update(proposer.get_idle_drafting().draft_state),
    "drafting": lambda _: proposer.warmup(),
    "native steps": lambda to: native_steps.compile_steps(*tiny_pass.make_tiny_pass(to.kv_dtype, _code_folder())),
    "native drafting": lambda to: native_steps.compile_drafting(*tiny_pass.make_tiny_pass(to.kv_dtype, _code_folder())),
    "datastores": lambda _: datastore_drafter.warmup(),
}
LOADING = ("packing", "kernels", "modules")  # stages that packing a model's weights needs
_PASSES = (*LOADING, "pass arguments", "pass")
PLAIN = (*_PASSES, "batches", "statistics", "cost curve")  # stages that a first token needs, if it is the likeliest one
SAMPLING = ("sampling", "verification")  # stages that any other choice of a token needs besides
DRAFTING = tuple(name for name in STAGES if name != "datastores")  # stages that speculation needs where there is no datastore
# Which child compiles which stages, in order.
CHILDREN = (
    ("pass arguments", "pass", "accepted paths", *SAMPLING, "cost", "learning", "native steps", "datastores"),
    ("packing", "kernels", "batches", "modules", "statistics", "cost curve", "draft state", "draft trees", "drafting", "native drafting"),
)
# What a stage waits for: two children must not compile the same functions, but for some small ones.
_NEEDS = {
    "pass": ("batches",),
    "draft state": ("pass",),
    "cost": ("cost curve",),
    "learning": ("draft state",),
    "drafting": ("learning",),
    "native drafting": ("native steps",),
    "datastores": ("native drafting",),  # last: most engines have none
}
FEW_CORES = 3  # with as many or fewer, what a first token does not need is compiled once the model is loaded
NICE = 5  # priority given up by a child once what it compiles is not needed for a first token
COLLECT_AT = 20_000  # new objects before a child collects garbage; with Python's 700, a tenth of its time went there
# What the types of `run_thread`'s arguments contain, as text, by the type of keys and values.
_POOLS = {"float16": "('pool', UniTuple(Array(uint16,", "float32": "('pool', UniTuple(Array(float32,"}
POLL_S = 1.0  # seconds between two looks whether the parent still lives


def _code_folder() -> Path:
    return cache_dir() / "code"


def warm_up(kv_dtype: str | None = None, progress: Progress = lambda _: None) -> None:
    """Compile in this process, or load from disk, what steps need. `kv_dtype`: also passes, with keys and values of that type."""
    names = [
        name for name in STAGES if kv_dtype or name not in (*_PASSES, "accepted paths", "native steps", "native drafting", "datastores")
    ]
    for i, name in enumerate(names):
        progress(f"compiling, {i + 1} of {len(names)}, once per installation")
        STAGES[name](CompiledFor(kv_dtype or "float16"))


def is_compiled(kv_dtype: str = "float16") -> bool:
    """Return whether the machine code of the largest functions is kept, of this version, and of those that children compile last.

    Of passes it is asked for keys and values of this type.
    """
    others = step_functions.accept_and_prepare, step_functions.learn_verified, step_functions.draft_trees, lookup.propose_batch
    return code_cache.is_kept(llama_pass.run_thread, _POOLS[kv_dtype]) and all(map(code_cache.is_kept, others))


class BackgroundCompiler:
    """Two child processes that compile all stages. For any thread."""

    def __init__(self, code: CompiledFor, progress: Progress) -> None:
        """Start compiling. `progress` is told how far it is, until it is set to None. Raises OSError."""
        self.progress: Progress | None = progress
        self._done = {name: threading.Event() for name in STAGES}
        self._may_go_on = threading.Event()  # with stages that a first token does not need
        if count_cores() > FEW_CORES:
            self._may_go_on.set()
        self._error: Exception | None = None
        self._is_closed = False
        self._children: list[ChildProcess] = []
        try:
            for _ in CHILDREN:
                child = ChildProcess(__name__, ("ngramspec", "numba", "llvmlite", "numpy"), asdict(code), use_site=True)
                self._children.append(child)
        except OSError:
            for child in self._children:
                child.close()
            raise
        for child, names in zip(self._children, CHILDREN, strict=True):
            threading.Thread(target=self._compile, args=(child, names), name="ngramspec-compiling", daemon=True).start()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def n_done(self) -> int:
        return sum(event.is_set() for event in self._done.values())

    def wait(self, *names: str) -> None:
        """Wait until these stages are done, or have failed."""
        for name in names:
            self._done[name].wait()

    def go_on(self) -> None:
        """Compile the other stages, too: the model is loaded."""
        self._may_go_on.set()

    def close(self) -> None:
        """End the children, which the threads that wait for them close. Can be called any number of times."""
        self._is_closed = True
        self._may_go_on.set()
        for child in self._children:
            child.kill()

    def _compile(self, child: ChildProcess, names: Sequence[str]) -> None:
        try:
            child.wait_until_ready()
            for name in names:
                self.wait(*_NEEDS.get(name, ()))
                if name not in PLAIN:
                    self._may_go_on.wait()
                child.ask({"stage": name}, math.inf)
                self._done[name].set()
                if self.progress is not None:
                    self.progress(f"compiling, {self.n_done} of {len(STAGES)}, once per installation")
                log.debug("compiled %s", name)
        except ChildEndedError as error:
            if self._error is None and not self._is_closed:
                self._error = error
                log.warning("%s: what it was to compile is compiled in this process, which takes longer", error)
        except Exception:  # of `progress`, which will tell the thread that loads the model, too
            self.close()
        finally:
            child.close()
            for name in names:
                self._done[name].set()


def start_compiling(code: CompiledFor, progress: Progress) -> BackgroundCompiler | None:
    """Compile in the background; None if there is nothing to compile, or if it cannot be kept or no process can be started."""
    if is_compiled(code.kv_dtype) or not code_cache.is_writable(llama_pass.run_thread):
        return None
    progress("compiling, once per installation")
    try:
        return BackgroundCompiler(code, progress)
    except OSError as error:
        log.warning("no process can be started to compile in (%s): compiling in this one, which takes longer", error)
        return None


def compile_all(progress: Progress) -> None:
    """Compile everything for quantised and for float32 models, and return when it is done. Raises OSError if it cannot be kept."""
    if not code_cache.is_writable(llama_pass.run_thread):
        raise OSError("compiled code cannot be kept, so compiling ahead is of no use (NGRAMSPEC_CACHE may name a folder with room)")
    if (code := start_compiling(CompiledFor("float16"), progress)) is not None:
        code.go_on()
        code.wait(*STAGES)
        code.close()
    warm_up("float16", progress if code is None else lambda _: None)  # what the children could not
    warm_up("float32", lambda text: progress(f"for float32 models: {text}"))


# ------------------------------------------------------------------ in the child


def serve() -> None:
    """Compile the stages that the parent names."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    gc.freeze()
    gc.set_threshold(COLLECT_AT)
    answer_messages(_make_answer)


def _make_answer(setup: Message) -> Callable[[Message], Message]:
    code = CompiledFor(**setup)

    def answer(message: Message) -> Message:
        name = message["stage"]
        if name not in PLAIN and hasattr(os, "nice"):
            with contextlib.suppress(OSError):
                os.nice(NICE)
        STAGES[name](code)
        return {}

    return answer


def _end_with_parent(parent: int) -> None:
    """End this process if its parent has ended, in the middle of a function."""
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
