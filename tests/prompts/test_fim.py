"""Fill-in-the-middle prompts: every format's exact ids, nothing injected by texts, and what is cut where."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ngramspec.prompts.fim import FORMATS, LINES_AHEAD, Fim, FimOptions, Format, Order

CODE = ["def add(a, b):\n    return a + b\n", "import os\n\nfor name in os.listdir('.'):\n    print(name)\n", "class A:\n    pass\n"]
BOS, EOS = "<s>", "</s>"
PREFIX, SUFFIX = "def add(a, b):\n    ret", " + b\n"
FILES = [("lib/a.py", "import os\n"), ("b.py", "class A:\n    pass")]
"""The second has no line end: the prompt gives it one."""

TOKENS = {
    "qwen": ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|endoftext|>"),
    "codegemma": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_separator|>"),
    "granite": ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|filename|>", "<|reponame|>", "<|end_of_text|>"),
    "pipes": ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    "starcoder2": ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<repo_name>", "<file_sep>", "<|endoftext|>"),
    "starcoder": ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<filename>", "<reponame>", "<gh_stars>", "<|endoftext|>"),
    "angles": ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
    "santacoder": ("<fim-prefix>", "<fim-middle>", "<fim-suffix>", "<fim-pad>", "<|endoftext|>"),
    "deepseek": ("<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜end▁of▁sentence｜>", "<|EOT|>"),
    "codellama": ("▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"),
    "codestral": ("[SUFFIX]", "[PREFIX]", "[INST]"),
    "glm": ("<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>", "<|user|>", "<|endoftext|>"),
}
"""What the added vocabulary of each family has, beside <s> and </s>."""


def bytes_tokenizer(tokens: tuple[str, ...], *, special: bool = True, bos: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE, trained on a few lines, with a family's control tokens; `bos`: it begins every text with <s>."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CODE, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
    return _with(backend, tokens, special=special, bos=bos)


def sentencepiece_tokenizer(tokens: tuple[str, ...], *, bos: bool = True) -> PreTrainedTokenizerFast:
    """As Llama 2 has it: blanks are part of words, every text begins with one, what no word covers is spelled in bytes."""
    words = ["▁", "d", "e", "f", "▁d", "▁de", "▁def", "a", "b", "+", "\n", "☺"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab, [("▁", "d"), ("▁d", "e"), ("▁de", "f")], byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    backend.decoder = decoders.Sequence(steps)
    return _with(backend, tokens, special=True, bos=bos)


def _with(backend: Tokenizer, tokens: tuple[str, ...], *, special: bool, bos: bool) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    backend.add_tokens([AddedToken(token, special=special, normalized=False) for token in tokens])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS)


def ids_of(tokenizer: PreTrainedTokenizerFast, *parts: str | tuple[str]) -> list[int]:
    """Ids of parts: a tuple is a control token, a string a text without any."""
    found: list[int] = []
    for part in parts:
        if isinstance(part, tuple):
            found.append(tokenizer.get_added_vocab()[part[0]])
        else:
            assert not any(token in part for token in tokenizer.get_added_vocab())
            found += tokenizer(part, add_special_tokens=False)["input_ids"]
    return found


def detect(tokenizer: Any) -> Fim:
    fim = Fim.detect(tokenizer)
    assert fim is not None
    return fim


ALONE: dict[str, list[str | tuple[str]]] = {
    "qwen": [("<|fim_prefix|>",), PREFIX, ("<|fim_suffix|>",), SUFFIX, ("<|fim_middle|>",)],
    "codegemma": [("<s>",), ("<|fim_prefix|>",), PREFIX, ("<|fim_suffix|>",), SUFFIX, ("<|fim_middle|>",)],
    "granite": [("<|fim_prefix|>",), PREFIX, ("<|fim_suffix|>",), SUFFIX, ("<|fim_middle|>",)],
    "pipes": [("<|fim_prefix|>",), PREFIX, ("<|fim_suffix|>",), SUFFIX, ("<|fim_middle|>",)],
    "starcoder2": [("<fim_prefix>",), PREFIX, ("<fim_suffix>",), SUFFIX, ("<fim_middle>",)],
    "starcoder": [("<fim_prefix>",), PREFIX, ("<fim_suffix>",), SUFFIX, ("<fim_middle>",)],
    "angles": [("<fim_prefix>",), PREFIX, ("<fim_suffix>",), SUFFIX, ("<fim_middle>",)],
    "santacoder": [("<fim-prefix>",), PREFIX, ("<fim-suffix>",), SUFFIX, ("<fim-middle>",)],
    "deepseek": [("<s>",), ("<｜fim▁begin｜>",), PREFIX, ("<｜fim▁hole｜>",), SUFFIX, ("<｜fim▁end｜>",)],
    "codellama": [("<s>",), ("▁<PRE>",), PREFIX, ("▁<SUF>",), SUFFIX, ("▁<MID>",)],
    "codestral": [("<s>",), ("[SUFFIX]",), SUFFIX, ("[PREFIX]",), PREFIX],
    "glm": [("<|code_prefix|>",), PREFIX, ("<|code_suffix|>",), SUFFIX, ("<|code_middle|>",)],
}
A, B = "import os\n", "class A:\n    pass\n"
WITH_FILES: dict[str, list[str | tuple[str]]] = {
    "qwen": [
        *(("<|repo_name|>",), "shop\n", ("<|file_sep|>",), "lib/a.py\n" + A, ("<|file_sep|>",), "b.py\n" + B, ("<|file_sep|>",), "c.py\n"),
        *ALONE["qwen"],
    ],
    "codegemma": [
        *(("<s>",), "lib/a.py\n" + A, ("<|file_separator|>",), "b.py\n" + B, ("<|file_separator|>",), "c.py\n"),
        *ALONE["codegemma"][1:],
    ],
    "granite": [
        *(("<|reponame|>",), "shop", ("<|filename|>",), "lib/a.py\n" + A, ("<|filename|>",), "b.py\n" + B, ("<|filename|>",), "c.py\n"),
        *ALONE["granite"],
    ],
    "pipes": [("<|fim_prefix|>",), "#lib/a.py\n" + A, "#b.py\n" + B, "#c.py\n", *ALONE["pipes"][1:]],
    "starcoder2": [
        *(("<repo_name>",), "shop", ("<file_sep>",), "lib/a.py\n" + A, ("<file_sep>",), "b.py\n" + B, ("<file_sep>",)),
        *(("<fim_prefix>",), "c.py\n", *ALONE["starcoder2"][1:]),
    ],
    "starcoder": [
        *(("<reponame>",), "shop", ("<filename>",), "lib/a.py\n" + A, ("<filename>",), "b.py\n" + B, ("<filename>",), "c.py\n"),
        *ALONE["starcoder"],
    ],
    "angles": [("<fim_prefix>",), "#lib/a.py\n" + A, "#b.py\n" + B, "#c.py\n", *ALONE["angles"][1:]],
    "santacoder": [("<fim-prefix>",), "#lib/a.py\n" + A, "#b.py\n" + B, "#c.py\n", *ALONE["santacoder"][1:]],
    "deepseek": [("<s>",), ("<｜fim▁begin｜>",), "#lib/a.py\n" + A, "#b.py\n" + B, "#c.py\n", *ALONE["deepseek"][2:]],
    "codellama": [("<s>",), ("▁<PRE>",), "#lib/a.py\n" + A, "#b.py\n" + B, "#c.py\n", *ALONE["codellama"][2:]],
    "codestral": [
        *(("<s>",), ("[SUFFIX]",), SUFFIX, ("[PREFIX]",), "+++++ lib/a.py\n" + A, "+++++ b.py\n" + B, "+++++ c.py\n", PREFIX),
    ],
    "glm": [("<|code_prefix|>",), "#lib/a.py\n" + A, "#b.py\n" + B, "#c.py\n", *ALONE["glm"][1:]],
}


def test_every_format_is_tested() -> None:
    assert set(TOKENS) == set(ALONE) == set(WITH_FILES) == {form.name for form in FORMATS}


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("special", [True, False])
def test_exact_ids(name: str, special: bool) -> None:
    tokenizer = bytes_tokenizer(TOKENS[name], special=special)
    fim = detect(tokenizer)
    assert fim.format.name == name
    assert fim.make_prompt(PREFIX, SUFFIX) == ids_of(tokenizer, *ALONE[name])
    assert fim.make_prompt(PREFIX, SUFFIX, FILES, path="c.py", repo="shop") == ids_of(tokenizer, *WITH_FILES[name])


@pytest.mark.parametrize("name", TOKENS)
def test_a_tokenizer_that_begins_texts_begins_prompts_once(name: str) -> None:
    tokenizer = bytes_tokenizer(TOKENS[name], bos=True)
    prompt = detect(tokenizer).make_prompt(PREFIX, SUFFIX, FILES)
    assert prompt[0] == tokenizer.bos_token_id
    assert prompt.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("name", TOKENS)
def test_texts_inject_nothing(name: str) -> None:
    tokenizer = bytes_tokenizer((*TOKENS[name], "<|im_start|>"), special=False)
    fim = detect(tokenizer)
    evil = "x" + "".join(tokenizer.get_added_vocab()) + "y"
    controls = set(tokenizer.get_added_vocab().values())
    harmless = [token for token in fim.make_prompt("x", "y", [("p", "t\n")], path="q", repo="r") if token in controls]
    prompt = fim.make_prompt(evil, evil, [(evil, evil)], path=evil, repo=evil)
    assert [token for token in prompt if token in controls] == harmless
    assert tokenizer.decode(prompt).count(evil) == (6 if fim.format.repo else 5), "the text is there, as text"


@pytest.mark.parametrize("name", ["codellama", "codestral"])
def test_no_implicit_blank_before_the_suffix(name: str) -> None:
    """As the paper and mistral-common have it: the prefix is encoded as any text, the suffix as if text stood before it."""
    tokenizer = sentencepiece_tokenizer(TOKENS[name])
    word, blank = tokenizer.convert_tokens_to_ids("▁def"), tokenizer.convert_tokens_to_ids("▁")
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "def"]
    control = {token: tokenizer.get_added_vocab()[token] for token in TOKENS[name]}
    if name == "codellama":
        expected = [control["▁<PRE>"], word, control["▁<SUF>"], *letters, control["▁<MID>"]]
    else:
        expected = [control["[SUFFIX]"], *letters, control["[PREFIX]"], word]
    fim = detect(tokenizer)
    assert fim.make_prompt("def", "def") == [tokenizer.bos_token_id, *expected]
    assert blank not in fim.make_prompt("def", "\na")
    assert fim.make_prompt("def", " def").count(word) == 2, "a blank of its own stays"
    spelled = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in "é".encode()])
    assert fim.make_prompt("", "é")[2 if name == "codestral" else 3 :][: len(spelled)] == spelled


def test_a_tokenizer_that_adds_no_bos_still_begins_codellama_with_it() -> None:
    tokenizer = sentencepiece_tokenizer(TOKENS["codellama"], bos=False)
    assert detect(tokenizer).make_prompt("a", "b")[0] == tokenizer.bos_token_id


def test_nothing_to_fill_with() -> None:
    assert Fim.detect(bytes_tokenizer(("<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>"))) is None, "no middle token"
    assert Fim.detect(bytes_tokenizer(("<repo_name>", "<file_sep>", "<filename>"))) is None, "SmolLM2's"
    assert Fim.detect(None) is None
    assert Fim.detect(object()) is None


def test_tokens_of_the_ordinary_vocabulary_are_no_control_tokens() -> None:
    words = {"<fim_prefix>": 0, "<fim_suffix>": 1, "<fim_middle>": 2, "a": 3}
    backend = Tokenizer(models.WordLevel(words, unk_token="a"))
    assert Fim.detect(PreTrainedTokenizerFast(tokenizer_object=backend)) is None


@pytest.mark.parametrize("name", TOKENS)
def test_stop_ids(name: str) -> None:
    tokenizer = bytes_tokenizer((*TOKENS[name], "<think>"))
    fim, added = detect(tokenizer), tokenizer.get_added_vocab()
    unrelated = {"<s>", "<think>", "<gh_stars>", "[INST]"}
    assert set(fim.stop_ids) == {number for token, number in added.items() if token not in unrelated}


QWEN = bytes_tokenizer(TOKENS["qwen"])


def between(prompt: list[int], form: Format, added: dict[str, int]) -> tuple[list[int], list[int]]:
    """(prefix, suffix) of a prompt of Qwen's."""
    pre, suf = prompt.index(added[form.prefix]), prompt.index(added[form.suffix])
    return prompt[pre + 1 : suf], prompt[suf + 1 : -1]


