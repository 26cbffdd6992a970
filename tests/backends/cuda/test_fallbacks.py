"""What cannot be captured, compiled or found: it is done another way with the same tokens and one line in the log, or named."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import small
import torch

from ngramspec.backends.cuda import cuda_runner as runner_module
from ngramspec.backends.cuda import device, layers, paged_attention
from ngramspec.backends.cuda.cuda_runner import CudaRunner
from ngramspec.backends.cuda.graphs import Bucket, decode_buckets
from ngramspec.backends.cuda.model import CudaDecoder, ModulesDecoder
from ngramspec.backends.cuda.row_invariant_linear import CudaProduct
from ngramspec.config import EngineConfig
from ngramspec.engine.assembly import check_device
from ngramspec.errors import MissingPackageError

PROMPT = np.array([5, 9, 5, 9, 5], np.int32)
CUDA = torch.device("cuda", 0)


def bind(device: str, **options: Any) -> CudaRunner:
    return small.bind("llama", torch.float32, device, narrow=True, n_layers=1, **options)


def write(runner: CudaRunner) -> list[int]:
    """Three tokens one by one, then the same three as a draft and another."""
    plain, drafted = (small.Text(runner, PROMPT, temperature=0.8, seed=3) for _ in range(2))
    for _ in range(3):
        small.decode([plain], [None])
    small.decode([drafted], [small.branching(plain.tokens[len(PROMPT) :])])
    assert drafted.tokens[: len(plain.tokens)] == plain.tokens
    for text in (plain, drafted):
        text.release()
    return drafted.tokens


@pytest.fixture(scope="module")
def reference(device: str) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        small.take_on_trust(patch)
        return write(bind(device))


def warnings(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelno >= logging.WARNING]


def fails(*_: object, **__: object) -> None:
    raise RuntimeError("out of resource: shared memory, Required: 300000")


def test_a_pass_that_cannot_be_captured(
    device: str, reference: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At load the buckets that decoding uses are captured, and none later."""
    captured, progress = [], []

    def record(run: Callable[[], None]) -> Callable[[], None]:
        run()
        captured.append(run)
        if len(captured) in refused:
            fails()
        return run

    small.take_on_trust(monkeypatch)
    monkeypatch.setattr(runner_module, "make_recorder", lambda device: record)
    for refused in ((), (1, 4)):
        captured.clear()
        caplog.clear()
        runner = bind(device, max_rows=4, max_seqs=2, progress=progress.append)
        buckets = decode_buckets(2, 4, runner.rows_per_item)
        assert len(captured) == len(buckets)
        assert runner._graphs.captured == [bucket for i, bucket in enumerate(buckets, 1) if i not in refused]
        assert write(runner) == reference
        assert len(captured) == len(buckets)
        if refused:
            (line,) = warnings(caplog)
            assert f"2 of {len(buckets)} passes cannot be captured and are launched kernel by kernel; Bucket(rows=1, items=1)" in line
            assert "shared memory" in line
        else:
            assert not warnings(caplog)
    assert any("capturing passes" in each for each in progress)


def test_a_pass_takes_the_next_bucket_that_was_captured(caplog: pytest.LogCaptureFixture) -> None:
    buckets = [Bucket(1, 1), Bucket(2, 1), Bucket(4, 4), Bucket(8, 2), Bucket(16, 16)]

    def record(run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    graphs = runner_module.Graphs(lambda bucket: bucket, lambda inputs: None if inputs.rows < 16 else out_of_memory(), record)
    graphs.capture([*buckets, Bucket(32, 32)])
    found = {(n, i): graphs.find(n, i) for n, i in ((1, 1), (2, 2), (3, 1), (4, 2), (5, 2), (5, 3), (9, 1))}
    assert found == {(1, 1): Bucket(1, 1), (2, 2): Bucket(4, 4), (3, 1): Bucket(4, 4), (4, 2): Bucket(4, 4), (5, 2): Bucket(8, 2)} | {
        (5, 3): None,
        (9, 1): None,
    }
    (line,) = warnings(caplog)
    assert "2 of 6 passes" in line


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("no memory")


def test_layers_that_do_not_compile_are_computed_by_the_models_own(
    device: str, reference: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small.take_on_trust(monkeypatch)
    monkeypatch.setattr(layers, "compute_gated_activation", fails)
    runner = bind(device)
    assert isinstance(runner._decoder, ModulesDecoder)
    (line,) = warnings(caplog)
    assert "LlamaForCausalLM: our layers do not run here" in line
    assert write(runner) == reference


def test_products_that_do_not_compile_are_the_vendors(
    device: str, reference: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small.take_on_trust(monkeypatch)
    shape = (small.VOCAB, 32)  # the head's
    launch = CudaProduct._launch

    def some(self: CudaProduct, x: torch.Tensor, *others: Any) -> None:
        if (self.n_out, self.n_in) == shape:
            fails()
        launch(self, x, *others)

    monkeypatch.setattr(CudaProduct, "_launch", some)
    monkeypatch.setattr(
        runner_module, "find_violation", lambda product, counts: None if len(product.compute_partials(product.weight[:1])) else ""
    )
    runner = bind(device)
    assert isinstance(runner._decoder, CudaDecoder)
    assert runner.exactness == "numerical"
    assert [each for each, policy in runner.policies.items() if not policy.bitwise] == [shape]
    first, _ = warnings(caplog)  # the second: exactness is numerical
    assert f"products with weights of {shape} are the vendor's" in first
    assert write(runner) == reference


def test_without_triton_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *others: None if name == "triton" else find(name, *others))
    with pytest.raises(MissingPackageError, match=r"'cuda:0' needs Triton.*pip install 'ngramspec\[cuda\]'"):
        check_device(EngineConfig(device="cuda"))


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (RuntimeError("Failed to find C compiler. Please specify via CC environment variable"), "install gcc or clang"),
        (subprocess.CalledProcessError(1, ["gcc", "main.c"]), "python3-dev"),
    ],
)
def test_without_a_compiler_or_headers_they_are_named(error: Exception, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(index: int) -> None:
        raise error

    monkeypatch.setattr(device, "_read_properties", properties)
    with pytest.raises(MissingPackageError, match=named):
        device.get_limits.__wrapped__(CUDA)


def test_the_device_is_asked_for_its_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device.get_limits.cache_clear()
    for shared, stages in ((227 << 10, 3), (99 << 10, 2), (64 << 10, 1)):
        monkeypatch.setattr(device, "_read_properties", lambda index, shared=shared: {"multiprocessor_count": 30, "max_shared_mem": shared})
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
        assert device.get_limits(CUDA) == device.DeviceLimits(30, shared, 8)
        assert paged_attention._choose_stages(128, 32, 2, CUDA) == stages
        device.get_limits.cache_clear()


def test_wide_heads_leave_room_for_what_is_beside_their_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 columns of heads of 256: three tiles in flight took 237,568 bytes on an H100, which has 232,448."""
    monkeypatch.setattr(paged_attention, "get_limits", lambda _: device.DeviceLimits(132, 227 << 10, 9))
    assert [paged_attention._choose_stages(256, columns, 2, CUDA) for columns in (16, 32)] == [3, 2]
