"""The device's runner as a whole, on tiny models: the same numbers as transformers, and the same tokens whatever else is in a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import tiny
import torch
from small import NARROW, VOCAB, bind, make_engine, make_model, take_on_trust

from ngramspec import Completion, Engine, SamplingParams
from ngramspec.backends.cuda import cuda_runner as runner_module
from ngramspec.backends.cuda import device as device_module
from ngramspec.backends.cuda.cuda_runner import CudaOutput, CudaRunner
from ngramspec.backends.cuda.gpu_kv_pool import CudaPool
from ngramspec.backends.cuda.graphs import ITEMS, ROWS, Graphs, bucket_for, decode_buckets
from ngramspec.backends.cuda.model import CudaDecoder, ModulesDecoder
from ngramspec.engine import assembly
from ngramspec.engine.assembly import DeviceConfig
from ngramspec.errors import OutOfMemoryError, UnsupportedModelError
from ngramspec.models import loader
from ngramspec.outputs import KEPT
from ngramspec.sampling.batch import Batch


def test_buckets() -> None:
    for rows in (1, 2, 3, 5, 17, 100, 128):
        for items in (1, 2, 7, 64):
            bucket = bucket_for(rows, items)
            assert bucket is not None
            assert bucket.rows >= rows
            assert bucket.items >= min(items, rows)
    assert bucket_for(ROWS[-1] + 1, 1) is None
    assert bucket_for(ROWS[-1], ITEMS[-1] + 1) is None


@pytest.mark.parametrize(("max_seqs", "max_rows", "rows_per_item"), [(1, 256, 8), (4, 30, 4), (64, 2048, 8), (3, 2, 16)])
def test_what_decoding_needs_is_captured(max_seqs: int, max_rows: int, rows_per_item: int) -> None:
    buckets = decode_buckets(max_seqs, max_rows, rows_per_item)
    assert buckets == sorted(set(buckets), key=lambda b: (b.rows, b.items))
    assert len(buckets) <= 4 * len(ROWS)
    rng = np.random.default_rng(0)
    needed = set()
    for _ in range(3000):
        rows = 1 + rng.geometric(rng.uniform(0.05, 1), int(rng.integers(1, max_seqs + 1))) * rng.integers(0, 2)
        if rows.sum() <= min(max_rows, ROWS[-1]):
            needed.add(bucket_for(int(rows.sum()), int((-(-rows // rows_per_item)).sum())))
    assert needed
    assert needed <= set(buckets)


@pytest.mark.parametrize("arch", ["qwen3", "mistral"])
def test_our_own_kernels_throughout(arch: str, device: str) -> None:
    """Binding compares the logits with transformers' own, and has a chain and a tree say what token by token says."""
    runner = bind(arch, torch.float32, device, narrow=True, n_layers=1 + (arch == "mistral"))
    assert isinstance(runner._decoder, CudaDecoder)
    assert runner.exactness == "bitwise", {str(policy) for policy in runner.policies.values()}
    runner.pool.check_integrity()