def test_too_long_for_the_room_keeps_three_to_one() -> None:
    fim, added = detect(QWEN), QWEN.get_added_vocab()
    head, tail = ids_of(QWEN, "a1" * 500), ids_of(QWEN, "b2" * 500)
    prompt = fim.make_prompt("a1" * 500, "b2" * 500, [("p", "t")], limit=403)
    kept_head, kept_tail = between(prompt, fim.format, added)
    assert len(prompt) <= 403
    assert 275 < len(kept_head) <= 300
    assert (kept_head, kept_tail) == (head[-len(kept_head) :], tail[:100])
    assert added["<|file_sep|>"] not in prompt, "further files go first"
    short_tail = between(fim.make_prompt("a1" * 500, "b2" * 10, limit=403), fim.format, added)
    assert short_tail[1] == ids_of(QWEN, "b2" * 10)
    assert 350 < len(short_tail[0]) <= 380, "what the suffix leaves is the prefix's"
    short_head = between(fim.make_prompt("a1" * 10, "b2" * 500, limit=403), fim.format, added)
    assert short_head[0] == ids_of(QWEN, "a1" * 10)
    assert 350 < len(short_head[1]) <= 380


@pytest.mark.parametrize("name", TOKENS)
def test_a_suffix_of_so_many_tokens_at_most(name: str) -> None:
    tokenizer = bytes_tokenizer(TOKENS[name])
    orders: tuple[Order, ...] = ("prefix-first", "suffix-first")
    for order in orders:
        whole, cut = Fim.detect(tokenizer, FimOptions(order)), Fim.detect(tokenizer, FimOptions(order, suffix_tokens=20))
        assert whole is not None
        assert cut is not None
        shown = SUFFIX + "b" * 100
        expected = ids_of(tokenizer, shown)[:20]
        assert cut.make_prompt(PREFIX, shown, FILES) == whole.make_prompt(PREFIX, tokenizer.decode(expected), FILES)
        assert cut.make_prompt(PREFIX, "b" * 20) == whole.make_prompt(PREFIX, "b" * 20)
        named = list(cut.list_next_prompts(PREFIX, shown, "x = 1\n"))
        assert named[-1] == cut.make_prompt(PREFIX + "x = 1\n", shown)


