"""Find and open a model: from a name to a model without weights, the source of its weights, and its tokenizer.

A name is a folder, a `.gguf` file, a hub repository or the shorthand `smollm2`. The kind of model, its config and the directory of its
weights are checked before a weight is read; `load_model` also reads them all. A model's own code is never run and nothing is unpickled.
`random:NAME` is a model of that shape without a file (`random_weights`). Replacing its attention and linear layers is left to the runner.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto import modeling_auto

from ngramspec.datastore.cache_dir import cache_dir as default_cache_dir
from ngramspec.errors import (
    InvalidInputError,
    ModelNotFoundError,
    OutOfMemoryError,
    RemoteCodeError,
    TokenizerError,
    UnsupportedModelError,
)
from ngramspec.models import (
    awq_gptq,
    folder_cache,
    gguf,
    gguf_hf_mapping,
    head_parameters,
    header_limits,
    latent_weights,
    qwen3_next,
    random_weights,
    refusals,
    safetensors,
    start_cache,
    vocabulary,
)
from ngramspec.models.gated_heads import add_gates
from ngramspec.models.memory import check_memory
from ngramspec.models.names import HUB_MODEL, HUB_TOKENIZER, download, resolve
from ngramspec.models.parameters import ParamsSource, fill
from ngramspec.models.random_weights import empty_model, is_decoder, make_config, parameter_bytes
from ngramspec.models.shapes import PREFIX as RANDOM
from ngramspec.models.shapes import read_shape
from ngramspec.models.start_cache import Progress, get_derived_folder, remove_converted
from ngramspec.models.tensor_source import TensorSource, to_q8_source
from ngramspec.tokenizer.deferred import DeferredTokenizer
from ngramspec.tokenizer.encode import get_added_tokens

DEQUANTISED = ("fp8", "mxfp4")  # Quantisation methods that transformers dequantises while it loads, without another package.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json")


@dataclass(slots=True)
class LoadedModel:
    """A model in evaluation mode, without gradients, with what is needed to use it."""

    model: PreTrainedModel
    tokenizer: Any
    """transformers' PreTrainedTokenizerBase; None: there is none, and prompts are token ids."""
    name: str
    eos_token_ids: tuple[int, ...]
    """Ids that end a text, by the model's files and the names of its control tokens (`vocabulary.end_token_ids`)."""


@dataclass(slots=True)
class OpenModel(LoadedModel):
    """A model before its weights are read: parameters are on the "meta" device, buffers are real.

    Models whose weights are in no file in their final form (random ones, those that transformers converts) have them already.
    """

    source: TensorSource
    """Source of the parameters' weights."""
    folder: Path | None = None
    """The folder with safetensors that they are in."""


def open_model(
    spec: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress | None = None,
    cache_dir: Path | None = None,
    quantize: str | None = None,
    folder: Path | None = None,
) -> OpenModel:
    """Open the model that `spec` names (see `names.ACCEPTED`), with `tokenizer` or else its own; random weights have none of their own.

    What is derived from a GGUF file or a folder (config, tokenizer) is cached in `cache_dir` (default: `datastore.cache_dir`). `quantize`,
    None or "q8_0": quantise matrices that are not in quant blocks to 8-bit blocks. `folder`: where a name on the hub has been found to lie.

    Raises ModelNotFoundError, UnsupportedModelError, RemoteCodeError, TokenizerError or OutOfMemoryError; InvalidInputError for `quantize`.
    """
    if quantize not in (None, "q8_0"):
        raise InvalidInputError(f"quantize must be None or 'q8_0', got {quantize!r}")
    progress, cache_dir = progress or _no_progress, cache_dir or default_cache_dir()
    opened = _open(spec, torch.float32, "cpu", tokenizer, progress, cache_dir, folder)
    if tokenizer is None and opened.folder is not None:
        start_cache.keep_folder(opened.folder, partial(_write_folder, opened), cache_dir)
    if quantize:
        opened.source = to_q8_source(opened.source)
    return opened


def _write_folder(opened: OpenModel, folder: Path) -> None:
    """Write what a later start needs of a folder's model. Raises as `folder_cache.write_folder` does."""
    source = add_gates(latent_weights.add_heads(opened.source, opened.model), opened.model)
    text = opened.model.config.get_text_config()
    config = {"model_type": opened.model.config.model_type, "max_position_embeddings": getattr(text, "max_position_embeddings", None)}
    folder_cache.write_folder(folder, config, source, opened.tokenizer, opened.eos_token_ids)


