"""A pass in one call, on tiny GGUF files: what transformers computes, the same bits however a text is cut, and refusal of anything else."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import tiny
import tiny_gguf
import torch

from ngramspec.backends.cpu import runner as runner_module
from ngramspec.backends.cpu import weight_map_build
from ngramspec.backends.cpu.formats import WIDTH
from ngramspec.backends.cpu.llama_forward import LlamaDecoder
from ngramspec.backends.cpu.llama_layers import ModelOptions
from ngramspec.backends.cpu.llama_runner import CpuOptions, HostOutput, LlamaRunner, count_packed_bytes, is_quantised
from ngramspec.backends.cpu.runner import CpuRunner
from ngramspec.backends.cpu.threads import ThreadTeam
from ngramspec.backends.cpu.weight_map import WeightMap
from ngramspec.backends.cpu.weight_map_check import check_weight_map
from ngramspec.datastore.cache_dir import cache_dir
from ngramspec.errors import OutOfMemoryError, UnsupportedModelError
from ngramspec.models.loader import load_model, open_model
from ngramspec.models.tensor_source import to_q8_source
from ngramspec.outputs import DraftTree
from ngramspec.sampling.batch import Span, pack
from ngramspec.sampling.topk import rank_rows

pytestmark = pytest.mark.usefixtures("two_threads")
LLAMA_KIND = ("llama", "mistral", "qwen2", "qwen3")
COMPILED = (*LLAMA_KIND, "gemma2", "gemma3", "phi3", "starcoder2")
TOKENS = (np.arange(60) * 37 % 290).astype(np.int32)
Bind = Callable[..., CpuRunner]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The path of a tiny model of a family and a kind of weights."""
    folder = tmp_path_factory.mktemp("models")

    def path(family: str, kind: str) -> Path:
        name = folder / f"{family}-{kind}.gguf"
        return name if name.exists() else tiny_gguf.write(name, family, kind, std=0.1)

    return path


OPTIONS: dict[str, Any] = {"max_len": 200, "max_seqs": 3, "max_rows": 64, "kv_bytes": 1 << 24, "code": cache_dir() / "code"}


@pytest.fixture(scope="module")
def bind(files: Callable[[str, str], Path]) -> Bind:
    """A runner of its own, by family and kind of weights."""

    def made(family: str, kind: str = "Q4_K", **options: Any) -> CpuRunner:
        opened = open_model(str(files(family, kind)))
        return CpuRunner(opened.model, CpuOptions(**OPTIONS | options), opened.source)

    return made


@pytest.fixture(scope="module")
def expected(files: Callable[[str, str], Path]) -> Callable[..., Any]:
    """What transformers computes of TOKENS with the weights as float32."""

    def outputs(family: str, kind: str = "Q4_K", n_layers: int | None = None) -> Any:
        model = load_model(str(files(family, kind))).model
        if n_layers:
            model.base_model.layers = model.base_model.layers[:n_layers]
        with torch.inference_mode():
            return model(torch.from_numpy(TOKENS).long()[None], use_cache=False, output_hidden_states=True)

    return outputs


