"""Record which metadata keys change what llama.cpp computes of tiny files of every architecture, so that a test finds keys we do not read.

    python -m tools.record_keys LLAMA_CPP PYTHON      # llama.cpp's sources, and a Python with llama-cpp-python of the same version (0.3.36)

Every key that the loader of a file's architecture reads, by `src/models/*.cpp`, is left out of the file and then given other values. What
changes a logit is written to tests/models/llama_keys.json, and so are values that llama.cpp refuses: by case [key, value], null for a key
left out. Keys without which it refuses the file are not: what they are by default concerns no file that it computes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "tests" / "models" / "llama_keys.json"
VALUES: dict[str, list[Any]] = {
    "attention.causal": [False], "attention.clamp_kqv": [2.0, 0.0],
    "attention.head_count": [2, 8], "attention.head_count_kv": [1, 4], "attention.key_length": [8, 32],
    "attention.key_length_mla": [32], "attention.key_length_swa": [8], "attention.kv_lora_rank": [16],
    "attention.layer_norm_epsilon": [0.1], "attention.layer_norm_rms_epsilon": [0.1], "attention.q_lora_rank": [16],
    "attention.recurrent_layers": [[True, False] * 4],
    "attention.scale": [0.5], "attention.shared_kv_layers": [2], "attention.sliding_window": [4, 0, 12],
    "attention.sliding_window_pattern": [2, 3, 0, [True, False] * 4, [False, True, True, True] * 2],
    "attention.temperature_length": [8, 32],
    "attention.temperature_scale": [0.3], "attention.value_length": [8, 32], "attention.value_length_mla": [32],
    "attention.value_length_swa": [8], "attn_logit_softcapping": [3.0, 0.0], "block_count": [7], "context_length": [128],
    "deepstack_mapping": [[0] * 8], "embedding_length": [32, 128], "embedding_length_out": [32], "embedding_length_per_layer_input": [8],
    "embedding_scale": [2.0, 0.0], "expert_count": [4, 0], "expert_feed_forward_length": [16, 64, [32] * 7 + [16]],
    "expert_gating_func": [0, 1, 2, 3], "expert_group_count": [1, 2, 4], "expert_group_used_count": [1, 2],
    "expert_shared_count": [1, 3, 0],
    "expert_shared_feed_forward_length": [16, 64], "expert_used_count": [2, 8, [3] * 7 + [2]], "expert_weights_norm": [True, False],
    "expert_weights_scale": [1.7, 0.0, 1.0], "feed_forward_length": [64], "final_logit_softcapping": [3.0, 0.0],
    "full_attention_interval": [2], "interleave_moe_layer_step": [2], "leading_dense_block_count": [0, 2], "logit_scale": [0.7],
    "moe_latent_size": [16], "n_deepstack_layers": [1], "nextn_predict_layers": [1], "residual_scale": [0.5, 0.0],
    "rope.dimension_count": [8, 4], "rope.dimension_count_swa": [8, 4],
    "rope.dimension_sections": [[1, 1, 1, 1], [4, 4, 0, 0], [8, 0, 0, 0]], "rope.freq_base": [500.0], "rope.freq_base_swa": [500.0],
    "rope.scale_linear": [2.0], "rope.scaling.alpha": [10.0], "rope.scaling.attn_factor": [1.3], "rope.scaling.factor": [2.0, 1.0, 0.0],
    "rope.scaling.finetuned": [True, False], "rope.scaling.original_context_length": [8, 32],
    "rope.scaling.type": ["none", "linear", "yarn", "longrope"], "rope.scaling.yarn_beta_fast": [4.0], "rope.scaling.yarn_beta_slow": [2.0],
    "rope.scaling.yarn_log_multiplier": [0.05, 0.3, 0.0], "shortconv.l_cache": [4], "ssm.conv_kernel": [3], "ssm.group_count": [1, 4],
    "ssm.inner_size": [32], "ssm.state_size": [8], "ssm.time_step_rank": [2], "use_parallel_residual": [True, False],
    "vocab_size": [200, 320],
}  # fmt: skip
_READ = re.compile(r"ml\.get_(?:key|key_or_arr|arr|arr_n)\(\s*LLM_KV_(\w+)")
_WORKER = """
import ctypes, json, os, sys, llama_cpp
silent = llama_cpp.llama_log_callback(lambda *_: None)
llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
out, nothing = os.fdopen(os.dup(1), "w"), os.open(os.devnull, os.O_WRONLY)
os.dup2(nothing, 1), os.dup2(nothing, 2)
for line in sys.stdin:
    try:
        model = llama_cpp.Llama(line.strip(), n_ctx=256, logits_all=True, verbose=False, n_threads=1, n_threads_batch=1, type_k=0, type_v=0)
        model.eval([i * 31 % 250 for i in range(40)])
        found = [[float(x) for x in row[:12]] for row in model.scores[:40]]
        model.close()
    except Exception:
        found = None
    print(json.dumps(found), file=out, flush=True)
