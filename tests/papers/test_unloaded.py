"""The methods of the literature cost nothing until they are asked for: an engine completes without loading a module of `papers`."""

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import sys
from ngramspec.engine.llm_engine import Engine
from ngramspec.sampling_params import SamplingParams
from tests import tiny

with Engine(tiny.tiny_model("llama"), tokenizer=tiny.byte_tokenizer(), max_seqs=1, max_model_len=64) as engine:
    engine.complete([1, 2, 3, 1, 2], SamplingParams(max_tokens=4))
print([name for name in sys.modules if name.startswith("ngramspec.papers")])
"""


def test_a_completion_loads_no_module_of_papers() -> None:
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", CODE], cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
