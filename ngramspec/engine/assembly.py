"""What an engine is made of: a model's name and settings enter, a model bound to its device, with what passes of it cost, leaves.

The one module that knows which devices there are. Knows nothing of requests.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from ngramspec.backends.base import Runner
from ngramspec.backends.cpu.cores import count_cores
from ngramspec.backends.cpu.llama_runner import CpuOptions, LlamaRunner, count_packed_bytes
from ngramspec.backends.cpu.weight_map import WeightMap
from ngramspec.backends.cpu.weight_map_check import check_weight_map
from ngramspec.config import EngineConfig
from ngramspec.datastore import code_cache
from ngramspec.datastore.cache_dir import cache_dir, expand_home
from ngramspec.datastore.garbage import pause_collector
from ngramspec.datastore.partial_files import remove_stale
from ngramspec.engine import background_compiler
from ngramspec.engine.background_compiler import Progress
from ngramspec.errors import InvalidInputError, MissingPackageError
from ngramspec.kv_cache.prefix_folder import PrefixFolder, PrefixStore, make_root
from ngramspec.models import crashes, start_cache
from ngramspec.models.memory import available_memory, check_memory
from ngramspec.models.names import is_gguf_name, locate_folder, locate_gguf, resolve
from ngramspec.models.tensor_source import TensorSource, to_q8_source
from ngramspec.outputs import BLOCK
from ngramspec.sampling.batch import Span, pack
from ngramspec.speculative import proposer
from ngramspec.speculative.budget.cost_model import CostModel
from ngramspec.speculative.drafter import Drafter, DraftOptions, Speculator
from ngramspec.speculative.features import MAX_DRAFTERS
from ngramspec.speculative.single import SingleDrafter
from ngramspec.speculative.syntax import SyntaxTable, open_syntax
from ngramspec.speculative.trained.head_drafter import HeadDrafter
from ngramspec.tokenizer.encode import Encoding

if TYPE_CHECKING:  # a start that has all it needs waits neither for torch nor for transformers' models
    from transformers import PreTrainedModel

    from ngramspec.models.loader import LoadedModel

log = logging.getLogger(__name__)

_TRIAL = b"trial"  # hash of the block by which a model is told from others: no request's has this length
CPU_ROWS = 128  # of a pass: with more a prompt takes as long (benchmarks/NOTES.md), and what comes or is cancelled meanwhile waits longer
STARTS_KEPT_S = 90 * 86400.0  # for which what a start learned is kept: each version, model and setting has its own, of up to 3 MB
LEARNED = 500  # steps after which the curve that they taught is kept for later starts, beside the one that was measured


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """The device that an engine computes on, and how."""

    device: str
    dtype: str
    threads: int
    max_rows: int
    exact: bool
    """Products with rows that do not depend on each other; on the CPU, with weights kept as they came."""
    precision: str
    """`int8` or `float32` on the CPU; the name of the dtype elsewhere."""


@dataclass(frozen=True, slots=True)
class BoundModel:
    """A model on its device, ready to run."""

    name: str
    architecture: str
    """transformers' `model_type`."""
    tokenizer: Any
    """transformers' own kind, or None."""
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    runner: Runner
    cost: CostModel
    encoding: Encoding
    syntax: SyntaxTable | None
    """The syntax table in the model's tokens, if it is drafted from."""
    save_start_record: Callable[[], None]
    """Writes what this start has learned of the cost of passes to the start cache, for later starts."""
    code: background_compiler.BackgroundCompiler | None = None
    """Compiles what drafting and native steps need; None if that has been compiled."""


