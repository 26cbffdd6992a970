"""A peer at the other end of a pipe. Runs with the peer's own interpreter, so nothing of ngramspec is imported unless it is the peer.

Requests and answers are JSON objects, one per line, on standard input and output. The first answer, `{"version": v}`, comes when the model
is loaded. What the peer itself prints goes to standard error. `hf`, `vllm` and `llama` generate:

    {"prompts": [[ids], ...]} -> {"outputs": [[ids], ...], "seconds": s}   the seconds are those of generating alone. The prompts of a
        request run together in vLLM, one after the other in the others; with `"at_once": 1` one begins when the one before has ended.
        `"warm_up": true`: what is drafted does not count
    {"count": true} -> {"drafted": n, "accepted": n}                       tokens since the warm-up, null if the peer does not say

`passes` and `ours` answer what their functions say.

    python _peer_worker.py hf|vllm|llama|passes|ours MODEL SETTINGS      SETTINGS: JSON, see the functions that take it
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Handle = Callable[[dict], dict]  # answers a request
Opened = tuple[str, Handle]  # the peer's version, and what answers


def make_handle(generate: Callable[[list[list[int]]], list[list[int]]], count: Callable[[], tuple]) -> Handle:
    """Return what answers the requests of a peer that generates. `count`: tokens drafted and accepted so far."""
    before = [0, 0]

    def handle(request: dict) -> dict:
        if "count" in request:
            found = zip(("drafted", "accepted"), count(), before, strict=True)
            return {name: None if n is None else n - b for name, n, b in found}
        turns = [[prompt] for prompt in request["prompts"]] if request.get("at_once") == 1 else [request["prompts"]]
        start = time.perf_counter()
        outputs = [output for turn in turns for output in generate(turn)]
        seconds = time.perf_counter() - start
        if request.get("warm_up"):
            before[:] = [n or 0 for n in count()]
        return {"outputs": outputs, "seconds": seconds}

    return handle


def open_hf(
    folder: str, *, device: str, dtype: str, threads: int, max_tokens: int, temperature: float, seed: int, eos: list[int],
    lookup: int | None = None, exit_share: float | None = None, our_drafts: dict | None = None,
) -> Opened:  # fmt: skip
    """Return how transformers' `generate` completes prompts, with its own cache.

    With prompt lookup of `lookup` tokens, or assisted by the share `exit_share` of its layers, or with our drafts (`our_drafts`: their
    `datastore` and `depth`).
    """
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True).eval().to(device)
    options = {"max_new_tokens": max_tokens, "do_sample": temperature > 0, "eos_token_id": eos or None, "pad_token_id": 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    counted = (0, 0) if lookup is exit_share is None else (None, None)
    helper = None
    if lookup is not None:
        options["prompt_lookup_num_tokens"] = lookup
    if exit_share is not None:
        options["assistant_early_exit"] = max(1, int(model.config.num_hidden_layers * exit_share))
    if our_drafts is not None:
        from ngramspec.integrations.transformers import assistant, generate

        helper = assistant(model, **({} if our_drafts["depth"] is None else {"depth": our_drafts["depth"]}))
        options |= {"custom_generate": generate, **({"datastore": our_drafts["datastore"]} if our_drafts["datastore"] else {})}

    def complete(prompt: list[int]) -> list[int]:
        torch.manual_seed(seed)
        ids = torch.tensor([prompt], device=device)
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()

    def count() -> tuple:
        return counted if helper is None else (helper.stats.drafted, helper.stats.accepted)

    return transformers.__version__, make_handle(lambda prompts: [complete(prompt) for prompt in prompts], count)


def open_vllm(
    folder: str, *, dtype: str, max_len: int, max_tokens: int, temperature: float, seed: int, eos: list[int], speculation: dict | None,
    **more: object,
) -> Opened:  # fmt: skip
    """Return how vLLM completes prompts: compiled, with its defaults and `more` options. The environment sets its threads."""
    import vllm

    model = vllm.LLM(folder, dtype=dtype, max_model_len=max_len, speculative_config=speculation, **more)
    params = vllm.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed if temperature > 0 else None, stop_token_ids=eos)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        results = model.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    def count() -> tuple:
        found = {metric.name: int(metric.value) for metric in model.get_metrics() if hasattr(metric, "value")}
        return tuple(found.get(f"vllm:spec_decode_num_{what}_tokens", 0) for what in ("draft", "accepted"))

    return vllm.__version__, make_handle(generate, count)


def open_llama(
    gguf: str, *, threads: int, max_len: int, max_tokens: int, temperature: float, seed: int, eos: list[int] | None,
    lookup: int | None = None, our_drafts: dict | None = None,
) -> Opened:  # fmt: skip
    """Return how llama.cpp completes prompts, through llama-cpp-python. Nothing is kept between prompts.

    With its prompt lookup of `lookup` tokens, or with our drafts (`our_drafts`: their `tokenizer`, `datastore` and `depth`). `eos` None:
    texts end at the end-of-generation tokens that llama.cpp finds in the file. Two further requests: `{"eog": true}` -> `{"eog": [ids]}`,
    those tokens, and `{"tokenize": [texts]}` -> `{"ids": [[ids], ...]}`, with control tokens parsed.
    """
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    model = llama_cpp.Llama(
        gguf,
        n_ctx=max_len,
        n_batch=max_len,  # it keeps logits for so many tokens only, and with drafts it wants them of all
        n_threads=threads,
        n_threads_batch=threads,
        seed=seed,
        draft_model=None if lookup is None else LlamaPromptLookupDecoding(num_pred_tokens=lookup),
        verbose=False,
    )
    draft = None
    if our_drafts is not None:
        from tokenizers import Tokenizer

        from ngramspec.integrations.llama_cpp import Draft

        depth = {} if our_drafts["depth"] is None else {"depth": our_drafts["depth"]}
        tokenizer = Tokenizer.from_file(f"{our_drafts['tokenizer']}/tokenizer.json")
        draft = Draft(tokenizer=tokenizer, datastore=our_drafts["datastore"] or (), **depth)
        draft.attach(model)

    def find_end_tokens() -> list[int]:
        vocab = llama_cpp.llama_model_get_vocab(model.model)
        return [token for token in range(model.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocab, token)]

    ends = set(find_end_tokens() if eos is None else eos)

    def complete(prompt: list[int]) -> list[int]:
        model.reset()
        output: list[int] = []
        for token in model.generate(prompt, temp=temperature, top_k=0, top_p=1.0, min_p=0.0):
            output.append(token)
            if token in ends or len(output) == max_tokens:
                break
        return output

    def count() -> tuple:
        if draft is not None:
            return draft.stats.drafted, draft.stats.accepted
        return (0, 0) if lookup is None else (None, None)

    generate = make_handle(lambda prompts: [complete(prompt) for prompt in prompts], count)

    def handle(request: dict) -> dict:
        if "eog" in request:
            return {"eog": find_end_tokens()}
        if "tokenize" in request:
            return {"ids": [model.tokenize(text.encode(), add_bos=True, special=True) for text in request["tokenize"]]}
        return generate(request)

    return llama_cpp.__version__, handle


def open_passes(gguf: str, *, threads: int, max_len: int, every_logit: bool = False) -> Opened:
    """llama.cpp's passes by themselves through llama-cpp-python's `eval`, 512 tokens at most in each. Requests:

    `{"rows": [n, ...], "context": c, "prefill": p}` -> `{"rows": {n: ms}, "prefill": ms}`: a pass of each of these row counts after c
    tokens, and one over p tokens without any. Logits of the last row alone, which is the least that it can do.
    `{"text": t}` -> `{}` when the first token after the text is there, `{"more": n}` -> `{}` when n others are.
    `{"ids": [...], "first": f, "file": path}` -> `{"vocab": v}`: the logits after each token from f on, in a file of float32 [n - f, v].
    Needs `every_logit`, which keeps those of `max_len` tokens.
    """
    import llama_cpp

    room = 256  # for a model with recurrent layers, which forgets nothing
    model = llama_cpp.Llama(
        gguf, n_ctx=max_len + room, n_batch=512, n_threads=threads, n_threads_batch=threads, logits_all=every_logit, verbose=False
    )
    some = [(100 + 7919 * n) % model.n_vocab() for n in range(max_len + room)]
    kinds = (getattr(llama_cpp, f"llama_model_is_{kind}", None) for kind in ("hybrid", "recurrent"))  # earlier versions have neither
    forgets = not any(is_kind and is_kind(model.model) for is_kind in kinds)
    streams = {}

    def evaluate(start: int, end: int) -> float:
        """Return milliseconds of the tokens from `start` on, after those before it; what came later is forgotten, if the model can."""
        if start and not forgets:
            start, end = model.n_tokens, model.n_tokens + end - start
        model.n_tokens = start
        began = time.perf_counter()
        model.eval(some[start:end])
        return (time.perf_counter() - began) * 1e3

    def measure(rows: list[int], context: int, prefill: int) -> dict:
        evaluate(0, 1)  # wakes the threads
        prefill_ms = evaluate(0, prefill)
        if prefill < context:
            evaluate(prefill, context)
        elif not forgets:
            evaluate(0, context)
        evaluate(context, context + 1)  # the first pass after a long one finds other things in the processor's caches
        return {"rows": {n: evaluate(context, context + n) for n in rows}, "prefill": prefill_ms}

    def handle(request: dict) -> dict:
        if "rows" in request:
            return measure(**request)
        if "text" in request:
            streams["tokens"] = model.generate(model.tokenize(request["text"].encode()), temp=0.0)
            next(streams["tokens"])
            return {}
        if "more" in request:
            for _ in range(request["more"]):
                next(streams["tokens"])
            return {}
        model.reset()
        model.eval(request["ids"])
        model.scores[request["first"] : len(request["ids"])].tofile(request["file"])
        return {"vocab": model.n_vocab()}

    return llama_cpp.__version__, handle


def open_ours(name: str, **settings: object) -> Opened:
    """Return the engine, opened as `ngramspec complete` opens it, with what that imports. Requests:

    `{"text": t}` -> `{}` when the first token after the text is there, `{"more": n}` when n others are, or the text has ended ->
    `{"kv_bytes": b, "props": {...}}`: bytes of those blocks of the KV pool that something was written to, and what `/props` says.
    """
    import numpy as np

    import ngramspec
    import ngramspec.cli.complete
    from ngramspec.cli.common import open_engine

    engine = open_engine(name, **settings)
    streams = {}

    def count_kv_bytes() -> int:
        pool: Any = engine.runner.pool
        used = int(np.count_nonzero([block.any() for block in pool.values[0]]))
        return sum(layer[0].nbytes for layer in (*pool.keys, *pool.values)) * used

    def handle(request: dict) -> dict:
        if "text" in request:
            prompt = list(range(3, 35)) if engine.tokenizer is None else request["text"]
            streams["pieces"] = engine.stream(prompt, ngramspec.SamplingParams(max_tokens=256))
            next(streams["pieces"])
            return {}
        n_tokens = 0
        while n_tokens < request["more"] and (piece := next(streams["pieces"], None)) is not None:
            n_tokens += len(piece.token_ids)
        return {"kv_bytes": count_kv_bytes(), "props": engine.props()}

    return ngramspec.__version__, handle


def main(kind: str, model: str, settings: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**message: object) -> None:
        print(json.dumps(message), file=answers, flush=True)

    kinds = {"hf": open_hf, "vllm": open_vllm, "llama": open_llama, "passes": open_passes, "ours": open_ours}
    version, handle = kinds[kind](model, **json.loads(settings))
    answer(version=version)
    for line in sys.stdin:
        answer(**handle(json.loads(line)))


if __name__ == "__main__":
    main(*sys.argv[1:])
