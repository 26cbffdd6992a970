"""The self-test at load finds what depends on more than a row, and says which kernel in which shape."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import small
import torch

from ngramspec.backends.base import Runner
from ngramspec.backends.cuda import cuda_runner as runner_module
from ngramspec.backends.cuda import kv_move
from ngramspec.backends.cuda.cuda_runner import CudaRunner
from ngramspec.backends.cuda.row_invariant_linear import CudaProduct


def bind(device: str) -> CudaRunner:
    return small.bind("llama", torch.float32, device, narrow=True, n_layers=1, max_rows=2, max_seqs=2)


def quick(patch: pytest.MonkeyPatch) -> None:
    """Without what tests of the runner run."""
    patch.setattr(runner_module, "find_violation", lambda product, counts: None)
    patch.setattr(Runner, "self_test", lambda self: True)
    patch.setattr(CudaRunner, "_test_pieces", lambda self, n: True)


def test_every_graph_is_compared_with_kernels_launched_one_by_one(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quick(monkeypatch)
    faulty: list[int] = []
    captured: list[Callable[[], None]] = []

    def record(run: Callable[[], None]) -> Callable[[], None]:
        captured.append(run)
        n = len(captured)

        def replay() -> None:
            run()
            if n in faulty:
                runner._logits[0, 5] += 1e-3

        return replay

    monkeypatch.setattr(runner_module, "make_recorder", lambda device: record)
    runner = bind(device)
    assert len(captured) == 3
    assert (runner.exactness, runner.violations) == ("bitwise", [])
    faulty.append(2)
    with caplog.at_level(logging.WARNING):
        runner.prove()
    assert runner.exactness == "numerical"
    bucket = runner._graphs.captured[1]
    assert runner.violations == [f"the graph of {bucket}, {how}" for how in ("alone", "greedily", "sampled")]
    assert f"the graph of {bucket}, sampled" in caplog.text
    runner.pool.check_integrity()
    assert runner.pool.n_available == runner.pool.n_blocks


def test_an_accepted_tree_that_is_not_moved_is_found(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    monkeypatch.setattr(kv_move, "commit", lambda *_: None)
    runner = bind(device)
    assert runner.exactness == "numerical"
    assert runner.violations == ["the walk, the move of keys and values, or the replay of an accepted tree"]


def test_a_product_of_a_later_layer_is_named(device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    quick(monkeypatch)
    seen: list[tuple[int, int]] = []

    def some(product: CudaProduct, counts: list[int]) -> str | None:
        seen.append((product.n_out, product.n_in))
        return "product with a weight of (32, 32) at 17 rows in 1 pieces" if seen.count((32, 32)) == 2 else None

    monkeypatch.setattr(runner_module, "find_violation", some)
    runner = small.bind("llama", torch.float32, device, narrow=True, n_layers=2, max_rows=2)
    assert runner.exactness == "numerical"
    assert "product with a weight of (32, 32) at 17 rows" in caplog.text