def check_device(config: EngineConfig) -> DeviceConfig:
    """Return the device that the settings name.

    Raises InvalidInputError for a device that is not there or a setting that it does not have, MissingPackageError for what it needs.
    """
    kind, _, number = config.device.partition(":")
    if kind not in ("cpu", "cuda") or (number and (kind == "cpu" or not number.isdigit())):
        raise InvalidInputError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {config.device!r}")
    device = kind
    if kind == "cuda":
        import torch

        device, n_devices = f"cuda:{number or 0}", torch.cuda.device_count()
        if int(number or 0) >= n_devices:
            there = f"{n_devices or 'no'} CUDA device{'s' * (n_devices != 1)}"
            raise InvalidInputError(f"there is no device {device!r}: torch {torch.__version__} sees {there}")
        if importlib.util.find_spec("triton") is None:
            raise MissingPackageError(f"device {device!r} needs Triton, which is not installed: pip install 'ngramspec[cuda]'")
    accepted = {"cpu": ("float32",), "cuda": ("bfloat16", "float16", "float32")}[kind]
    dtype = accepted[0] if config.dtype == "auto" else config.dtype
    if dtype not in accepted:
        raise InvalidInputError(f"dtype on {kind} must be 'auto' or {' or '.join(map(repr, accepted))}, got {dtype!r}")
    other = {"cpu": "unpacked", "cuda": "vendor"}[kind]
    if config.linears not in ("exact", other):
        raise InvalidInputError(f"linears on {kind} must be 'exact' or {other!r}, got {config.linears!r}")
    max_rows = config.max_rows or max({"cpu": CPU_ROWS, "cuda": 2048}[kind], config.max_seqs + 64)
    if kind == "cuda" and (config.precision, config.kv_dtype, config.quantize) != ("auto", "auto", "none"):
        raise InvalidInputError("precision, kv_dtype and quantize are settings of the CPU; on CUDA, dtype says both")
    if kind == "cpu" and config.keep_blocks != "auto":
        raise InvalidInputError("keep_blocks is a setting of CUDA devices; on the CPU weights stay in their blocks")
    exact = config.linears == "exact"
    threads = config.threads or count_cores()
    return DeviceConfig(device, dtype, threads, max_rows, exact, config.precision if exact else "float32")


def bind(
    model: str | PreTrainedModel,
    tokenizer: Any,
    config: EngineConfig,
    device: DeviceConfig,
    progress: Progress,
    needs_modules: bool,
    on_compiling: Callable[[background_compiler.BackgroundCompiler], None],
    check_stores: Callable[[Any, str], None],
) -> BoundModel:
    """Load a model, bind it and measure it, in the thread that is to run it.

    `needs_modules`: its runner must have transformers' modules, because drafters may read them. `on_compiling` is called with what compiles
    beside, if anything does: once somebody closes that, loading ends at the next `progress` that raises. `check_stores` is called with the
    model's tokenizer and name before its weights are packed, and raises what the caller wants to end loading with.
    Raises what `models.loader.load_model` and the device's runner raise (see `errors`).
    """

    def clear_caches() -> None:
        log.warning("an earlier start crashed: compiling everything anew")
        code_cache.clear_all()
        for folder in ("code", "starts"):
            shutil.rmtree(cache_dir() / folder, ignore_errors=True)

    for folder in ("code", "starts"):
        remove_stale(cache_dir() / folder)
    remove_stale(cache_dir() / "starts", "[!.]*", STARTS_KEPT_S)
    with crashes.watch_start(cache_dir() / "crashes", clear_caches), pause_collector():
        numba.set_num_threads(min(device.threads, numba.config.NUMBA_NUM_THREADS))
        code = background_compiler.start_compiling(_guess_compiled(model, config, device), progress) if device.device == "cpu" else None
        try:
            if code is not None:
                on_compiling(code)
            return _bind(_Start(model, tokenizer, config, device, progress, code, check_stores), needs_modules)
        except BaseException:
            if code is not None:
                code.close()
            raise


@dataclass(frozen=True, slots=True)
class _Start:
    """The arguments of `bind`, and what compiles beside it."""

    model: str | PreTrainedModel
    tokenizer: Any
    config: EngineConfig
    device: DeviceConfig
    progress: Progress
    code: background_compiler.BackgroundCompiler | None
    """Compiles beside the start; None if that is not needed or not possible."""
    check_stores: Callable[[Any, str], None]
    folder: Path | None = None
    """The folder that `model` names on the hub, which is asked once; None for any other name."""

    def wait_for_code(self, *stages: str) -> None:
        """Wait until these stages of `background_compiler` have been compiled."""
        if self.code is not None:
            self.code.wait(*stages)
            if self.code.is_closed:
                self.progress("compiling")  # raises if the caller was interrupted

    def limit_length(self, trained: int) -> int:
        """Return the longest text for a model that was trained for texts of `trained` tokens. Raises InvalidInputError."""
        wanted = self.config.max_model_len
        if wanted is not None and wanted > trained:
            raise InvalidInputError(f"max_model_len must be 2 to {trained}, what the model was trained for, got {wanted}")
        return wanted or trained


