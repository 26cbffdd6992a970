"""llama.cpp's server from the package `xllamacpp`, run by an interpreter that has it: `_llama_server.py MODEL THREADS CONTEXT SPEC_TYPE`.

Prints one line of JSON, its port and the instruction sets that it uses, and serves until standard input ends.
"""

import json
import sys

import xllamacpp

model, threads, context, spec_type = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
params = xllamacpp.CommonParams()
params.model.path = model
params.n_ctx, params.n_parallel, params.port = context, 1, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
params.n_cache_reuse = 256  # as the presets --fim-… have it: keys and values of a text that has moved are moved, which is not exact
if spec_type != "none":
    params.speculative.types = [
        getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{spec_type.upper().replace('-', '_')}")
    ]
server = xllamacpp.Server(params)
flags = [part.split(" = ")[0].split(":")[-1].strip() for part in xllamacpp.get_system_info().split("|") if "= 1" in part]
print(json.dumps({"address": server.listening_address, "instruction_sets": " ".join(flags)}), flush=True)
sys.stdin.read()
