"""What is compiled for others' processors is what models of every family call."""

from __future__ import annotations

import numba
import pytest

from ngramspec.backends.cpu import llama_forward
from ngramspec.backends.cpu.codegen.targets import list_targets
from ngramspec.backends.cpu.llama_forward import LlamaDecoder
from ngramspec.datastore.bundled_code import LEVELS


def test_no_familys_part_is_left_out() -> None:
    called = {getattr(llama_forward, name, None) for name in LlamaDecoder.find_functions.__code__.co_names}
    compiled = {getattr(llama_forward, name, None) for name in LlamaDecoder.compile_all_parts.__code__.co_names} | {
        *llama_forward.PARTS_OF_SOME
    }
    parts = {function for function in called if hasattr(function, "py_func")} - {llama_forward.run_thread}
    assert len(parts) > 10
    assert parts <= compiled


def test_a_level_has_the_kernels_that_its_processors_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor with AVX-512 both levels are compiled for."""
    monkeypatch.setattr(numba.config, "CPU_NAME", LEVELS[0].name)
    monkeypatch.setattr(numba.config, "CPU_FEATURES", LEVELS[0].features)
    fitting = {level.name: [each.name for each in list_targets()[:-1] if each.fits_level(level)] for level in LEVELS}
    assert fitting == {"x86-64-v4": ["AVX-512 VNNI", "AVX2"], "x86-64-v3": ["AVX2"]}
