"""Record how llama.cpp splits texts for every `tokenizer.ggml.pre`: token ids by SmolLM2's vocabulary, which a test compares with ours.

    python -m tools.record_splits SmolLM2.gguf

needs llama-cpp-python (0.3.36 wrote what is recorded). It writes tests/models/splits.json: the texts, the ids of all texts by the split
`gpt-2`, and by every other name the ids of those texts that it splits otherwise. A later llama.cpp may know further names; they are read
from `ngramspec.models.splits`, so add them there first.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

from ngramspec.models import gguf
from ngramspec.models.splits import NAMES

PRE = "tokenizer.ggml.pre"
RECORD = Path(__file__).parent.parent / "tests" / "models" / "splits.json"
BASE = "gpt-2"
TEXTS = (
    "", " ", "  123", "\t\t10", "don't", "DON'T I'Ll we've SHE'D o'clock 'S 's", "Hello, world!", "I'm, you're; he'll: 'tis",
    "def f(x):\n    return x ** 2  # sq\n", "\tif (x && y) {\n\t\treturn !z;\n\t}\n", "x = {'s': 't'}\n", "a  b   c    d\t\te",
    "\r\n\r\n  x\r\ny \n\n\n z\n", " \n \n\t\n", "\n  indented\n\n    more\n", "foo \n\n bar  \n\n\n  baz ", " " * 16 + "x",
    "x" + " " * 20, "\n" * 5, "1234567890 12 3.14 1,000,000 0x1F", "a1b22c333d4444e55555", "12345 678901234 ٣٤٥٦",
    "½ ² Ⅷ ①②③ 一二三 〇", "中文字符，测试。你好123世界", "日本語のテキスト カタカナ 東京２０２４", "　全角空白　テスト",
    "สวัสดีชาวโลก ๑๒๓", "한국어 텍스트 ㄱㄴㄷ", "हिन्दी में पाठ १२३ বাংলা", "العربية ١٢٣، نص", "Привет, МИР как Дела",
    "café naïve Ärger ÉCOLE", "e\u0301te\u0301 a\u0308b Z\u0351\u036balgo", "Türkiye'nin İstanbul'da",
    "👩\u200d👩\u200d👧\u200d👦 🙂🙃 emoji🎉x", "\u00a0x\u3000y\u2003z\u2028w\u0085v", "a\u200bb\ufeffc\u00adz",
    "x\x00y\x1f\x7fz\x0b\x0c \x1c", "𝒳𝟙𝟚𝟛 𐐀𐐨", "ǅ Ǆ ǆ ʰ ª º", "don\u2019t ſ 'ſ K", "...!!!???—–“quoted”‘x’…",
    "$100 + 50% = ^~|`<>", "((a))[b]{c}//--==>>\n\n}", "== a != b ===\r\n//x\n/", "http://a.b/c?d=e&f=g#h",
    "snake_case camelCase HTMLParser XMLHttp2Request iOS", "<sentinel:12>IMGIMGABCZ</s>", "The quick (brown) fox|jumps.over",
    "a b c d e f", "1 2 3 45 678 9012",
)  # fmt: skip


def main() -> None:
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    model = gguf.read(Path(sys.argv[1]))
    found: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "vocabulary.gguf"
        for name in NAMES:
            path.write_bytes(make_header(model, name))
            found[name] = encode_texts(llama_cpp, path)
    base = found.pop(BASE)
    others: dict[str, dict[int, list[int]]] = {
        name: {i: ids for i, (ids, usual) in enumerate(zip(each, base, strict=True)) if ids != usual} for name, each in found.items()
    }
    alike: dict[str, list[str]] = {}
    for name, differing in others.items():
        alike.setdefault(json.dumps(differing), []).append(name)
    groups = [{"names": names, "ids": json.loads(differing)} for differing, names in alike.items()]
    RECORD.write_text(json.dumps({"texts": TEXTS, BASE: base, "others": groups}, ensure_ascii=True, separators=(",", ":")) + "\n")


def make_header(model: gguf.Gguf, name: str) -> bytes:
    """Return the header of a file with another `tokenizer.ggml.pre`, and no tensors: all that llama.cpp needs for its vocabulary."""
    header = model.headers[0]
    keys = [header.raw[start:end] for key, (start, end) in header.spans.items() if key != PRE]
    keys.append(struct.pack("<Q", len(PRE)) + PRE.encode() + struct.pack("<IQ", 8, len(name.encode())) + name.encode())
    head = b"".join([b"GGUF", struct.pack("<IQQ", 3, 0, len(keys)), *keys])
    return head + bytes(-len(head) % 32)


def encode_texts(llama_cpp: Any, path: Path) -> list[list[int]]:
    """Return the ids of all texts, without parsing control tokens."""
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    vocabulary, found = llama_cpp.llama_model_get_vocab(model), []
    for text in map(str.encode, TEXTS):
        ids = (llama_cpp.llama_token * (len(text) + 1))()
        n = llama_cpp.llama_tokenize(vocabulary, text, len(text), ids, len(ids), False, False)
        found.append(list(ids[:n]))
    llama_cpp.llama_model_free(model)
    return found


if __name__ == "__main__":
    main()
