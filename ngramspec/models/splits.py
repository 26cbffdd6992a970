"""How a byte-pair vocabulary in a GGUF file splits text before merges: what `tokenizer.ggml.pre` stands for.

A name enters, a pre-tokenizer of the `tokenizers` library and what else llama.cpp derives from the name leave. Knows no vocabulary.

The names, their regular expressions and their order are facts of the format: `llama_vocab::impl::load` and `llm_tokenizer_bpe` in
llama.cpp's `src/llama-vocab.cpp` (as of llama-cpp-python 0.3.36), with the semantics of its `src/unicode.cpp`. They are written down here
for Oniguruma, which `tokenizers` uses. Three differences matter. Where an expression of llama.cpp names a category, letters outside of
ASCII are neither upper nor lower case. White space outside of ASCII matches `\\s` and no explicit range. `$` is the end of a piece.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import Regex, decoders, normalizers, pre_tokenizers

from ngramspec.errors import TokenizerError

BLANK = "▁"  # SentencePiece's character for a blank.
ISOLATED, MERGED = "isolated", "merged_with_previous"


class SplitPass(NamedTuple):
    """One pass over the pieces that the passes before it left."""

    pattern: str
    behavior: str = ISOLATED


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How text is split, as llama.cpp derives it from a name."""

    cuts: tuple[SplitPass, ...]
    ignore_merges: bool = False
    """Whether a piece that is a token becomes that token, whatever the merges would make of it."""
    add_bos: bool = False
    """Whether texts begin with the beginning-of-sequence token if the metadata does not say."""
    in_bytes: bool = True
    """Whether tokens spell bytes by GPT-2's alphabet. False: they spell characters, and other bytes are tokens such as <0x0A>."""
    escapes_blanks: bool = False
    """Whether blanks are written as U+2581."""

    def pre_tokenizer(self, letters: Collection[str]) -> pre_tokenizers.PreTokenizer:
        """Return the pre-tokenizer. `letters`: the tokens of one character; merges don't reach across a character that is no token."""
        steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Split(Regex(cut.pattern), cut.behavior) for cut in self.cuts]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        if self.in_bytes:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
            missing = _class_of(letter for letter in alphabet if letter not in letters)
        else:
            missing = "^" + _class_of(letters)
        if missing:
            steps.append(pre_tokenizers.Split(Regex(f"[{missing}]"), ISOLATED))
        return pre_tokenizers.Sequence(steps)

    @property
    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.Replace(" ", BLANK) if self.escapes_blanks else None

    @property
    def decoder(self) -> decoders.Decoder:
        if self.in_bytes:
            return decoders.ByteLevel()
        blanks = [decoders.Replace(BLANK, " ")] if self.escapes_blanks else []
        return decoders.Sequence([*blanks, decoders.ByteFallback(), decoders.Fuse()])


def split_of(name: str | None) -> SplitRule:
    """Return the rule that `tokenizer.ggml.pre` names; without a name, llama.cpp's default. Raises TokenizerError for an unknown name."""
    try:
        return _SPLITS[name or "default"]
    except KeyError:
        raise TokenizerError(f"tokenizer.ggml.pre is {name!r:.80}; accepted: {', '.join(NAMES)}") from None


def _class_of(letters: Iterable[str]) -> str:
    """Return the inside of a character class."""
    return "".join(rf"\x{{{ord(letter):x}}}" for letter in sorted(letters))


# ---------------------------------------------------------------------- expressions

_CONTRACTION = r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT, _THREE_DIGITS, _DIGITS = r"\p{N}", r"\p{N}{1,3}", r"\p{N}+"
_NEWLINES = r"[^\n]+|\n+"


def _make_word_expression(digits: str, others: str = _OTHERS, blanks: str = _BLANKS, contraction: str = _CONTRACTION + "|") -> str:
    """Return Llama 3's expression or a variant."""
    return rf"{contraction}{_BEFORE}\p{{L}}+|{digits}|{others}|{blanks}"


def _make_cased_expression(upper: str, lower: str, digits: str, contraction: str = "") -> str:
    """Return GPT-4o's expression or a variant: a word is upper case, then lower case."""
    end = f"(?:{contraction})?" if contraction else ""
    others = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
    return rf"{_BEFORE}{upper}*{lower}+{end}|{_BEFORE}{upper}+{lower}*{end}|{digits}|{others}|{_BLANKS}"


_UPPER, _LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_LETTERS = r"[\p{L}\p{M}]"
_UNCASED = rf"{_BEFORE}{_LETTERS}+(?:{_CONTRACTION})?"
_LLAMA3, _QWEN2 = _make_word_expression(_THREE_DIGITS), _make_word_expression(_DIGIT)
_QWEN35 = rf"{_CONTRACTION}|{_BEFORE}{_LETTERS}+|{_DIGIT}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_GPT4O = _make_cased_expression(_UPPER, _LOWER, _THREE_DIGITS, _CONTRACTION)
_GRANITE_EMBEDDING = _make_cased_expression(r"[\p{L}\p{M}&&[^a-z]]", r"[\p{L}\p{M}&&[^A-Z]]", _THREE_DIGITS, _CONTRACTION)

_KANA = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_BEGIN = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
_DEEPSEEK = rf"{_DEEPSEEK_BEGIN}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"
_DEEPSEEK_HAN = r"[[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]&&[^\s]]+"
_DEEPSEEK_LLM_LETTERS = (
    "[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4"
    "\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d"
    "\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]"
)

