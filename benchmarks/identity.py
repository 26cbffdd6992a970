"""Is the text the same, whatever decodes it? `python -m benchmarks.identity …` is `python -m benchmarks.decode --identity …`."""

from __future__ import annotations

import sys

from benchmarks import decode

if __name__ == "__main__":
    decode.main(["--identity", *sys.argv[1:]])
