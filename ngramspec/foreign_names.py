"""What llama.cpp, vLLM and transformers call things, and what to write here instead: for the errors of wrong calls and commands.

A name that is not known here enters, the text of an error leaves. Nothing is accepted under a foreign name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches

_GRAMMAR = "grammar=Grammar.json_schema(schema), or another of Grammar's forms"
_OPTIONS = {
    "model_path": "the model as the first argument: Engine('model.gguf')",
    "n_ctx": "max_model_len",
    "n_batch": "max_rows",
    "n_ubatch": "max_rows",
    "n_threads": "threads",
    "n_threads_batch": "threads",
    "n_gpu_layers": "device='cuda' (a model is on one device)",
    "n_seq_max": "max_seqs",
    "chat_format": "nothing: the model's own chat template is used",
    "draft_model": "alone=Drafter or drafters=[…], see docs/drafters.md; drafts need no second model",
    "speculative_config": "speculation, spec_length and spec_rows, or drafters=[…]",
    "type_k": "kv_dtype",
    "type_v": "kv_dtype",
    "verbose": "logging.getLogger('ngramspec').setLevel(…)",
    "max_num_seqs": "max_seqs",
    "max_num_batched_tokens": "max_rows",
    "enable_prefix_caching": "prefix_cache",
    "quantization": "quantize, or a file that is quantised already",
    "kv_cache_dtype": "kv_dtype",
    "torch_dtype": "dtype",
    "load_in_8bit": "quantize='q8_0'",
    "trust_remote_code": "nothing: a model's own code is never run",
    "tensor_parallel_size": "nothing: an engine runs on one device",
    "device_map": "device",
    "seed": "seed with each prompt: engine.complete(prompt, seed=1)",
}
_PARAMETERS = {
    "n_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "max_completion_tokens": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "top_logprobs": "logprobs",
    "n_probs": "logprobs",
    "num_return_sequences": "n",
    "do_sample": "temperature above 0",
    "num_beams": "engine.beam_search(prompt, width)",
    "eos_token_id": "stop_token_ids",
    "stop_strings": "stop",
    "sampling_params": "params=SamplingParams(…), or its fields as keywords: max_tokens=64",
    "generation_config": "params=SamplingParams(…), or its fields as keywords: max_tokens=64",
    "prompts": "a list of prompts as the first argument",
    "prompt_token_ids": "a list of ids as the first argument",
    "stream": "engine.stream(…), stream_chat or stream_infill; astream… for asyncio",
    "suffix": "engine.infill(prefix, suffix)",
    "echo": "prompt_logprobs for the prompt's probabilities; the text is yours",
    "response_format": _GRAMMAR,
    "structured_outputs": _GRAMMAR,
    "guided_decoding": _GRAMMAR,
    "json_schema": _GRAMMAR,
    "logits_processor": "grammar, logit_bias, bad_words or allowed_token_ids",
    "mirostat_mode": "min_p or top_p",
    "tfs_z": "min_p",
    "typical_p": "min_p or top_p",
    "functions": "tools",
    "function_call": "tool_choice",
    "use_tqdm": "nothing: no progress is shown",
    "lora_request": "nothing: adapters are not supported; merge them into the model",
}
_METHODS = {
    "generate": "complete(prompt, max_tokens=64), or stream(prompt)",
    "create_completion": "complete(prompt, max_tokens=64), or stream(prompt)",
    "create_chat_completion": "chat(messages), or stream_chat(messages)",
    "apply_chat_template": "chat(messages)",
    "chat_completion": "chat(messages)",
    "decode": "detokenize(ids)",
    "get_tokenizer": "tokenizer, tokenize(text) and detokenize(ids)",
    "create_embedding": None,
    "embed": None,
    "encode_prompt": "encode(prompt)",
    "n_ctx": "max_model_len",
    "n_vocab": "vocab_size",
    "token_eos": "eos_token_ids",
    "token_bos": "tokenizer.bos_token_id",
    "from_pretrained": "Engine('org/name') or Engine('file.gguf')",
    "reset": "nothing: every request begins anew",
    "shutdown": "close()",
    "unload": "close()",
}
# Options of llama-server, llama-cli and `vllm serve`
FLAGS = {
    "-c --ctx-size": "--max-model-len",
    "-ngl --gpu-layers --n-gpu-layers": "--device cuda (a model is on one device)",
    "-np --parallel --max-num-seqs": "--max-seqs",
    "-t": "--threads",
    "-tb --threads-batch": "--threads, which counts for prompts too",
    "-b --batch-size -ub --ubatch-size --max-num-batched-tokens": "nothing: the rows of a pass are chosen from measured times",
    "-p --prompt": "the prompt as the argument: ngramspec complete 'def f(n):'",
    "-n --n-predict --predict": "--max-tokens of `complete`, or --sampling max_tokens=N of `serve`",
    "--temp": "--temperature of `complete`, or --sampling temperature=F of `serve`",
    "--repeat-penalty": "--repetition-penalty of `complete`, or --sampling repetition_penalty=F of `serve`",
    "-md --model-draft --spec-draft-model": "--draft-model; drafts need no second model",
    "--draft --draft-n --draft-max --spec-draft-n-max": "--spec-length",
    "--speculative-config --spec-type": "nothing: drafts are on; --drafter adds a drafter, --no-spec switches drafts off",
    "--served-model-name": "--alias",
    "--hf-file -hff": "--model org/name/file.gguf",
    "-ctk --cache-type-k -ctv --cache-type-v --kv-cache-dtype": "--kv-dtype",
    "--quantization": "--quantize, or a file that is quantised already",
    "--enable-prefix-caching --cache-reuse --cache-prompt": "nothing: the prefix cache is on; --prefix-cache FOLDER keeps it on disk",
    "--jinja -fa --flash-attn --mlock --no-mmap --enable-auto-tool-choice --tool-call-parser --reasoning-parser": "nothing: leave it out",
    "--trust-remote-code": "nothing: a model's own code is never run",
    "-tp --tensor-parallel-size -ts --tensor-split": "nothing: a model is on one device",
    "--lora --enable-lora": "nothing: adapters are not supported; merge them into the model",
    "--embedding --embeddings": "nothing: the server makes no embeddings",
    "-mm --mmproj": "nothing: the text part of a model runs without it",
}


def explain_import(name: str) -> str:
    """Return the error of an import of a foreign engine's class."""
    return f"ngramspec has no {name}: from ngramspec import Engine, then Engine(model).complete(prompt, max_tokens=64)"