def test_files_that_do_not_fit_go_from_the_first_on() -> None:
    fim = detect(QWEN)
    files = [(f"f{i}.py", f"x{i} = {i}\n") for i in range(4)]
    whole = [fim.make_prompt("def a", "b", files[i:]) for i in range(5)]
    for kept, prompt in enumerate(whole):
        assert fim.make_prompt("def a", "b", files, limit=len(prompt)) == prompt
        if kept < 4:
            assert fim.make_prompt("def a", "b", files, limit=len(prompt) - 1) == whole[kept + 1]


@pytest.mark.parametrize("name", TOKENS)
def test_a_file_less_is_the_prompt_without_it(name: str) -> None:
    fim = detect(bytes_tokenizer(TOKENS[name]))
    both, one, none = (fim.make_prompt(PREFIX, SUFFIX, files) for files in (FILES, FILES[1:], []))
    assert fim.make_prompt(PREFIX, SUFFIX, FILES, limit=len(both) - 1) == one
    assert fim.make_prompt(PREFIX, SUFFIX, FILES, limit=len(one) - 1) == none


def test_a_keystroke_in_a_long_file_keeps_the_beginning_of_its_prompt() -> None:
    fim = detect(QWEN)
    text = "".join(f"x{i} = {i}\n" for i in range(400))
    prompts = [fim.make_prompt(text[:n], "\n", limit=500) for n in range(3000, 3100)]
    starts = [prompt[:200] for prompt in prompts]
    assert sum(a != b for a, b in itertools.pairwise(starts)) <= 4