class PackedForm(NamedTuple):
    """A way to keep weights other than as tensors of a dtype."""

    saved_bytes: Callable[[PreTrainedModel, TensorSource, torch.dtype], int]
    """Returns by how many bytes the weights of an empty model get smaller than as tensors."""
    replace: Callable[[PreTrainedModel, TensorSource, torch.dtype, str], None]
    """Gives the empty model modules that keep their weights, on a device."""


def load_model(
    spec: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress | None = None,
    cache_dir: Path | None = None,
    keep: PackedForm | None = None,
) -> LoadedModel:
    """Load a model with all weights in a dtype on a device, except those that `keep` keeps otherwise. Raises as `open_model` does."""
    progress = progress or _no_progress
    opened = _open(spec, dtype, device, tokenizer, progress, cache_dir or default_cache_dir())
    model = opened.model
    if any(parameter.is_meta for parameter in model.parameters()):
        needed = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
        check_memory(needed - (keep.saved_bytes(model, opened.source, dtype) if keep else 0), device, spec)
        progress(f"loading {spec}: weights")
        with _translate_memory_errors(spec, device):
            if keep:
                keep.replace(model, opened.source, dtype, device)
            fill(model, opened.source, dtype, device)
    return LoadedModel(model, opened.tokenizer, opened.name, opened.eos_token_ids)