def _bind(start: _Start, needs_modules: bool) -> BoundModel:
    """Bind a model while the start's `code`, or a thread of this process, compiles what steps need besides it."""
    config, device, code = start.config, start.device, start.code
    warmer = threading.Thread(target=background_compiler.warm_up, daemon=True)
    if code is None:
        warmer.start()
    kept, found = None, None
    if isinstance(start.model, str):
        start = replace(start, model=locate_gguf(start.model, start.progress))
    if isinstance(start.model, str) and device.device == "cpu" and device.exact:  # a later start keeps weights in their blocks
        settings = (device.precision, config.kv_dtype, config.quantize, device.threads)
        located = locate_folder(start.model, start.progress)
        start = replace(start, folder=Path(located) if located != start.model else None)
        kept = start_cache.find_start_record(located, settings, cache_dir())
        found = kept.read() if kept else None
    restarted = _restart(start, kept, found) if found and kept and not needs_modules else None
    runner, about = restarted or _load(start)
    runner.tokenizer, runner.max_model_len = about.tokenizer, min(start.limit_length(about.trained), runner.pool.n_positions)
    if code is None:
        warmer.join()
    start.wait_for_code(*background_compiler.PLAIN)
    row_counts = [rows for rows in runner.cost_rows if 2 * rows <= min(runner.pool.n_positions, runner.pool.max_blocks * BLOCK)]
    times, taught = ((found or {}).get(key, []) for key in ("measured_ms", "learned"))
    if not times or len(times) > len(row_counts):
        start.progress("measuring what a pass costs")
        times, taught = runner.measure(row_counts), []
    cost = CostModel(
        row_counts[: len(times)], times, max_rows=2 * max(device.max_rows, config.spec_rows), learned=taught,
        convex=not runner.has_experts,
    )  # fmt: skip

    def save_start_record() -> None:
        if kept and isinstance(runner, LlamaRunner) and runner.exactness == "bitwise" and (weight_map := runner.weight_map) is not None:
            learned = cost.learned if cost.n_seen >= LEARNED else taught
            recipe = found["recipe"] if found and restarted else weight_map.to_json()
            document = {"recipe": recipe, "measured_ms": times, "learned": learned}
            if document != found:
                kept.write(document)

    save_start_record()
    if code is not None:
        code.go_on()
    log.info("%s: exactness %s, %d tokens of KV", about.name, runner.exactness, runner.pool.n_positions)
    encoding, syntax = Encoding(about.tokenizer, runner.vocab_size), None
    if config.speculation and config.syntax:
        cache = kept.path.with_suffix(".syntax") if kept and start.tokenizer is None else None
        syntax = open_syntax(getattr(about.tokenizer, "backend_tokenizer", None), runner.vocab_size, cache)
    return BoundModel(
        about.name, about.architecture, about.tokenizer, about.eos_token_ids, runner.max_model_len, runner, cost, encoding, syntax,
        save_start_record, code,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _ModelInfo:
    name: str
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    trained: int
    """Longest text that the model was trained for."""
    architecture: str
    """transformers' `model_type`."""


def _restart(start: _Start, kept: start_cache.StartRecord, found: dict[str, Any]) -> tuple[LlamaRunner, _ModelInfo] | None:
    """Run a model that an earlier start has checked, from its files and what was kept; None if that is not enough."""
    name = kept.file.name if kept.file.path.is_file() else str(start.model)  # as `open_model` names them
    options: CpuOptions | None = None

    def take_memory(opened: start_cache.CachedModel) -> None:
        nonlocal options
        n_bytes = count_packed_bytes(_choose_source(start, opened), plain=False)
        check_memory(n_bytes, "cpu", name)
        options = _make_cpu_options(start, start.limit_length(opened.trained), n_bytes)
        options.arena.reserve_pages(n_bytes)

    opened = start_cache.reopen_model(kept.file, start.tokenizer, cache_dir(), take_memory)
    if opened is None or options is None:
        return None
    source, longest = _choose_source(start, opened), start.limit_length(opened.trained)
    try:
        weight_map = WeightMap.from_json(found["recipe"])
        check_weight_map(weight_map, source)
    except (KeyError, TypeError, ValueError):
        return None
    if not weight_map.suits_length(longest):
        return None
    start.check_stores(opened.tokenizer, name)

    def make_model() -> PreTrainedModel:
        from ngramspec.models.loader import open_model

        return open_model(str(kept.file.path)).model

    start.wait_for_code(*background_compiler.LOADING)
    runner = LlamaRunner(weight_map, options, source, make_model)
    return runner, _ModelInfo(name, opened.tokenizer, opened.eos_token_ids, opened.trained, str(opened.config.get("model_type", "")))


def _choose_source(start: _Start, opened: start_cache.CachedModel) -> TensorSource:
    return to_q8_source(opened.source) if start.config.quantize == "q8_0" else opened.source


def _load(start: _Start) -> tuple[Runner, _ModelInfo]:
    """Load a model as transformers' modules, which its runner then replaces."""
    import torch

    from ngramspec.models.loader import LoadedModel, eos_token_ids, load_model, open_model, silence_transformers

    model, tokenizer, config, device = start.model, start.tokenizer, start.config, start.device
    torch.set_num_threads(device.threads)
    if device.device != "cpu":
        torch.cuda.set_device(device.device)  # of this thread: Triton launches on the current one, and unpacks weights before all else
    loaded: LoadedModel
    if isinstance(model, str) and device.device == "cpu":
        quantize = None if config.quantize == "none" else config.quantize
        loaded = open_model(model, tokenizer=tokenizer, progress=start.progress, quantize=quantize, folder=start.folder)
    elif isinstance(model, str):
        from ngramspec.backends.cuda.device import free_bytes
        from ngramspec.backends.cuda.packed import make_packed_form  # imports Triton

        dtype = getattr(torch, device.dtype)
        keep = make_packed_form(config.keep_blocks, free_bytes(torch.device(device.device), config.gpu_memory_utilization))
        loaded = load_model(model, dtype=dtype, device=device.device, tokenizer=tokenizer, progress=start.progress, keep=keep)
    else:
        moved: PreTrainedModel = model.to(torch.device(device.device))  # type: ignore[arg-type]  # as torch declares it
        loaded = LoadedModel(moved, tokenizer, moved.config.name_or_path or type(moved).__name__, eos_token_ids(moved, tokenizer))
    start.check_stores(loaded.tokenizer, loaded.name)
    trained = int(getattr(loaded.model.config.get_text_config(), "max_position_embeddings", 0) or 4096)
    info = _ModelInfo(loaded.name, loaded.tokenizer, loaded.eos_token_ids, trained, loaded.model.config.model_type)
    with silence_transformers():  # the check makes models of fewer tokens, of which transformers says that ids lie beyond them
        return _make_runner(start, loaded, start.limit_length(trained)), info


def _make_runner(start: _Start, loaded: LoadedModel, longest: int) -> Runner:
    """Make the runner of a loaded model, for texts of up to `longest` tokens."""
    config, device = start.config, start.device
    if device.device == "cpu":
        from ngramspec.backends.cpu.runner import CpuRunner
        from ngramspec.models.loader import OpenModel
        from ngramspec.models.parameters import ParamsSource

        source = loaded.source if isinstance(loaded, OpenModel) else ParamsSource(loaded.model)
        n_bytes = count_packed_bytes(source, plain=not device.exact)
        check_memory(n_bytes, "cpu", loaded.name)
        cpu_options = _make_cpu_options(start, longest, n_bytes)
        start.wait_for_code(*background_compiler.LOADING)
        return CpuRunner(loaded.model, cpu_options, source)
    from ngramspec.backends.cuda.cuda_runner import CudaOptions, CudaRunner  # imports Triton

    options = CudaOptions(
        max_len=_add_draft_room(longest, config),
        longest=longest,
        max_seqs=config.max_seqs,
        max_rows=device.max_rows,
        kv_bytes=config.kv_memory,
        max_depth=config.spec_length + 1,
        memory_utilization=config.gpu_memory_utilization,
        exact=device.exact,
        graphs=config.graphs,
        progress=start.progress,
    )
    return CudaRunner(loaded.model, options)


def _add_draft_room(longest: int, config: EngineConfig) -> int:
    """Return how many positions a sequence may need: draft nodes stand after the last token of the longest text, too."""
    return longest + config.spec_rows + 1


def _make_cpu_options(start: _Start, longest: int, n_weight_bytes: int) -> CpuOptions:
    """Return the options of a runner on the CPU, for texts of up to `longest` tokens and weights that are still to be put into memory."""
    config = start.config
    return CpuOptions(
        max_len=_add_draft_room(longest, config),
        longest=longest,
        max_seqs=config.max_seqs,
        max_rows=start.device.max_rows,
        kv_bytes=config.kv_memory if config.kv_memory is not None else _default_kv_bytes(n_weight_bytes),
        precision=start.device.precision,
        kv_dtype=config.kv_dtype,
        plain=not start.device.exact,
        code=cache_dir() / "code",
        progress=start.progress,
        wait_for_code=partial(start.wait_for_code, *background_compiler.PLAIN),
        with_head=config.speculation and config.mtp,
    )


def make_prefix_root(config: EngineConfig) -> None:
    """Make the folder of the prefix cache, before a model is loaded. Raises InvalidInputError if it cannot be made."""
    if config.prefix_cache_path is not None and config.prefix_cache:
        make_root(expand_home(config.prefix_cache_path))


def open_prefix_store(config: EngineConfig, runner: Runner) -> PrefixStore | None:
    """Open the folder that keeps blocks of the prefix cache; None if there is to be none. In the thread that runs the model.

    Blocks are kept by what computes them: the digest of a trial block's keys and values, and of the state after it, stands for weights,
    precision and arithmetic, `describe_model` for what only later blocks show, such as a window. Raises InvalidInputError if the folder
    cannot be used.
    """
    if config.prefix_cache_path is None or not config.prefix_cache:
        return None
    pool, slot = runner.pool, runner.reserve_free_slot(BLOCK)
    tokens = (np.arange(BLOCK) * 7919 % runner.vocab_size).astype(np.int32)
    runner.forward(pack([Span(slot, tokens, 0, logits=0)], pool, runner.rows_per_item)).wait()
    block = pool.read_block(int(pool.tables[slot, 0]))
    if runner.is_recurrent:
        pool.register(slot, [_TRIAL])
    pool.release(slot)
    state = pool.read_state(_TRIAL) or b""
    model = hashlib.sha256(block + state + (runner.describe_model() + start_cache.digest_code()).encode()).hexdigest()[:32]
    folder = PrefixFolder(expand_home(config.prefix_cache_path), model, len(block), len(state), config.prefix_cache_size)
    return PrefixStore(folder, pool)


def make_speculator(config: EngineConfig, bound: BoundModel, drafters: Sequence[Drafter], alone: Drafter | None) -> Speculator:
    """Make what an engine with these settings drafts with."""
    if not config.speculation:
        return Speculator()
    runner = bound.runner
    vocab_size, spec_rows = runner.vocab_size, min(config.spec_rows, runner.max_nodes)
    if alone is not None:
        draws = config.acceptance == "rejection"
        return SingleDrafter(alone, vocab_size=vocab_size, spec_length=config.spec_length, spec_rows=spec_rows, draws=draws)
    if runner.head is not None and len(drafters) < MAX_DRAFTERS - 1:
        drafters = [*drafters, HeadDrafter(runner.head, float(bound.cost.table[1]))]
    return proposer.TreeProposer(
        DraftOptions(
            vocab_size=vocab_size,
            max_order=config.max_order,
            history=config.history,
            spec_length=config.spec_length,
            spec_rows=spec_rows,
            max_seqs=config.max_seqs,
            answers=config.answers,
            recycle=config.recycle,
            similar=config.similar,
        ),
        drafters=drafters,
        syntax=bound.syntax,
    )


def _guess_compiled(model: str | PreTrainedModel, config: EngineConfig, device: DeviceConfig) -> background_compiler.CompiledFor:
    """Guess what code is needed before the model's file has been read: keys and values are float16 beside quantised weights."""
    is_gguf = isinstance(model, str) and is_gguf_name(model)
    int8 = (is_gguf or config.quantize == "q8_0") and device.precision != "float32"
    kv_dtype = config.kv_dtype if config.kv_dtype != "auto" else "float16" if int8 else "float32"
    file = resolve(model) if isinstance(model, str) and is_gguf else None
    is_kept = isinstance(file, Path) and file.is_file() and device.exact and config.quantize == "none"
    return background_compiler.CompiledFor(kv_dtype, str(file) if is_kept else "", int8)


def _default_kv_bytes(n_weight_bytes: int) -> int:
    """Return a quarter of the memory that weights leave free, 4 GiB at most; its pages are taken as they are first used."""
    free = available_memory()
    return min(4 << 30, max(0, free - n_weight_bytes) // 4) if free is not None else 1 << 30