@pytest.mark.parametrize("arch", ["gemma2", "gpt_neox", "phi3", "gpt2"])
def test_the_models_own_modules(arch: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With our attention and products. On the CPU torch's own operations depend on where in memory a number stands: no proof there."""
    if device == "cpu":
        monkeypatch.setattr(CudaRunner, "self_test", lambda self: False)
    runner = bind(arch, torch.float32, device, narrow=arch != "gpt2", n_layers=1 + (arch == "gemma2"))
    assert isinstance(runner._decoder, ModulesDecoder)
    assert runner.exactness == ("numerical" if device == "cpu" else "bitwise")


def test_too_little_memory_is_told(device: str) -> None:
    with pytest.raises(OutOfMemoryError, match="MiB for keys and values"):
        bind("llama", torch.float32, device, kv_bytes=1000)


@pytest.mark.parametrize("message", ["CUDA out of memory. Tried to allocate 2.00 GiB", "Triton Error [CUDA]: out of memory"])
def test_memory_that_runs_out_at_load_is_told(message: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise (torch.OutOfMemoryError if message.startswith("CUDA") else RuntimeError)(message)

    take_on_trust(monkeypatch)
    monkeypatch.setattr(runner_module.AttentionWorkspace, "allocate", fails)
    with pytest.raises(OutOfMemoryError, match=r"at load: (CUDA|Triton Error .CUDA.:) out of memory"):
        bind("llama", torch.float32, device, narrow=True, n_layers=1)


def test_the_pool_is_what_the_largest_pass_leaves(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_on_trust(monkeypatch)
    passes, seen, forward = list[int](), list[int](), CudaRunner.forward

    def watched(self: CudaRunner, batch: Batch) -> CudaOutput:
        seen.append(len(batch.input_ids))
        return forward(self, batch)

    def peak(device: torch.device, work: Callable[[], object]) -> int:
        work()
        passes.append(seen[-1])
        return 1000 * passes[-1]

    monkeypatch.setattr(CudaRunner, "forward", watched)
    monkeypatch.setattr(runner_module, "peak_bytes", peak)
    block_bytes = CudaPool.block_bytes([(1, 16)], torch.float32)
    free = runner_module.MARGIN + 6 * block_bytes + 2 * 12 * 1000
    monkeypatch.setattr(runner_module, "free_bytes", lambda device, utilization: free)
    runner = bind("llama", torch.float32, device, narrow=True, n_layers=1, max_rows=12, max_len=96, kv_bytes=None)
    assert passes == [12, 12]
    assert runner.pool.n_blocks == 6
    assert runner._decoder.pool is runner.pool
    runner.pool.check_integrity()
    monkeypatch.setattr(runner_module, "free_bytes", lambda device, utilization: free - 5 * block_bytes)
    with pytest.raises(OutOfMemoryError, match="hold 32 tokens"):
        bind("llama", torch.float32, device, narrow=True, n_layers=1, max_rows=12, max_len=96, kv_bytes=None)


@pytest.fixture(scope="module")
def on_device(device: str) -> Iterator[Engine]:
    """Without a device its kernels run under the interpreter."""
    with pytest.MonkeyPatch.context() as made, make_engine(make_model("llama", **NARROW), device, made) as made_engine:
        assert made_engine.exactness == "bitwise"
        made_engine.core.cost = tiny.FreeRows()  # what passes take under the interpreter says nothing
        yield made_engine
        made_engine.runner.pool.check_integrity()
        assert made_engine.runner.pool.n_available == made_engine.runner.pool.n_blocks


def test_engines_of_these_tests_ask_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of its own accord moves a model to the CPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    asked = []

    def bind_nothing(model: object, tokenizer: object, config: object, device: DeviceConfig, *_: object, **__: object) -> None:
        asked.append(device.device)
        raise UnsupportedModelError("nothing is bound")

    monkeypatch.setattr(assembly, "bind", bind_nothing)
    with pytest.raises(UnsupportedModelError, match="nothing is bound"):
        make_engine(make_model("llama"), "cuda", monkeypatch)
    assert asked == ["cuda:0"]


def test_a_model_is_loaded_on_the_device_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in blocks are unpacked while it is loaded, and Triton launches on the thread's current device, whatever it works on."""
    current = list[str]()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(device_module, "free_bytes", lambda device, utilization: 1 << 30)

    def load(*_: object, device: str, **__: object) -> None:
        assert [device] == current
        raise UnsupportedModelError(f"nothing is loaded on {device}")

    monkeypatch.setattr(loader, "load_model", load)
    with pytest.raises(UnsupportedModelError, match="nothing is loaded on cuda:1"):
        Engine("random:SmolLM2-135M", device="cuda:1")


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [np.tile(rng.integers(3, VOCAB, 5), 4)[: 7 + 4 * i].tolist() for i in range(2)]


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=5, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=5, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, seed=2**64 - 3, ignore_eos=True),
        SamplingParams(max_tokens=5, temperature=0.7, repetition_penalty=1.3, logprobs=1, seed=3, ignore_eos=True),
    ],
    ids=["greedy", "sampled", "picked by the host"],
)
def test_speculation_changes_no_token(on_device: Engine, params: SamplingParams) -> None:
    plain = [on_device.complete(prompt, params, speculation=False, prefix_cache=False) for prompt in prompts()]
    # What was written before is what later requests expect: deep drafts, which are accepted.
    together = on_device.complete(prompts(), params, prediction=plain[0].token_ids)
    assert tokens(together) == tokens(plain)
    alone = on_device.complete(prompts()[0], params, prediction=plain[0].token_ids)
    assert alone.token_ids == plain[0].token_ids
    assert alone.stats.accepted > 0


def test_a_pass_in_a_bucket_is_that_of_kernels_launched_one_by_one(on_device: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.8, seed=1, ignore_eos=True)
    in_buckets = on_device.complete(prompts()[:2], params)
    monkeypatch.setattr(Graphs, "find", lambda self, rows, items: None)
    assert tokens(on_device.complete(prompts()[:2], params, prefix_cache=False)) == tokens(in_buckets)


def test_the_device_picks_what_the_host_would(on_device: Engine) -> None:
    """A request that wants more log-probabilities than passes tell is picked for by the host, from the same logits."""
    for temperature in (0.0, 0.9):
        params = {"max_tokens": 3, "temperature": temperature, "seed": 11, "ignore_eos": True}
        silent, scored, host = (on_device.complete(prompts()[1], SamplingParams(**params, logprobs=n)) for n in (None, 3, KEPT + 1))
        assert silent.token_ids == scored.token_ids == host.token_ids
        assert scored.choices[0].logprobs is not None
        assert host.choices[0].logprobs is not None
        for device, true in zip(scored.choices[0].logprobs, host.choices[0].logprobs, strict=True):
            assert device.token_id == true.token_id
            assert device.logprob == pytest.approx(true.logprob, abs=1e-9)
            assert [token for token, _ in device.top] == [token for token, _ in true.top[:3]]
            assert [logprob for _, logprob in device.top] == pytest.approx([logprob for _, logprob in true.top[:3]], abs=1e-9)


def test_speculation_changes_no_log_probability(on_device: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(on_device.core.acceptance), "accept", lambda *_: pytest.fail("picked by the host"))
    params = SamplingParams(max_tokens=5, temperature=0.7, seed=3, logprobs=2, ignore_eos=True)
    plain = [on_device.complete(prompt, params, speculation=False, prefix_cache=False) for prompt in prompts()]
    drafted = on_device.complete(prompts(), params, prediction=plain[0].token_ids)
    assert tokens(drafted) == tokens(plain)
    assert [each.choices[0].logprobs for each in drafted] == [each.choices[0].logprobs for each in plain]
    assert drafted[0].stats.accepted > 0
    assert all(len(each.choices[0].logprobs or []) == len(each.token_ids) for each in drafted)