def load_tokenizer(spec: str, *, cache_dir: Path | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the model that `spec` names, without its weights. Raises as `open_model` does."""
    with silence_transformers(), contextlib.ExitStack() as stack:
        if spec.startswith(RANDOM):
            raise TokenizerError(f"{spec}: a model of random weights has no tokenizer; accepted: another model's, as a tokenizer= argument")
        path = resolve(spec)
        if isinstance(path, str):
            path = download(path, HUB_TOKENIZER)
        if path.is_file():
            path = get_derived_folder(gguf.read(path), gguf_hf_mapping.derive, cache_dir or default_cache_dir(), _no_progress, stack)
        header_limits.check_files(path, spec)
        if (path / "config.json").is_file():
            _check_dtype(header_limits.read_object(path / "config.json", spec), spec)
        tokenizer = _read_tokenizer(path, spec)
        return tokenizer.whole if isinstance(tokenizer, DeferredTokenizer) else tokenizer


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Return the ids that end a text of a model that came from no GGUF file.

    These are the ids that generation config, config and tokenizer state, and control tokens whose names say so, as in llama.cpp. Plain
    words of the vocabulary end no text here: Qwen's </s> is HTML to transformers. Raises UnsupportedModelError for what is no id.
    """
    stated: set[int] = set()
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        found = getattr(holder, "eos_token_id", None)
        ids = found if isinstance(found, list | tuple) else [] if found is None else [found]
        if not all(type(each) is int for each in ids):
            told = f"{found!r:.80} by its {type(holder).__name__}"
            raise UnsupportedModelError(f"{type(model).__name__}: eos_token_id is {told}; accepted: a token id, a list of them, or null")
        stated.update(each for each in ids if 0 <= each < model.config.get_text_config().vocab_size)  # -1 stands for none
    added = {str(token): number for number, token in get_added_tokens(tokenizer).items()}
    return tuple(sorted(vocabulary.end_token_ids(added, stated)))


def _no_progress(message: str) -> None:
    pass


def _open(
    spec: str, dtype: torch.dtype, device: str, tokenizer: Any, progress: Progress, cache_dir: Path, folder: Path | None = None
) -> OpenModel:
    """Open a model; `dtype` and `device` apply to models that have weights already."""
    with silence_transformers(), contextlib.ExitStack() as stack:
        if spec.startswith(RANDOM):
            model = _random_model(spec, dtype, device, progress)
            return OpenModel(model, tokenizer, spec, eos_token_ids(model, tokenizer), ParamsSource(model))
        path = folder or resolve(spec)
        if isinstance(path, str):
            path = download(path, HUB_MODEL, progress)
        file = gguf.read(path) if path.is_file() else None
        folder = path
        if file:
            remove_converted(cache_dir, progress)
            folder = get_derived_folder(file, gguf_hf_mapping.derive, cache_dir, progress, stack)
        header_limits.check_files(folder, spec)
        config = header_limits.read_object(folder / "config.json", spec)
        _check_dtype(config, spec)
        config, is_part = _select_text_part(config, spec, progress)
        _check_kind(config, spec)
        tensors = safetensors.read(folder, spec) if file is None else {}
        of_head = head_parameters.select_tensors(tensors)
        if is_part:
            tensors = safetensors.select_text_part(tensors)
            config["tie_word_embeddings"] = "lm_head.weight" not in tensors  # the whole model's config may say otherwise than its text's
        if file is None:
            header_limits.check_sizes(config, spec, [tensor.shape for tensor in tensors.values()])
        is_next = file is None and config["model_type"] == qwen3_next.MODEL_TYPE
        if is_next:
            config = qwen3_next.convert_config(config, spec)
        given, tokenizer = tokenizer, tokenizer or _read_tokenizer(folder, spec)
        source: TensorSource | None = None
        if file:
            model = empty_model(config, torch.float32)
            source = gguf_hf_mapping.find_parameters(file, folder, model)
        elif (quantised := config.pop("quantization_config", None)) is None:
            model = _make_empty_model(config, tensors)
            divided = qwen3_next.divide_projections(config, safetensors.make_lookup(tensors), spec) if is_next else ()
            source = safetensors.find_parameters(tensors, model, dict(divided))
            source = source and head_parameters.add_parameters(source, tensors, of_head, config)
        elif quantised.get("quant_method") in awq_gptq.METHODS:
            model = _make_empty_model(config, tensors)
            source = safetensors.find_parameters(tensors, model, awq_gptq.read_groups(tensors, quantised, spec))
            if source is None:
                raise UnsupportedModelError(f"{spec}: its tensors are not those of {type(model).__name__} with {quantised['quant_method']}")
        if source is None:
            check_memory(_weight_bytes(tensors, quantised is not None, dtype), device, spec)
            progress(f"loading {spec}: weights")
            model = _read_weights(folder, dtype, device, spec, config if is_part else None)
            source = ParamsSource(model)
        elif (folder / "generation_config.json").is_file():
            model.generation_config = _read_generation_config(folder, spec)
        ends = start_cache.read_end_token_ids(folder, given) if file else eos_token_ids(model, tokenizer)
    model = model.eval().requires_grad_(False)
    return OpenModel(model, tokenizer, file.name if file else spec, ends, source, None if file else folder)


def _make_empty_model(config: dict[str, Any], tensors: dict[str, safetensors.SafetensorsEntry]) -> PreTrainedModel:
    """Return the model of a folder without weights, whose head is tied to the embedding unless the files have another one."""
    model = empty_model(config, torch.float32)
    if not safetensors.has_other_head(tensors, model):
        return model
    config["tie_word_embeddings"] = False
    return empty_model(config, torch.float32)


def _random_model(spec: str, dtype: torch.dtype, device: str, progress: Progress) -> PreTrainedModel:
    config = read_shape(spec)
    header_limits.check_sizes(config, spec)
    _check_kind(config, spec)
    model = empty_model(config, dtype)
    check_memory(parameter_bytes(model), device, spec)
    progress(f"loading {spec}: random weights")
    with _translate_memory_errors(spec, device):
        return random_weights.fill(model, device)


def _read_generation_config(folder: Path, spec: str) -> Any:
    try:
        return transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ModelNotFoundError(f"{spec}: generation_config.json cannot be read: {error}") from error


def _select_text_part(config: dict[str, Any], spec: str, progress: Progress) -> tuple[dict[str, Any], bool]:
    """Return the config of the text decoder within a model that also reads images or sound, and whether it is such a model."""
    text = config.get("text_config")
    others = [f"{name}_config" for name in ("vision", "audio") if f"{name}_config" in config]
    if not others or not isinstance(text, dict) or not is_decoder(text.get("model_type")):
        return config, False
    names = ("quantization_config", "bos_token_id", "eos_token_id", "pad_token_id")
    progress(f"{spec} also reads {'images' if 'vision_config' in others else 'sound'}; here it reads and writes text alone")
    return {name: config[name] for name in names if name in config} | text, True


def _check_dtype(config: dict[str, Any], spec: str) -> None:
    """Refuse a config, or one within it, with a type of numbers that torch lacks, for which transformers reads no tokenizer either."""
    for name, within in [("", config), *((f"{key}.", value) for key, value in config.items() if key.endswith("_config"))]:
        for key in ("dtype", "torch_dtype"):
            value = within.get(key) if isinstance(within, dict) else None
            known = isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)
            if not known and value is not None and not isinstance(value, dict):  # some have one for each part
                raise UnsupportedModelError(
                    f"{spec}: {name}{key} is {value!r:.80} by its config; accepted: float32, bfloat16, float16, ..."
                )


