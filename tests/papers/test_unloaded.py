"""The methods of the literature cost nothing until they are asked for: an engine completes without loading a module of `papers`."""

import subprocess
import sys
from pathlib import Path

import tiny_gguf

CODE = """
import sys
from ngramspec.engine.llm_engine import Engine
from ngramspec.sampling_params import SamplingParams

with Engine(sys.argv[1], max_seqs=1, max_model_len=64) as engine:
    engine.complete([1, 2, 3, 1, 2], SamplingParams(max_tokens=4))
print([name for name in sys.modules if name.startswith("ngramspec.papers")])
"""


def test_a_completion_loads_no_module_of_papers(tmp_path: Path) -> None:
    """Nor does the first start of a file: see `engine/test_start`."""
    path = tiny_gguf.write_started(tmp_path / "m.gguf")
    done = subprocess.run([sys.executable, "-c", CODE, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
