"""Read a vocabulary as llama.cpp does: which of its tokens end a text, which are control tokens, and the byte-pair tokenizer.

The header of a GGUF file, or the tokens of any tokenizer, go in; ids and tokenizers come out. Knows no weights and no folders.

Names and rules are those of `llama_vocab::impl::load` in llama.cpp's `src/llama-vocab.cpp` (as of llama-cpp-python 0.3.36), which considers
a token's text as well as the metadata, since conversions differ in what they state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from ngramspec.errors import TokenizerError
from ngramspec.models.gguf import Gguf, array_length, read_array
from ngramspec.models.splits import BLANK, split_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CONTROL_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # transformers' names of control tokens, and GGUF's
# Tokens that end a text in every vocabulary that has them.
END_NAMES = frozenset(
    [
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
    ]
)
# Fill-in-the-middle tokens that end a text, too: by the metadata's key, the texts to look for if the metadata states none. llama.cpp takes
# any one of several; here it is the first.
FIM_END_NAMES = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
FIM_NAMES = frozenset(
    [
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ]
)
# Control tokens, whatever token type the file states.
CONTROL_NAMES = END_NAMES | FIM_NAMES | {name for names in FIM_END_NAMES.values() for name in names}
# Tokens of gpt-oss's format that are matched like control tokens but are part of the text.
SHOWN_NAMES = frozenset(["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"])

# Most values of a vocabulary's arrays, such as merges: _VOCABULARY, or _PER_TOKEN per row of the largest matrix. Llama 3 has 2.2 merges
# per token.
_VOCABULARY, _PER_TOKEN = 1 << 18, 4
_TEMPLATE = "tokenizer.chat_template"
_LONGEST_TOKEN = 1 << 10  # Characters: longer tokens are no result of merges. The longest of Llama 2 and Gemma have some 60.


class TokenKind(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


def end_token_ids(ids: Mapping[str, int], stated: Iterable[int], stated_fim: Mapping[str, int] | None = None) -> set[int]:
    """Return the tokens that end a text.

    `ids`: every token's id by its text; `stated`: ids that the model's files state; `stated_fim`: ids stated for keys of `FIM_END_NAMES`.
    """
    ends = {ids[name] for name in END_NAMES if name in ids} | set(stated)
    for key, names in FIM_END_NAMES.items():
        if stated_fim and key in stated_fim:
            ends.add(stated_fim[key])
        else:
            ends.update([ids[name] for name in names if name in ids][:1])

    def ends_by(*names: str) -> bool:
        return any(ids.get(name) in ends for name in names)

    # In the formats of gpt-oss and Solar Open, <|end|> ends a message and others follow. Gemma 4 and PLaMo 2 write </s> as text.
    if ends_by("<|call|>", "<|calls|>") and ends_by("<|return|>", "<|flush|>"):
        ends.discard(ids.get("<|end|>", -1))
    if ends_by("<|tool_response>", "<|plamo:eos|>"):
        ends.discard(ids.get("</s>", -1))
    return ends


def end_token_ids_of(gguf: Gguf, tokens: list[str] | None = None) -> set[int]:
    """Return the tokens that end a text of a GGUF file's model, by its metadata and its vocabulary.

    `tokens`: the vocabulary, if it has been read. llama.cpp's ids for files that state no end of sequence at all (11 in a byte-pair
    vocabulary) are left out: they are Falcon's.
    """
    tokens = _read_tokens(gguf) if tokens is None else tokens

    def read_stated_ids(names: Iterable[str]) -> dict[str, int]:
        found = {name: gguf.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names}
        return {name: number for name, number in found.items() if isinstance(number, int) and 0 <= number < len(tokens)}

    ids = {token: number for number, token in enumerate(tokens)}
    return end_token_ids(ids, read_stated_ids(("eos", "eot", "eom")).values(), read_stated_ids(FIM_END_NAMES))


def added_tokens(gguf: Gguf, tokens: list[str]) -> list[AddedToken]:
    """Return the tokens that are matched in a text before it is split, by their ids. Special ones are no part of the text."""
    ends = end_token_ids_of(gguf, tokens)
    ids = {token: number for number, token in enumerate(tokens)}
    kinds = read_array(gguf, "tokenizer.ggml.token_type")[: len(tokens)]
    kinds += [TokenKind.NORMAL] * (len(tokens) - len(kinds))
    for name in CONTROL_NAMES & ids.keys():
        kinds[ids[name]] = TokenKind.CONTROL
    for name in SHOWN_NAMES & ids.keys():
        kinds[ids[name]] = TokenKind.USER_DEFINED
    for name, kind in (("<|end|>", TokenKind.USER_DEFINED), ("</s>", TokenKind.NORMAL)):
        if name in ids and ids[name] not in ends:
            kinds[ids[name]] = kind
    matched = (TokenKind.UNKNOWN, TokenKind.CONTROL, TokenKind.USER_DEFINED)
    return [
        AddedToken(token, normalized=False, special=kind != TokenKind.USER_DEFINED)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in matched and token
    ]


def _build_byte_pairs(gguf: Gguf) -> tuple[Tokenizer, bool]:
    """Build the tokenizer of a file whose `tokenizer.ggml.model` is gpt2, or gemma4, which names its split itself.

    Also returns whether texts begin with a control token if the file does not say.
    Raises TokenizerError for an unknown `tokenizer.ggml.pre`, or for merges that do not fit the vocabulary.
    """
    tokens, metadata = _read_tokens(gguf), gguf.metadata
    split = split_of("gemma4" if metadata.get("tokenizer.ggml.model") == "gemma4" else metadata.get("tokenizer.ggml.pre"))
    ids = {token: number for number, token in enumerate(tokens)}
    merges = [_split_merge(merge) for merge in _read_strings(gguf, "tokenizer.ggml.merges")]
    try:
        model = BPE(ids, merges, ignore_merges=split.ignore_merges, byte_fallback=not split.in_bytes)
    except Exception as error:  # the library raises nothing more particular
        raise TokenizerError(f"{gguf.path}: tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from error
    backend = Tokenizer(model)
    if split.normalizer is not None:
        backend.normalizer = split.normalizer
    backend.pre_tokenizer = split.pre_tokenizer({token for token in ids if len(token) == 1})
    backend.decoder = split.decoder
    backend.add_tokens(added_tokens(gguf, tokens))
    return backend, split.add_bos


def _build_sentence_pieces(gguf: Gguf) -> tuple[Tokenizer, bool]:
    """Build the tokenizer of a file whose `tokenizer.ggml.model` is llama. Returns what `_build_byte_pairs` does.

    Two pieces become one if that is a token, of all pairs first the one with the highest score. SentencePiece's first blank is put where
    llama.cpp puts it: before every text between control tokens, whether it begins with a blank or not. Raises TokenizerError.
    """
    tokens = _read_tokens(gguf)
    ids = {token: number for number, token in enumerate(tokens)}
    merges = read_array(gguf, "tokenizer.ggml.merges")
    pairs = [_split_merge(merge) for merge in merges] if merges else _order_merges(gguf, tokens, ids)
    unknown = gguf.metadata.get("tokenizer.ggml.unknown_token_id")
    unknown = tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None
    try:
        backend = Tokenizer(BPE(ids, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    except Exception as error:  # the library raises nothing more particular
        raise TokenizerError(f"{gguf.path}: tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from error
    begins = bool(gguf.metadata.get("tokenizer.ggml.add_space_prefix", True))
    blanks = normalizers.Replace(" ", BLANK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), blanks]) if begins else blanks
    strip = [decoders.Strip(" ", 1, 0)] if begins else []
    backend.decoder = decoders.Sequence([decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    backend.add_tokens(added_tokens(gguf, tokens))
    return backend, True


def read_tokenizer(gguf: Gguf) -> PreTrainedTokenizerFast:
    """Read the tokenizer that a GGUF file carries; it produces the ids that llama.cpp produces. Raises TokenizerError."""
    from transformers import PreTrainedTokenizerFast

    backend, control = _read_parts(gguf)
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=_read_templates(gguf), **control)


def read_backend(gguf: Gguf) -> Tokenizer:
    """Return what is the backend of `read_tokenizer`, without transformers and torch. Raises TokenizerError."""
    backend, control = _read_parts(gguf)
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    named = (control[f"{name}_token"] for name in _CONTROL_KEYS)
    backend.add_tokens([AddedToken(token, special=True) for token in named if token is not None and token not in added])
    begin, end = (control[f"{name}_token"] if control[f"add_{name}_token"] else None for name in ("bos", "eos"))
    first, second = (" ".join(f"{part}:{n}" for part in (begin, f"${text}", end) if part is not None) for n, text in enumerate("AB"))
    ids = [(token, backend.token_to_id(token)) for token in (begin, end) if token is not None]
    backend.post_processor = processors.TemplateProcessing(single=first, pair=f"{first} {second}", special_tokens=ids)
    return backend


def _read_parts(gguf: Gguf) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer without control tokens around a text, and transformers' options about these. Raises TokenizerError."""
    most = max(_VOCABULARY, _PER_TOKEN * max((t.shape[0] for t in gguf.tensors.values() if len(t.shape) > 1), default=0))
    for key in gguf.metadata:
        if key.startswith("tokenizer.") and (length := array_length(gguf.headers[0], key)) > most:
            raise TokenizerError(f"{gguf.path}: {key} has {length} values; accepted: up to {most}, by its tensors")
    makers = {"gpt2": _build_byte_pairs, "gemma4": _build_byte_pairs, "llama": _build_sentence_pieces}
    kind = gguf.metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in makers:
        raise TokenizerError(
            f"{gguf.path}: the tokenizer of this GGUF, model {kind!r:.80}, is not read; accepted: {', '.join(makers)}, or another model's, "
            "as a tokenizer= argument"
        )
    backend, add_bos = makers[kind](gguf)
    tokens, control = _read_tokens(gguf), dict[str, Any]()
    for name, key in _CONTROL_KEYS.items():
        number = gguf.metadata.get(f"tokenizer.ggml.{key}_token_id")
        control[f"{name}_token"] = tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else None
    for name, adds in (("bos", add_bos), ("eos", False)):
        control[f"add_{name}_token"] = gguf.metadata.get(f"tokenizer.ggml.add_{name}_token", adds) and control[f"{name}_token"] is not None
    return backend, control