def logits_of(runner: LlamaRunner, cuts: tuple[int, ...] = (0, 25, 60), slot: int = 0) -> torch.Tensor:
    """[60, V] of TOKENS in chunks."""
    assert runner.pool.reserve(slot, 60)
    try:
        return torch.cat([runner.run([Span(slot, TOKENS[a:b], a, logits=b - a)]).clone() for a, b in itertools.pairwise(cuts)])
    finally:
        runner.pool.release(slot)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of the largest number of b, in the mean of squares."""
    return float((a - b).square().mean().sqrt() / b.abs().max())


@pytest.mark.parametrize(("precision", "near"), [("float32", 3e-6), ("int8", 0.02)])
@pytest.mark.parametrize("family", tiny_gguf.FAMILIES)
def test_logits_are_those_of_transformers(bind: Bind, expected: Callable[..., Any], family: str, precision: str, near: float) -> None:
    runner = bind(family, precision=precision)
    assert (runner.precision, runner.exactness) == (precision, "bitwise")
    assert (runner.decoder is not None) == (family in COMPILED)
    wanted = expected(family).logits[0]
    if not family.startswith("gemma"):
        assert distance(logits_of(runner), wanted) < near
    if runner.decoder is not None:
        whole = logits_of(runner)
        runner.decoder = None
        assert distance(whole, logits_of(runner)) < near
        assert distance(logits_of(runner), wanted) < near


@pytest.mark.parametrize("arch", LLAMA_KIND)
def test_models_in_memory(arch: str) -> None:
    """Windows among them: 8 keys that a query of Mistral sees."""
    runner = CpuRunner(tiny.tiny_model(arch), CpuOptions(**OPTIONS))
    assert runner.decoder is not None
    assert (runner.precision, runner.kv_dtype, runner.exactness) == ("float32", "float32", "bitwise")
    assert {layer.window for layer in runner.decoder.layers} == {tiny.WINDOW if arch == "mistral" else 0}
    with torch.inference_mode():
        wanted = tiny.tiny_model(arch)(torch.from_numpy(TOKENS % 250).long()[None], use_cache=False).logits[0]
    assert runner.pool.reserve(0, 60)
    got = runner.run([Span(0, TOKENS % 250, 0, logits=60)])
    assert distance(got, wanted) < 3e-6


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_bits_are_the_same_however_a_text_is_cut(bind: Bind, family: str, precision: str) -> None:
    runner = bind(family, "IQ4_XS", precision=precision)
    assert runner.decoder is not None
    alone = logits_of(runner, tuple(range(61)))
    for cuts in ((0, 60), (0, 1, 3, 20, 33, 59, 60), (0, 48, 60)):
        assert torch.equal(logits_of(runner, cuts, slot=1), alone)
    numba.set_num_threads(1)
    assert torch.equal(logits_of(runner, (0, 20, 60)), alone)
    assert torch.equal(logits_of(runner, tuple(range(61))), alone)
    numba.set_num_threads(2)
    n = 30
    tree = DraftTree(
        np.array([*TOKENS[n : n + 4], 5, 6, *TOKENS[n + 4 : n + 6]], np.int32), np.array([-1, 0, 1, 2, 0, 4, 3, 6], np.int32),
        np.ones(8, np.float32), np.zeros(8, np.uint8),
    )  # fmt: skip
    for slot in range(3):
        assert runner.pool.reserve(slot, 80)
    runner.run([Span(0, TOKENS[: n - 1], 0, logits=0), Span(2, TOKENS[:17], 0)])
    got = runner.run([Span(2, TOKENS[17:19], 17), Span(0, TOKENS[n - 1 : n], n - 1, tree)])
    assert torch.equal(got[0], alone[18])
    for row, node in ((0, -1), (1, 0), (2, 1), (3, 2), (4, 3), (7, 4), (8, 5)):
        assert torch.equal(got[1 + row], alone[n + node])
    for node, words in ((4, [5]), (5, [5, 6])):  # behind the tree's first node
        runner.run([Span(1, np.array([*TOKENS[: n + 1], *words[:-1]], np.int32), 0, logits=0)])
        assert torch.equal(runner.run([Span(1, np.array(words[-1:], np.int32), n + len(words))])[0], got[2 + node])


@pytest.mark.parametrize("n_come", [0, 1, 7])
def test_threads_that_come_late_or_never(bind: Bind, monkeypatch: pytest.MonkeyPatch, n_come: int) -> None:
    """Passes for eight threads, of which some exist; on few cores most come late."""
    runner = bind("llama")
    alone = logits_of(runner)
    grow = ThreadTeam.grow
    monkeypatch.setattr(numba, "get_num_threads", lambda: 8)
    monkeypatch.setattr(ThreadTeam, "grow", lambda team, _, *whole: grow(team, n_come, *whole))
    for _ in range(5):
        assert torch.equal(logits_of(runner), alone)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_hidden_states(bind: Bind, expected: Callable[..., Any], precision: str) -> None:
    runner = bind("qwen3", precision=precision)
    runner.keep_hidden_states(True)
    wanted = expected("qwen3").hidden_states[-1][0]
    seen = []
    for decoder in (runner.decoder, None):
        runner.decoder = decoder
        assert runner.pool.reserve(0, 60)
        batch = pack([Span(0, TOKENS, 0)], runner.pool, runner.rows_per_item)
        output = runner.forward(batch)
        assert output.get_logits(0, 1).shape == (1, tiny_gguf.VOCAB)
        seen.append(torch.from_numpy(output.get_hidden_states(np.arange(60))))
        assert torch.equal(torch.from_numpy(output.get_hidden_states(np.array([3, 59]))), seen[-1][[3, 59]])
        runner.pool.release(0)
    near = 3e-6 if precision == "float32" else 0.02
    assert distance(seen[0], wanted) < near
    assert distance(seen[1], wanted) < near
    runner.keep_hidden_states(False)
    assert runner.pool.reserve(0, 60)
    with pytest.raises(AssertionError, match="not kept"):
        runner.forward(pack([Span(0, TOKENS, 0)], runner.pool, runner.rows_per_item)).get_hidden_states(np.arange(1))


def test_the_first_layers_alone(bind: Bind, expected: Callable[..., Any]) -> None:
    runner = bind("llama", precision="float32")
    wanted = expected("llama", n_layers=1).logits[0]
    for decoder in (runner.decoder, None):
        runner.decoder = decoder
        exit_at = runner.early_exit(1)
        assert runner.pool.reserve(0, 60)
        got = exit_at(pack([Span(0, TOKENS, 0, logits=60)], runner.pool, runner.rows_per_item)).get_logits(0, 60)
        assert distance(torch.from_numpy(got), wanted) < 3e-6
        runner.pool.release(0)
    for n_layers in (0, 3):
        with pytest.raises(ValueError, match=f"draft layers must be 1 to 2, the model's own, got {n_layers}"):
            runner.early_exit(n_layers)


def test_keys_and_values_of_16_bits(bind: Bind) -> None:
    runners = {kept: bind("llama", precision="float32", kv_dtype=kept) for kept in ("float32", "float16")}
    logits, first = {}, {}
    for kept, runner in runners.items():
        assert runner.kv_dtype == kept
        logits[kept] = logits_of(runner)
        first[kept] = [runner.pool.keys[0], runner.pool.values[0]]
        assert runner.pool.reserve(0, 60)
        runner.decoder = None
        runner.run([Span(0, TOKENS, 0)])  # by the other way
    assert 0 < distance(logits["float16"], logits["float32"]) < 1e-3
    for half, single in zip(first["float16"], first["float32"], strict=True):
        assert (half.dtype, single.dtype) == (np.uint16, np.float32)
        np.testing.assert_array_equal(half, single.astype(np.float16).view(np.uint16))
    assert [bind("llama", precision=p).kv_dtype for p in ("auto", "int8", "float32")] == ["float16", "float16", "float32"]
    assert bind("llama", kv_dtype="float32").kv_dtype == "float32"


def test_half_the_memory_for_keys_and_values(bind: Bind) -> None:
    sizes = {kept: bind("llama", kv_dtype=kept, kv_bytes=1 << 17, max_len=64).pool.n_blocks for kept in ("float32", "float16")}
    assert sizes["float16"] == 2 * sizes["float32"]
    with pytest.raises(OutOfMemoryError, match="kv_memory of 1000 bytes holds 0 tokens"):
        bind("llama", kv_bytes=1000)


def wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the compiled pass alone."""
    right = weight_map_build.LlamaDecoder

    def make(*args: Any, options: ModelOptions, **rest: Any) -> LlamaDecoder:
        return right(*args, options=options._replace(scale=1.5 * options.scale), **rest)

    monkeypatch.setattr(weight_map_build, "LlamaDecoder", make)