def test_a_window_that_moves_down_a_file_keeps_the_beginning_of_its_prompt() -> None:
    lines = [f"def f{i}(x):" if i % 5 == 0 else f"    y = x + {i // 5}" for i in range(600)]
    tokenizer, size = bytes_tokenizer(TOKENS["qwen"]), 128
    fim, as_sent = Fim.detect(tokenizer, FimOptions(window=size)), Fim.detect(tokenizer)
    assert fim is not None
    assert as_sent is not None
    starts = []
    for end in range(size, len(lines)):
        prefix = "\n".join([*lines[end - size : end], "    z"])
        begun = tokenizer.decode(fim.make_prompt(prefix, "\n")[1:]).split("\n")
        starts.append(len(lines[:end]) - begun.index("    z<|fim_suffix|>"))
        assert begun[0] == lines[starts[-1]]
        assert end - size <= starts[-1] < end - size + size // 4 + 1
    assert all(start % 5 == 0 for start in starts), "with a definition"
    assert sum(a != b for a, b in itertools.pairwise(starts)) < len(starts) / 8
    for n in (size - 1, size + 1):
        prefix = "\n".join([*lines[:n], "z"])
        assert fim.make_prompt(prefix, "\n") == as_sent.make_prompt(prefix, "\n")


def test_many_files_of_which_the_first_go_begin_with_the_same() -> None:
    tokenizer = bytes_tokenizer(TOKENS["qwen"])
    fim, as_sent = Fim.detect(tokenizer, FimOptions(window=256)), Fim.detect(tokenizer)
    assert fim is not None
    assert as_sent is not None
    files = [(f"{i}.py", f"x = {i}\n") for i in range(200)]
    begins = []
    for first in range(len(files) - 16):
        given = files[first : first + 16]
        prompt = tokenizer.decode(fim.make_prompt("a", "b", given))
        shown = [f"{name}\n{text}" in prompt for name, text in given]
        begins.append(first + shown.index(True))
        assert all(shown[shown.index(True) :])
        assert sum(shown) >= 4
    assert sum(a != b for a, b in itertools.pairwise(begins)) < len(begins) / 5
    assert fim.make_prompt("a", "b", files[:8]) == as_sent.make_prompt("a", "b", files[:8])
    assert as_sent.make_prompt("a", "b", files[:16]) != fim.make_prompt("a", "b", files[:16])


