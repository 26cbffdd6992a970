"""Record the logits that llama.cpp computes of tiny files of every architecture, which a test compares with ours.

    python tests/tiny_architectures.py FOLDER      # writes the files
    python -m tools.record_logits FOLDER           # with llama-cpp-python (0.3.36 computed what is recorded)

It writes tests/models/logits.json: by the name of a file, the first logits of some rows of one text.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

RECORD = Path(__file__).parent.parent / "tests" / "models" / "logits.json"
TEXT = [i * 31 % 250 for i in range(40)]
ROWS, WORDS = (0, 7, 8, 20, 39), 12


def main() -> None:
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    found = {}
    for path in sorted(Path(sys.argv[1]).glob("*.gguf")):
        model = llama_cpp.Llama(str(path), n_ctx=256, logits_all=True, verbose=False, n_threads=1, type_k=0, type_v=0, flash_attn=False)
        model.eval(TEXT)
        found[path.stem] = [[float(f"{x:.6g}") for x in model.scores[row][:WORDS]] for row in ROWS]
    document = {"text": TEXT, "rows": ROWS, "logits": found}
    RECORD.write_text(json.dumps(document).replace("]], ", "]],\n").replace("{", "{\n", 1) + "\n")


if __name__ == "__main__":
    main()