def explain_flag(flag: str) -> str | None:
    """Return what to write instead of another program's option; None if no other program is known to have it."""
    return next((ours for names, ours in FLAGS.items() if flag in names.split()), None)


def explain_options(unknown: Iterable[str], known: Collection[str]) -> str:
    """Return the error of an engine's unknown options."""
    return _explain_unknown("Engine takes no", unknown, _OPTIONS, known, "EngineConfig")


def explain_parameters(unknown: Iterable[str], known: Collection[str]) -> str:
    """Return the error of a prompt's unknown keywords."""
    return _explain_unknown("a prompt takes no", unknown, _PARAMETERS, known, "SamplingParams")


def explain_method(name: str, known: Collection[str]) -> str:
    """Return the error of an engine's unknown attribute."""
    if name in _METHODS and _METHODS[name] is None:
        return f"Engine has no {name!r}: it makes no embeddings"
    return _explain_unknown("Engine has no", [name], {name: ours for name, ours in _METHODS.items() if ours}, known, "Engine")


def _explain_unknown(what: str, unknown: Iterable[str], foreign: dict[str, str], known: Collection[str], where: str) -> str:
    told = []
    for name in unknown:
        near = [] if name in foreign else get_close_matches(name, known, 1)
        ours = foreign.get(name) or (near[0] if near else f"what help(ngramspec.{where}) lists")
        told.append(f"{name!r}; use {ours}")
    return f"{what} {', no '.join(told)}"