_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# Digits in groups of three from the right. Only the first group looks ahead, so that long numbers take linear time. The first group stays
# with the text before it until the next pass, as in llama.cpp.
_GROUPED_DIGITS = SplitPass(r"(?<!\p{N})\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|(?<=\p{N})\p{N}{3}", MERGED)
_HAN = (
    "\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f"
    "\U0002b740-\U0002b81f\U0002b820-\U0002ceaf\U0002ceb0-\U0002ebef\uf900-\ufaff\U0002f800-\U0002fa1f"
)
_KIMI = rf"[{_HAN}]+|{_BEFORE}[\p{{L}}&&[^{_HAN}]]+(?:{_CONTRACTION})?|{_THREE_DIGITS}|{_OTHERS}|{_BLANKS}"
_JAIS2_BLANKS = r"\s*[\r\n]+|" + "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s"


# ---------------------------------------------------------------------- names


def _make_rules(names: str, *cuts: str | SplitPass, **more: bool) -> dict[str, SplitRule]:
    split = SplitRule(tuple(SplitPass(cut) if isinstance(cut, str) else cut for cut in cuts), **more)
    return dict.fromkeys(names.split(), split)


_SPLITS: dict[str, SplitRule] = {
    **_make_rules("default", r"[\p{P}$+<=>^~|]+", _GPT2, _DIGITS, "[0-9][0-9][0-9]"),
    **_make_rules("gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert exaone4", _GPT2),
    **_make_rules("jina-v1-en jina-v2-code roberta-bpe mpt olmo jais trillion granite-docling", _GPT2),
    **_make_rules("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", _DIGIT, _GPT2),
    **_make_rules(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", _LLAMA3, ignore_merges=True, add_bos=True
    ),
    **_make_rules("dbrx smaug-bpe chatglm-bpe", _LLAMA3),
    **_make_rules("glm4 glm5", _LLAMA3, ignore_merges=True),
    **_make_rules("minicpm5", _THREE_DIGITS, _make_word_expression(_DIGITS), ignore_merges=True),
    **_make_rules("jais-2", _make_word_expression(_THREE_DIGITS, blanks=_JAIS2_BLANKS)),
    **_make_rules("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", _QWEN2),
    **_make_rules("qwen35", _QWEN35),
    **_make_rules("ufakzeka", _make_word_expression(_DIGIT, contraction="")),
    **_make_rules("laguna", _NEWLINES, _QWEN2),
    **_make_rules("bailingmoe bailingmoe2 llada-moe", _make_word_expression(_DIGIT, blanks=r"\s*[\r\n]|\s+(?!\S)|\s+")),
    **_make_rules("seed-coder", _make_word_expression(_DIGIT, others=r" ?[^\s\p{L}\p{N}]+")),
    **_make_rules(
        "exaone-moe",
        rf"{_CONTRACTION}|{_BEFORE}\p{{L}}\p{{M}}*(?: ?\p{{L}}\p{{M}}*)*|{_DIGIT}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    **_make_rules("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT4O),
    **_make_rules("tekken", _make_cased_expression(_UPPER, _LOWER, _DIGIT), ignore_merges=True, add_bos=True),
    **_make_rules("granite-embed-multi-97m", _GRANITE_EMBEDDING, ignore_merges=True),
    **_make_rules("tiny_aya cohere2moe", _GROUPED_DIGITS, rf"{_UNCASED}|{_THREE_DIGITS}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"),
    **_make_rules(
        "youtu",
        "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|"
        + _KANA,
        rf"{_UNCASED}|{_DIGIT}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}",
        ignore_merges=True,
    ),
    **_make_rules(
        "deepseek-llm",
        "[\r\n]",
        rf"\s?{_DEEPSEEK_LLM_LETTERS}+",
        r"\s?[[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]&&[^\s]]+",
        r"\s+\z",
        _DEEPSEEK_HAN,
        _DIGITS,
    ),
    **_make_rules("deepseek-coder", "[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN, _DIGIT),
    **_make_rules("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _THREE_DIGITS, _KANA, _DEEPSEEK),
    **_make_rules("spark2_5", _THREE_DIGITS, _KANA, rf"{_DEEPSEEK_BEGIN}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+", _DIGIT),
    **_make_rules("falcon", r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"),
    **_make_rules("poro-chat bloom gpt3-finnish", _BLOOM),
    **_make_rules("viking", _BLOOM, _DIGIT),
    **_make_rules(
        "chameleon",
        "<sentinel:[0-9]+>",
        "IMGIMG[A-I]{1,4}Z",
        r"[\t\n]|    |  ",
        _DIGIT,
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2,
        add_bos=True,
    ),
    **_make_rules("kimi-k2", _KIMI),
    **_make_rules("superbpe", _DIGITS, "(?=(?:[0-9]{3})+(?![0-9]))"),
    **_make_rules(
        "afmoe",
        _GROUPED_DIGITS,
        "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
        _DEEPSEEK,
    ),
    **_make_rules("gemma4 granite-embed-multi-311m sarvam-moe", _NEWLINES, in_bytes=False, escapes_blanks=True),
}
# Every name that llama.cpp knows for a byte-pair vocabulary, except `whitespace`, which has a tokenizer kind of its own.
NAMES = tuple(sorted(_SPLITS))