def _check_kind(config: dict[str, Any], spec: str) -> None:
    kind = config.get("model_type")
    native = is_decoder(kind)
    if not native and "auto_map" in config:
        raise RemoteCodeError(
            f"{spec}: model_type {kind!r} is not part of transformers {transformers.__version__} and would run code shipped with the "
            "model (trust_remote_code), which ngramspec never does; accepted: architectures that transformers has"
        )
    reason = None
    if config.get("is_encoder_decoder"):
        reason = refusals.ENCODER_DECODER.text
    elif modality := next((m for m in ("vision", "audio") if f"{m}_config" in config), None):
        reason = f"it reads {'images' if modality == 'vision' else 'sound'} as well as text"
    elif not native:
        reason = f"transformers {transformers.__version__} has no text decoder of that type"
    elif kind in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not config.get("is_decoder"):
        reason = "it is an encoder, which reads text in both directions"
    if reason:
        raise UnsupportedModelError(f"{spec}: model_type {kind!r} is not supported: {reason}; accepted: decoders of text")
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
    if method is not None and not (isinstance(quantised, dict) and method in (*DEQUANTISED, *awq_gptq.METHODS)):
        raise UnsupportedModelError(
            f"{spec}: its weights are quantised by {method!r}, which is not read here; accepted: the same model as a GGUF file, or with "
            "weights as they were trained (quantize='q8_0' makes them smaller on the CPU)"
        )


def _weight_bytes(tensors: dict[str, safetensors.SafetensorsEntry], quantised: bool, dtype: torch.dtype) -> int:
    """Return the bytes of the weights once transformers has loaded them."""
    return sum(t.n_bytes if quantised or "F" not in t.dtype else math.prod(t.shape) * dtype.itemsize for t in tensors.values())


def _read_tokenizer(folder: Path, spec: str) -> PreTrainedTokenizerBase | DeferredTokenizer:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise TokenizerError(f"{spec}: no tokenizer in {folder}; accepted: one of {', '.join(TOKENIZER_FILES)}, or a tokenizer= argument")
    try:
        if (folder / start_cache.TENSOR_NAMES).is_file():
            return DeferredTokenizer(folder)
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        # Tokenizer libraries raise bare Exceptions for damaged files.
        if "trust_remote_code" in str(error):
            raise RemoteCodeError(f"{spec}: its tokenizer is code shipped with the model, which ngramspec never runs") from error
        raise TokenizerError(f"{spec}: the tokenizer in {folder} cannot be read: {error}") from error


def _read_weights(folder: Path, dtype: torch.dtype, device: str, spec: str, text_part: dict[str, Any] | None) -> PreTrainedModel:
    """Have transformers load a model. `text_part`: config of the part of it that is wanted."""
    options: dict[str, Any] = {} if device == "cpu" else {"device_map": {"": device}}
    if text_part is not None:
        options |= {"config": make_config(text_part), "key_mapping": safetensors.TEXT_PART}
    model: PreTrainedModel
    info: dict[str, Any]
    try:
        with _translate_memory_errors(spec, device):
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # told below, by name
                **options,
            )  # type: ignore[misc]
    except (ImportError, ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        raise UnsupportedModelError(f"{spec}: transformers {transformers.__version__} cannot load it: {error}") from error
    for name, found, wanted in sorted(info["mismatched_keys"]):
        raise UnsupportedModelError(
            f"{spec}: config.json and weights disagree: {name} is {list(found)} in the files and {list(wanted)} by the config"
        )
    if missing := sorted(info["missing_keys"]):
        raise UnsupportedModelError(f"{spec}: its files lack {len(missing)} tensors of {type(model).__name__}, such as {missing[0]}")
    return model


@contextlib.contextmanager
def _translate_memory_errors(spec: str, device: str) -> Iterator[None]:
    """Turn whatever torch raises when memory runs out into an OutOfMemoryError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise OutOfMemoryError(f"{spec}: memory ran out while its weights were loaded on {device}: {error}") from error


_TRANSFORMERS = threading.RLock()


@contextlib.contextmanager
def silence_transformers() -> Iterator[None]:
    """Switch transformers' progress bars and warnings off within this context, in which one thread is at a time.

    While transformers makes a model, it switches parts of itself off for the whole process: one made meanwhile lacks its tied weights.
    """
    log = transformers.logging
    with _TRANSFORMERS:
        level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
        log.set_verbosity_error()
        log.disable_progress_bar()
        try:
            yield
        finally:
            log.set_verbosity(level)
            if bars:
                log.enable_progress_bar()
