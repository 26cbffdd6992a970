"""benchmarks.fidelity --text-ends: what it says of two outputs, and its contract, with a module in the place of llama-cpp-python."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import fidelity, text_ends

ENDS, THEIRS = {9}, {8, 9}

LLAMA = """
import types
__version__ = "0.2"
llama_speculative = types.ModuleType("llama_cpp.llama_speculative")
llama_speculative.LlamaPromptLookupDecoding = None
import sys
sys.modules["llama_cpp.llama_speculative"] = llama_speculative
llama_model_get_vocab = lambda model: model
llama_vocab_is_eog = lambda vocab, token: token == 5
class Llama:
    model = None
    def __init__(self, path, n_ctx, n_batch, n_threads, n_threads_batch, seed, draft_model, verbose):
        assert open(path, "rb").read(4) == b"GGUF"
    def n_vocab(self):
        return 9
    def reset(self):
        pass
    def tokenize(self, text, add_bos, special):
        return [1, 2]
    def generate(self, tokens, temp, top_k, top_p, min_p):
        yield 5
        raise AssertionError("the text has ended")
"""


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ([1, 2, 9], [1, 2, 9], "same"),
        ([1, 2, 3], [1, 2, 3], "same"),
        ([1, 2, 3], [1, 4, 3], "parted"),
        ([1, 2, 9], [1, 2, 3], "parted_at_end"),
        ([1, 2, 8, 4, 5], [1, 2, 8], "missed_end"),
        ([1, 2, 8, 4, 5], [1, 3, 3, 3, 3], "missed_end"),
        ([1, 2, 9], [1, 2, 9, 4], "missed_end"),
        ([1, 2], [1, 2, 3], "missed_end"),
        ([], [1], "missed_end"),
    ],
)
def test_verdict(ours: list[int], theirs: list[int], verdict: str) -> None:
    assert text_ends.compare_ends(ours, theirs, ENDS, THEIRS) == verdict


def test_contract(smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "llama_cpp.py").write_text(LLAMA)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    texts = tmp_path / "texts.jsonl"
    rows = [{"prompt": "def f(x):"}, {"messages": [{"role": "user", "content": "Hello"}]}, {"prompt": "x y " * 9000}]
    texts.write_text("\n".join(map(json.dumps, rows)))
    arguments = ["--model", "smollm2", "--texts", str(texts), "--max-tokens", "4", "--llama-python", sys.executable]
    fidelity.main(["--text-ends", *arguments])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    counts = document["texts"]["texts.jsonl"]
    assert sum(counts.get(verdict, 0) for verdict in text_ends.VERDICTS) == 2  # the third does not fit
    assert (counts["encoded"], counts["encoded_the_same"]) == (1, 0)
    assert document["ends"]["llama"] == [5]
    assert document["versions"]["llama"] == "0.2"