def test_a_window_that_is_cut_by_characters_begins_with_a_whole_line() -> None:
    text = "".join(f"def f{i}(x):\n" for i in range(300))
    fim = Fim.detect(bytes_tokenizer(TOKENS["qwen"]), FimOptions(window="any"))
    assert fim is not None
    starts = [tuple(fim.make_prompt(text[end - 1000 : end], "\n")[1:20]) for end in range(1000, 1300)]
    assert len(set(starts)) < 12
    assert len(fim.make_prompt("x\n" * 31, "\n")) == len(fim.make_prompt("x\n" * 30, "\n")) + len(fim.make_prompt("x\n", "\n")) - len(
        fim.make_prompt("", "\n")
    )


@pytest.mark.parametrize(("form", "order"), [("qwen", "prefix-first"), ("qwen", "suffix-first"), ("codestral", "prefix-first")])
def test_the_window_that_begins_elsewhere_soon_is_named_before(form: str, order: Order) -> None:
    lines = [f"def f{i}(x):" if i % 5 == 0 else f"    y = x + {i // 5}" for i in range(600)]
    size, tokenizer = 128, bytes_tokenizer(TOKENS[form])
    fim = Fim.detect(tokenizer, FimOptions(order, size))
    assert fim is not None

    def prefix(end: int) -> str:
        return "\n".join([*lines[end - size : end], "    z"])

    ends = range(size, len(lines))
    prompts = [fim.make_prompt(prefix(end), "suffix") for end in ends]
    named = [list(fim.list_next_prompts(prefix(end), "suffix", "")) for end in ends]
    begins_with_suffix = order == "suffix-first" or form == "codestral"
    changes = [i for i in range(1, len(ends)) if prompts[i][:60] != prompts[i - 1][:60]]
    for i in changes:
        first = max(i - LINES_AHEAD, 0)
        (ahead,) = (each for each in named[first] if each[:60] == prompts[i][:60])
        n = len(ahead) - 1  # the last line end may be one token with the blanks behind it
        assert prompts[i][:n] == ahead[:n]
        assert len(prompts[i]) - len(ahead) < 25 * (i - first + 2), "the lines that were written since"
        assert (re.search("(?i)suffix.{1,2}suffix", tokenizer.decode(ahead)) is not None) == begins_with_suffix
    assert len(changes) > 5
    assert sum(map(bool, named)) < LINES_AHEAD * len(changes) + LINES_AHEAD, "no window is named sooner"