"""


class LlamaCpp:
    """llama.cpp in a process of its own, which a file may end."""

    def __init__(self, python: str) -> None:
        self.python = python
        self.process: subprocess.Popen[str] | None = None

    def compute(self, path: Path) -> list[list[float]] | None:
        """Return logits [40, 12] of a file; None if it is refused, or ends the process."""
        if self.process is None:
            quick = {**os.environ, "GGML_NO_BACKTRACE": "1"}  # a debugger takes a second for each file that ends the process
            self.process = subprocess.Popen(
                [self.python, "-c", _WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=quick
            )
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        if line := self.process.stdout.readline():
            found: list[list[float]] | None = json.loads(line)
            return found
        self.process.wait()
        self.process = None
        return None


def read_keys(sources: Path) -> dict[str, set[str]]:
    """Return the keys that llama.cpp's loader reads, by architecture."""
    names = (sources / "src" / "llama-arch.cpp").read_text()
    keys = dict(re.findall(r"{ LLM_KV_(\w+),\s*\"%s\.([\w.]+)\"", names))
    parents = dict(
        re.findall(r"struct llama_model_(\w+) : public llama_model_(\w+)", (sources / "src" / "models" / "models.h").read_text())
    )
    loaders = {}
    for path in (sources / "src" / "models").glob("*.cpp"):
        loaders |= dict(re.findall(r"void llama_model_(\w+)::load_arch_hparams\(.*?\n(.*?)\n}", path.read_text(), re.DOTALL))
    (common,) = re.findall(r"void llama_model_base::load_hparams\(.*?\n}", (sources / "src" / "llama-model.cpp").read_text(), re.DOTALL)
    found = {}
    for name, architecture in re.findall(r"{ LLM_ARCH_(\w+),\s*\"([\w.-]+)\"", names):
        loader = name.lower()
        while loader not in loaders and loader in parents:
            loader = parents[loader]
        body = common + loaders.get(loader, "").replace("load_swa_pattern(", "ml.get_key(LLM_KV_ATTENTION_SLIDING_WINDOW_PATTERN, ")
        found[architecture] = {keys[key] for key in _READ.findall(body) if key in keys}
    return found


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    import tiny_architectures as tiny

    keys, llama, record = read_keys(Path(sys.argv[1])), LlamaCpp(sys.argv[2]), {}
    different = {(architecture, *sorted(stated)): case for case, (architecture, _, stated, _) in reversed(tiny.CASES.items())}
    for case in sorted(different.values()):
        architecture = tiny.CASES[case][0]
        with tempfile.TemporaryDirectory() as folder:
            usual = llama.compute(tiny.write(Path(folder) / "model.gguf", case))
            record[case] = [
                [key, value]
                for key in sorted(keys[architecture] & VALUES.keys())
                for value in (None, *VALUES[key])
                if (found := llama.compute(tiny.write(Path(folder) / "model.gguf", case, changed={key: value}))) != usual
                and (found is not None or value is not None)
            ]
        print(case, len(record[case]), flush=True)
    RECORD.write_text("{\n" + ",\n".join(f"{json.dumps(case)}: {json.dumps(found)}" for case, found in record.items()) + "\n}\n")


if __name__ == "__main__":
    main()
