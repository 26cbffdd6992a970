"""A peer at the other end of a pipe. Runs with the peer's own interpreter, so nothing of ngramspec is imported here.

Requests and answers are JSON, one a line: `{"prompts": [[ids], ...]}` on standard input, `{"outputs": [[ids], ...], "seconds": s}` on
standard output. The first answer, `{"version": v}`, comes when the model is loaded. What the peer itself prints goes to standard error. The
seconds are those of generating alone. The prompts of a request run together in vLLM, one after the other in the others.

    python _peer_worker.py hf|vllm|llama FOLDER|GGUF SETTINGS      SETTINGS: JSON, see the functions that take it
"""

import json
import os
import sys
import time
from collections.abc import Callable

Generate = Callable[[list[list[int]]], list[list[int]]]


def hf(
    folder: str,
    *,
    device: str,
    dtype: str,
    threads: int,
    max_tokens: int,
    temperature: float,
    seed: int,
    eos: list[int],
    lookup: int | None = None,
    exit_share: float | None = None,
) -> tuple[str, Generate]:
    """transformers' `generate` with its own cache; with prompt lookup of `lookup` tokens, or assisted by this share of its layers."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True).eval().to(device)
    options = {"max_new_tokens": max_tokens, "do_sample": temperature > 0, "eos_token_id": eos or None, "pad_token_id": 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    if lookup is not None:
        options["prompt_lookup_num_tokens"] = lookup
    if exit_share is not None:
        options["assistant_early_exit"] = max(1, int(model.config.num_hidden_layers * exit_share))

    def complete(prompt: list[int]) -> list[int]:
        torch.manual_seed(seed)
        ids = torch.tensor([prompt], device=device)
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()

    return transformers.__version__, lambda prompts: [complete(prompt) for prompt in prompts]


def vllm(
    folder: str, *, dtype: str, max_len: int, max_tokens: int, temperature: float, seed: int, eos: list[int], speculation: dict | None
) -> tuple[str, Generate]:
    """vLLM compiled, with its defaults. Its threads are set by the environment."""
    import vllm

    model = vllm.LLM(folder, dtype=dtype, max_model_len=max_len, speculative_config=speculation)
    params = vllm.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed if temperature > 0 else None, stop_token_ids=eos)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        results = model.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    return vllm.__version__, generate


def llama(
    gguf: str, *, threads: int, max_len: int, max_tokens: int, temperature: float, seed: int, eos: list[int], lookup: int | None
) -> tuple[str, Generate]:
    """llama.cpp through llama-cpp-python, with its prompt lookup of `lookup` tokens or without. Nothing is kept between prompts."""
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    drafts = None if lookup is None else LlamaPromptLookupDecoding(num_pred_tokens=lookup)
    n_batch = max_len  # it keeps logits for so many tokens only, and with drafts it wants them of all
    model = llama_cpp.Llama(
        gguf, n_ctx=max_len, n_batch=n_batch, n_threads=threads, n_threads_batch=threads, seed=seed, draft_model=drafts, verbose=False
    )

    def complete(prompt: list[int]) -> list[int]:
        model.reset()
        output: list[int] = []
        for token in model.generate(prompt, temp=temperature, top_k=0, top_p=1.0, min_p=0.0):
            output.append(token)
            if token in eos or len(output) == max_tokens:
                break
        return output

    return llama_cpp.__version__, lambda prompts: [complete(prompt) for prompt in prompts]


def main(kind: str, folder: str, settings: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**message: object) -> None:
        print(json.dumps(message), file=answers, flush=True)

    version, generate = {"hf": hf, "vllm": vllm, "llama": llama}[kind](folder, **json.loads(settings))
    answer(version=version)
    for line in sys.stdin:
        prompts = json.loads(line)["prompts"]
        start = time.perf_counter()
        outputs = generate(prompts)
        answer(outputs=outputs, seconds=time.perf_counter() - start)


if __name__ == "__main__":
    main(*sys.argv[1:])