def test_the_prompt_after_an_accepted_suggestion() -> None:
    fim = Fim.detect(bytes_tokenizer(TOKENS["qwen"]), FimOptions(window=40))
    assert fim is not None
    window = "".join(f"x = {i}\n" for i in range(40))
    for prefix, written in (("a\nb", "c\nd"), (window + "y", " = 1\nz = 2"), (window + "y", " = 1\n")):
        after = "\n".join((prefix + written).split("\n")[-1 - prefix.count("\n") :]) if prefix != "a\nb" else prefix + written
        assert list(fim.list_next_prompts(prefix, "s", written, FILES))[-1] == fim.make_prompt(after, "s", FILES)
    assert list(fim.list_next_prompts("a", "s", "")) == []


UNFINISHED = {
    "    return w": " w", "x = self._sys": "_sys", "f(": "(", "f(a, ": " ", "x == ": " ", "x =": " =", "a\n    ": "    ", "a\n": "", "": "",
    "total12": "12", "a1234": "234", "é": "é", "x.名": ".名", "_": "_", "a" * 80: "", "=" * 80: "", "  \t": "  \t", "getLoo": "getLoo",
}  # fmt: skip


@pytest.mark.parametrize("prefix", UNFINISHED)
def test_what_is_left_for_the_output_to_spell(prefix: str) -> None:
    healing, plain = Fim.detect(QWEN, FimOptions(middle_lines=1, heals=True)), Fim.detect(QWEN)
    suffix_first = Fim.detect(QWEN, FimOptions("suffix-first", heals=True))
    assert healing is not None
    assert plain is not None
    assert suffix_first is not None
    piece = UNFINISHED[prefix]
    assert healing.find_unfinished(prefix) == suffix_first.find_unfinished(prefix) == piece
    assert plain.find_unfinished(prefix) == ""
    rest = prefix.removesuffix(piece)
    assert healing.make_prompt(prefix, SUFFIX, is_healed=False) == plain.make_prompt(prefix, SUFFIX)
    for fim, shown in ((healing, rest.rpartition("\n")[2]), (suffix_first, rest)):
        assert QWEN.decode(fim.make_prompt(prefix, SUFFIX)).endswith("<|fim_middle|>" + shown)


def test_llama_leaves_out_only_what_its_tokens_spell() -> None:
    fim = Fim.detect(sentencepiece_tokenizer(TOKENS["codellama"]), FimOptions(middle_lines=8, heals=True))
    assert fim is not None
    assert [fim.find_unfinished(text) for text in ("x de", "x xe", "a + ")] == [" de", "", " "]


@pytest.mark.parametrize("name", TOKENS)
def test_a_middle_that_begins_before_the_cursor(name: str) -> None:
    """While lines are typed, all before the middle stays the same for some lines, and the texts in order are what was typed."""
    tokenizer = bytes_tokenizer(TOKENS[name])
    fim, plain = Fim.detect(tokenizer, FimOptions(middle_lines=8, heals=True)), detect(tokenizer)
    assert fim is not None
    written = "".join(f"def f{i}(x):\n    y = x + {i // 3}\n    return y\n\n" for i in range(30))
    begun = []
    for end in range(200, len(written)):
        prefix = written[:end]
        rest = prefix.removesuffix(fim.find_unfinished(prefix))
        prompt = fim.make_prompt(prefix, SUFFIX, FILES)
        if plain.format.middle is None:
            assert prompt == plain.make_prompt(rest, SUFFIX, FILES)
            continue
        at = prompt.index(tokenizer.get_added_vocab()[plain.format.middle]) + 1
        middle = tokenizer.decode(prompt[at:])
        assert rest.endswith(middle)
        assert middle.count("\n") < 8
        head = rest.removesuffix(middle)
        assert prompt[:at] == plain.make_prompt(head, SUFFIX, FILES)
        assert head == "" or head.endswith("\n")
        begun.append(len(head))
    changes = sum(a != b for a, b in itertools.pairwise(begun))
    assert changes < written[200:].count("\n") / 3
    assert begun == sorted(begun)