def wrong_angles(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the modules, of which the compiled pass has its own."""
    right = runner_module.fused_ops.replace_small_operations

    def replace(model: Any) -> int:
        model.base_model.rotary_emb.inv_freq *= 1.5
        return right(model)

    monkeypatch.setattr(runner_module.fused_ops, "replace_small_operations", replace)


def test_a_pass_that_computes_something_else_gives_way_to_modules(
    bind: Bind, expected: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_scale(monkeypatch)
    for runner in (bind("llama", "Q8_0", precision="float32"), bind("qwen3", "Q8_0", precision="int8")):
        assert runner.decoder is runner.weight_map is None
        assert runner.exactness == "bitwise"
    assert distance(logits_of(bind("llama", "Q8_0", precision="float32")), expected("llama", "Q8_0").logits[0]) < 3e-6
    assert CpuRunner(tiny.tiny_model("llama"), CpuOptions(**OPTIONS)).decoder is None


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_a_model_that_computes_something_else_is_refused(bind: Bind, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    wrong_angles(monkeypatch)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM: logits differ from transformers' own by"):
        bind("llama", "Q8_0", precision=precision)
    with pytest.raises(UnsupportedModelError, match="logits differ"):
        CpuRunner(tiny.tiny_model("llama"), CpuOptions(**OPTIONS))


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("family", COMPILED)
def test_a_recipe_makes_the_same_pass(bind: Bind, files: Callable[[str, str], Path], family: str, precision: str) -> None:
    """Of what the first start has found out, through JSON, without transformers' modules."""
    first = bind(family, precision=precision)
    assert first.weight_map is not None
    again = WeightMap.from_json(json.loads(json.dumps(first.weight_map.to_json())))
    assert again == first.weight_map
    source = open_model(str(files(family, "Q4_K"))).source
    second = LlamaRunner(again, CpuOptions(**OPTIONS, precision=precision), source)
    assert (second.precision, second.kv_dtype, second.vocab_size) == (precision, first.kv_dtype, tiny_gguf.VOCAB)
    if family != "phi3":  # parts of fused matrices have shapes of their own
        assert {shape: str(policy) for shape, policy in second.policies.items()}.items() <= {
            s: str(p) for s, p in first.policies.items()
        }.items()
    assert torch.equal(logits_of(second), logits_of(first))


@pytest.mark.parametrize(("matrix", "rows"), [(4, (0, 1 << 20)), (5, (8, 264)), (0, (0, 16)), (6, (0, 15))])
def test_rows_that_a_matrix_does_not_have(bind: Bind, files: Callable[[str, str], Path], matrix: int, rows: tuple[int, int]) -> None:
    found = bind("phi3").weight_map
    assert found is not None
    source = open_model(str(files("phi3", "Q4_K"))).source
    check_weight_map(found, source)
    found.layers[1].matrices[matrix] = found.layers[1].matrices[matrix]._replace(first=rows[0], end=rows[1])
    with pytest.raises(ValueError, match=r"and \d+ are wanted|is wanted"):
        check_weight_map(found, source)


def test_precisions_that_do_not_fit_the_weights(bind: Bind, files: Callable[[str, str], Path]) -> None:
    refused = "precision 'int8' is for weights in blocks of codes, which this model has not; accepted: 'float32', or quantize='q8_0'"
    with pytest.raises(UnsupportedModelError, match=refused):
        bind("llama", "F16", precision="int8")
    with pytest.raises(UnsupportedModelError, match=refused):
        bind("llama", "Q4_K", precision="int8", plain=True)
    with pytest.raises(UnsupportedModelError, match=refused):
        CpuRunner(tiny.tiny_model("llama"), CpuOptions(**OPTIONS, precision="int8"))
    with pytest.raises(UnsupportedModelError, match=r"weights must be float32 on the CPU, got torch\.bfloat16"):
        CpuRunner(tiny.tiny_model("llama").bfloat16(), CpuOptions(**OPTIONS))
    opened = open_model(str(files("qwen3", "F16")))
    assert not is_quantised(opened.source)
    runner = CpuRunner(opened.model, CpuOptions(**OPTIONS), to_q8_source(opened.source))
    assert (runner.precision, {str(policy) for policy in runner.policies.values()}) == ("int8", {"blocks of 8 bits"})


FORMS = {"Q4_1": "blocks of 4 bits", "Q5_K": "blocks of 5 bits", "Q3_K": "blocks of 3 bits", "BF16": "BF16", "F16": "F16"}


@pytest.mark.parametrize(("kind", "form"), FORMS.items())
def test_weights_are_kept_as_they_are_in_the_file(bind: Bind, files: Callable[[str, str], Path], kind: str, form: str) -> None:
    runner = bind("qwen3", kind)
    assert {str(policy) for policy in runner.policies.values()} == {form}
    assert runner.precision == ("int8" if "blocks" in form else "float32")
    opened = open_model(str(files("qwen3", kind)))
    vectors = 4 * sum(stored.n_rows * stored.shape[-1] for stored in opened.source.values() if len(stored.shape) == 1)
    assert runner._context.arena.n_bytes == count_packed_bytes(opened.source, plain=False) - vectors
    assert runner._context.arena.n_bytes < 1.2 * opened.source.n_bytes
    plain = bind("qwen3", kind, plain=True)
    assert {str(policy) for policy in plain.policies.values()} == {"F32"}
    padding = plain._context.arena.n_bytes - (count_packed_bytes(opened.source, plain=True) - vectors)
    assert 0 <= padding <= 2 * 15 * 4 * tiny_gguf.HIDDEN, "embedding and head end within a panel"
    same = bind("qwen3", kind, precision="float32")
    assert torch.equal(logits_of(plain), logits_of(same))


def test_float32_numbers_that_are_bfloat16_are_kept_so() -> None:
    model = tiny.tiny_model("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    runner = CpuRunner(model, CpuOptions(**OPTIONS | {"code": None}))  # kernels that are not kept
    assert {str(policy) for policy in runner.policies.values()} == {"BF16"}


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q6_K", "IQ4_NL"])
def test_every_kind_of_weight(bind: Bind, expected: Callable[..., Any], kind: str) -> None:
    wanted = expected("qwen3", kind).logits[0]
    for precision, near in (("float32", 3e-6), ("int8", 0.02)):
        runner = bind("qwen3", kind, precision=precision)
        assert runner.decoder is not None
        assert distance(logits_of(runner), wanted) < near


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_the_likeliest_tokens_come_out_of_the_pass(bind: Bind, precision: str, threads: int) -> None:
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    runner = bind("llama", precision=precision)
    assert runner.decoder is not None
    assert runner.vocab_size % WIDTH
    assert runner.pool.reserve(0, 60)

    def output() -> HostOutput:
        return runner.forward(pack([Span(0, TOKENS, 0, logits=50)], runner.pool, runner.rows_per_item))

    assert output().get_topk(0, 50) is None
    runner.keep_candidates(True)

    def check() -> None:
        found = output()
        greedy, tokens, values = rank_rows(found.get_logits(0, 50))
        assert (found._computed.greedy == greedy).all()
        got = found.get_topk(3, 50)
        assert got is not None
        assert (got[0] == tokens[3:]).all()
        assert (got[1].view(np.int32) == values[3:].view(np.int32)).all()

    check()
    bias = runner.decoder.matrices[-1].bias
    runner.decoder._last_norm[:] = 0  # logits are the biases
    rng = np.random.default_rng(0)
    for choices in ([0.0], [0.0, 1.0, 2.0], [-np.inf], [-np.inf, 0.0], [np.nan, 1.0], [np.inf, 0.0], [np.nan]):
        usual = rng.random(len(bias)) < 0.9
        bias[:] = np.where(usual, np.float32(choices[0]), rng.choice(np.array(choices, np.float32), len(bias)))
        bias[runner.vocab_size :] = np.inf  # of no token
        check()
    runner.keep_candidates(False)
    assert output().get_topk(0, 50) is None
