"""What is compiled for others' processors is what models of every family call."""

from __future__ import annotations

from ngramspec.backends.cpu import llama_forward
from ngramspec.backends.cpu.llama_forward import LlamaDecoder


def test_no_familys_part_is_left_out() -> None:
    called = {getattr(llama_forward, name, None) for name in LlamaDecoder.find_functions.__code__.co_names}
    compiled = {getattr(llama_forward, name, None) for name in LlamaDecoder.compile_all_parts.__code__.co_names} | {
        *llama_forward.PARTS_OF_SOME
    }
    parts = {function for function in called if hasattr(function, "py_func")} - {llama_forward.run_thread}
    assert len(parts) > 10
    assert parts <= compiled