def test_not_even_the_control_tokens_fit() -> None:
    fim = detect(QWEN)
    assert len(fim.make_prompt("abc", "def", limit=3)) == 3
    with pytest.raises(ValueError, match="3 control tokens"):
        fim.make_prompt("abc", "def", limit=2)


_FIMS = [detect(bytes_tokenizer(TOKENS[name])) for name in ("qwen", "codegemma", "starcoder2", "codestral", "deepseek")]
_FIMS += [Fim(each.format, bytes_tokenizer(TOKENS[each.format.name]), FimOptions(middle_lines=3, heals=True)) for each in _FIMS]
_texts = st.text(st.sampled_from("ab \n<|fim_prefix|>é日"), max_size=60)


@given(st.sampled_from(_FIMS), _texts, _texts, st.lists(st.tuples(_texts, _texts), max_size=3), st.integers(4, 120))
def test_never_longer_than_the_limit(fim: Fim, prefix: str, suffix: str, files: list[tuple[str, str]], limit: int) -> None:
    prompt, whole = fim.make_prompt(prefix, suffix, files, limit=limit), fim.make_prompt(prefix, suffix, files)
    assert len(prompt) <= limit
    if len(whole) <= limit:
        assert prompt == whole


def _suffix_first(parts: list[str | tuple[str]]) -> list[str | tuple[str]]:
    """A prompt's parts with what stands between the prefix's token and the suffix's moved to the end."""
    pre = next(i for i, part in enumerate(parts) if isinstance(part, tuple) and re.search("(?i)prefix|PRE|begin", part[0]))
    suf = next(i for i, part in enumerate(parts) if isinstance(part, tuple) and re.search("(?i)suffix|SUF|hole", part[0]))
    return [*parts[: pre + 1], *parts[suf:], *parts[pre + 1 : suf]]


@pytest.mark.parametrize("name", [form.name for form in FORMATS if form.middle is not None and form.name != "codellama"])
def test_suffix_first(name: str) -> None:
    tokenizer = bytes_tokenizer(TOKENS[name])
    fim = Fim.detect(tokenizer, FimOptions("suffix-first"))
    assert fim is not None
    assert fim.make_prompt(PREFIX, SUFFIX) == ids_of(tokenizer, *_suffix_first(ALONE[name]))
    shown = fim.make_prompt(PREFIX, SUFFIX, FILES, path="c.py", repo="shop")
    assert shown == ids_of(tokenizer, *_suffix_first(WITH_FILES[name]))
    later = fim.make_prompt(PREFIX + "x", SUFFIX, FILES, path="c.py", repo="shop")
    assert later[: len(shown) - 3] == shown[:-3], "a key changes the end alone"


@pytest.mark.parametrize("name", TOKENS)
def test_the_order_that_reuses_most_where_models_fill_in_as_well_with_it(name: str) -> None:
    tokenizer = bytes_tokenizer(TOKENS[name])
    orders: tuple[Order, ...] = ("auto", "prefix-first", "suffix-first")
    auto, prefix_first, suffix_first = (Fim.detect(tokenizer, FimOptions(order, middle_lines=8, heals=True)) for order in orders)
    assert auto is not None
    assert prefix_first is not None
    assert suffix_first is not None
    expected = suffix_first if name in {"qwen", "codegemma", "starcoder", "codellama"} else prefix_first
    assert auto.make_prompt(PREFIX, SUFFIX, FILES) == expected.make_prompt(PREFIX, SUFFIX, FILES)
    assert list(auto.list_next_prompts(PREFIX, SUFFIX, "x")) == list(expected.list_next_prompts(PREFIX, SUFFIX, "x"))


def test_an_order_that_the_format_has_anyway() -> None:
    tokenizer = bytes_tokenizer(TOKENS["codestral"])
    fim = Fim.detect(tokenizer, FimOptions("suffix-first"))
    assert fim is not None
    assert fim.make_prompt(PREFIX, SUFFIX) == detect(tokenizer).make_prompt(PREFIX, SUFFIX)