def _order_merges(gguf: Gguf, tokens: list[str], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the pairs of tokens that are tokens together, by falling scores."""
    scores = read_array(gguf, "tokenizer.ggml.scores")
    if len(scores) < len(tokens) or isinstance(scores[0], str):
        raise TokenizerError(f"{gguf.path}: tokenizer.ggml.scores must be an array of {len(tokens)} numbers")
    pairs = []
    for token, score in zip(tokens, scores, strict=False):
        for i in range(1, len(token) if len(token) <= _LONGEST_TOKEN else 0):
            if token[:i] in ids and token[i:] in ids:
                pairs.append((-score, i, token[:i], token[i:]))
    pairs.sort(key=lambda pair: pair[:2])
    return [(left, right) for _, _, left, right in pairs]


def _read_templates(gguf: Gguf) -> str | dict[str, str] | None:
    """Return the chat template; all by their names if there are more than the default one: Command R and Hermes 2 have one for tools."""
    found = {"default": gguf.metadata.get(_TEMPLATE)}
    found |= {key.removeprefix(f"{_TEMPLATE}."): text for key, text in gguf.metadata.items() if key.startswith(f"{_TEMPLATE}.")}
    templates = {name: text for name, text in found.items() if isinstance(text, str)}
    return templates if len(templates) > 1 and "default" in templates else templates.get("default")


def _read_tokens(gguf: Gguf) -> list[str]:
    return _read_strings(gguf, "tokenizer.ggml.tokens")


def _read_strings(gguf: Gguf, key: str) -> list[str]:
    values = read_array(gguf, key)
    if not values or not isinstance(values[0], str):
        raise TokenizerError(f"{gguf.path}: {key} must be an array of strings")
    return values


def _split_merge(merge: str) -> tuple[str, str]:
    """Split a merge at the blank between its two parts; the first part may itself be a blank."""
    at = merge.find(" ", 1)
    return merge[:at], merge[at + 1 :]
