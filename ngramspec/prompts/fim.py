"""Fill-in-the-middle prompts: the text around a cursor, and further files, as the model was trained to see them.

`Fim.detect` looks a format's control tokens up in a tokenizer's added vocabulary, never at a model's name. Texts enter, token
ids leave: control tokens are put between the encoded texts, in which no control token exists, so a file that contains
`<|fim_middle|>` injects nothing. Knows tokenizers; nothing of HTTP, nor of who asks for how much.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, Self

from ngramspec.datastore.tokens import make_plain_tokenizer
from ngramspec.prompts.chat_template import before_text
from ngramspec.tokenizer.spelling import Spelling

# The order of the parts: prefix, suffix, middle; or suffix, then the prefix, behind which the middle goes on (Bavarian et al.,
# arXiv:2207.14255, section 3: SPM in the form that shares its tokens with the other order). "auto": `Format.takes_both` decides.
Order = Literal["auto", "prefix-first", "suffix-first"]
Window = int | Literal["any"]  # how many lines a window has that moves with the cursor; 0: there is none
# The share of the room for both that the text before the cursor gets when neither it nor the text after it fits.
PREFIX_SHARE = 0.75
# What is cut off is a multiple of a sixteenth of the room. Cut by single tokens, a long file's prompt would begin one token later at every
# keystroke, and nothing of it could come from the prefix cache.
STRIDES = 16
# A window's first line is looked for in its first quarter: in Python's installed packages it stays the same for 30 lines of the cursor's
# way, and 31 of 256 lines are left out, in the mean.
WINDOW_SHARE = 4
FEWEST_LINES = 32  # of a window, unless it is said how many it has
# How many lines before a window begins elsewhere the prompt is named that it will have then (`list_next_prompts`): its 2,500 tokens take a
# 1.5B model on two cores 11 s, and sixteen lines are rarely written in less than a minute.
LINES_AHEAD = 16
# The middle begins at one of so many lines before the cursor, the one before which the hash of two lines is least: it stays the same while
# four or five lines are written, which compute only themselves. At the cursor, every key computes the text after it again.
MIDDLE_LINES = 8
# What is left out of a prompt at its end and spelled by the output's first tokens, since tokenizers would not end a token there: the
# beginning of a word with a blank or a sign before it, digits, signs, or blanks.
_UNFINISHED = re.compile(r"(?:[^\w\n]|_)?[^\W\d_]+\Z|\d{1,3}\Z| ?(?:[^\w\s]|_)+\Z|[^\S\n]+\Z")
MAX_UNFINISHED = 64  # characters, and tokens that prompts leave room for, for the output to spell them
# Of more than MANY_FILES further files the first ones are left out, but for the last FEWEST_FILES. llama.vim sends 16 and drops about three
# at every place that is visited; 60 functions of trio were written with 400,000 computed tokens of prompts instead of 1,060,000.
MANY_FILES, FEWEST_FILES = 8, 4
# Stands before a text that must be encoded as if text came before it; no vocabulary merges it with anything.
_MARK = "\N{WHITE SMILING FACE}"
# Tokens that end a text, a turn or a document in one model or another; none of them is ever part of a middle.
_ENDS = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "<|EOT|>", "▁<EOT>"),
    *("<|im_start|>", "<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|user|>", "<|assistant|>", "<|observation|>"),
)


@dataclass(frozen=True, slots=True)
class Format:
    """The control tokens of a family of models, and the order in which texts stand between them."""

    name: str
    prefix: str
    suffix: str
    middle: str | None
    """None: the suffix stands first, and the text goes on right behind the prefix."""
    repo: str | None = None
    """The control token before the repository's name."""
    file: str | None = None
    """The control token before every file's path. None: the model was not trained with a separator, and `heading` stands in for it."""
    pad: str | None = None
    bos: bool = False
    """The prompt begins with the beginning-of-sequence token even where the tokenizer would not add it."""
    after_repo: str = "\n"
    between_files: bool = False
    """The separator is not written before the first file."""
    path_behind_prefix: bool = False
    """The path of the file being edited is the first line of the prefix."""
    heading: str = "#{path}\n"
    """A file's first line where there is no separator; such files stand in front of the prefix, behind its token."""
    takes_both: bool = False
    """Its models were trained with the suffix first, too, or were measured to fill in as well that way (`benchmarks.infill`)."""

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(token for token in (self.prefix, self.suffix, self.middle, self.repo, self.file) if token is not None)


def _make_pipe_format(name: str, repo: str | None, file: str | None, **more: Any) -> Format:
    return Format(name, "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", repo, file, "<|fim_pad|>", **more)


def _make_angle_format(name: str, repo: str | None, file: str | None, **more: Any) -> Format:
    return Format(name, "<fim_prefix>", "<fim_suffix>", "<fim_middle>", repo, file, "<fim_pad>", **more)


# All formats in the order in which they are tried: those that share tokens go from the one that needs most to the one that needs least.
FORMATS = (
    # arXiv:2409.12186, and the README's example at repository level. Both orders: measured with the 0.5B and the 1.5B model.
    _make_pipe_format("qwen", "<|repo_name|>", "<|file_sep|>", takes_both=True),
    # arXiv:2406.11409, figure 2: a path and a line end before the prefix token, a separator between files; section 2.2: both orders.
    _make_pipe_format("codegemma", None, "<|file_separator|>", bos=True, between_files=True, takes_both=True),
    _make_pipe_format("granite", "<|reponame|>", "<|filename|>", after_repo=""),
    _make_pipe_format("pipes", None, None),
    # arXiv:2402.19173, section 5.1: a repository is cut at <file_sep>, and each piece, path and all, is rearranged by itself.
    _make_angle_format("starcoder2", "<repo_name>", "<file_sep>", after_repo="", path_behind_prefix=True),
    # arXiv:2305.06161 and arXiv:2405.04324: StarCoder, and Granite Code, which has its tokenizer. Both orders by halves: `fim_spm_rate` of
    # bigcode-project/Megatron-LM.
    _make_angle_format("starcoder", "<reponame>", "<filename>", after_repo="", takes_both=True),
    _make_angle_format("angles", None, None),
    Format("santacoder", "<fim-prefix>", "<fim-suffix>", "<fim-middle>", pad="<fim-pad>"),
    # arXiv:2401.14196; its README shows several files as "#path", a line end and the text.
    Format("deepseek", "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", bos=True),
    # arXiv:2308.12950, section 2.3: SentencePiece's implicit leading blank is there before the prefix, not before suffix and middle. Half
    # of the texts were of the other order.
    Format("codellama", "▁<PRE>", "▁<SUF>", "▁<MID>", bos=True, takes_both=True),
    # mistral-common: [SUFFIX] suffix [PREFIX] prefix; several files as "+++++ path", a line end and the text.
    Format("codestral", "[PREFIX]", "[SUFFIX]", None, bos=True, heading="+++++ {path}\n"),
    Format("glm", "<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)


@dataclass(frozen=True, slots=True)
class FimOptions:
    """What is shown of the texts around a cursor, and where. The defaults are what models are trained with."""

    order: Order = "prefix-first"
    """What stands first where the format has a token before the middle."""
    window: Window = 0
    """Lines of a prefix that is a window, which moves with the cursor: it begins where `_begin_window` says. "any": every prefix of
    FEWEST_LINES lines or more is one. Unless it is 0, many further files begin where `_begin_files` says."""
    suffix_tokens: int = 0
    """Most tokens of the suffix in a prompt. 0: all of them."""
    middle_lines: int = 0
    """Up to this many last lines of the prefix stand at the beginning of the middle instead, so that a key changes the prompt's end alone.
    0: none."""
    heals: bool = False
    """Prompts that end with lines of the prefix leave out what `Fim.find_unfinished` returns."""


class Fim:
    """One tokenizer's way to fill in the middle. Threads may share it."""

    def __init__(self, form: Format, tokenizer: Any, options: FimOptions) -> None:
        """Read the control tokens' ids."""
        self.format, self.options = form, options
        backend = tokenizer.backend_tokenizer
        self._added = _read_added_tokens(tokenizer)
        self._plain, self._control = make_plain_tokenizer(backend, max(backend.get_vocab(with_added_tokens=True).values()) + 1)
        self._bos = _find_bos_ids(tokenizer, form.bos)
        first = self._plain.encode("a", add_special_tokens=False).tokens[:1]
        self._has_implicit_blank = bool(first) and first[0][:1] in ("▁", "Ġ")
        self._spelling = Spelling(backend, 0) if options.heals and (options.middle_lines or self._is_suffix_first) else None
        ends = {*form.required, *_ENDS, *([form.pad] if form.pad is not None else [])}
        self.stop_ids: tuple[int, ...] = tuple(sorted(self._added[token] for token in ends & self._added.keys()))
        """Ids that the middle never contains: whatever ends a text, and the format's own control tokens."""

    @classmethod
    def detect(cls, tokenizer: Any, options: FimOptions | None = None) -> Self | None:
        """Return the format whose control tokens are all in the tokenizer's added vocabulary; None where there is none.

        `tokenizer`: of transformers, over one of the `tokenizers` library; with any other, or None, the answer is None. `options`: None: as
        models are trained.
        """
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            return None
        added = _read_added_tokens(tokenizer)
        found = next((form for form in FORMATS if all(token in added for token in form.required)), None)
        return None if found is None else cls(found, tokenizer, options or FimOptions())

    def make_prompt(
        self,
        prefix: str,
        suffix: str,
        extra: Iterable[tuple[str, str]] = (),
        *,
        limit: int | None = None,
        path: str = "filename",
        repo: str = "repository",
        is_healed: bool = True,
    ) -> list[int]:
        """Return token ids that ask for the text between `prefix` and `suffix`.

        `extra`: further files or parts of files, (path, text), the least useful first; `path`: of the file being edited, and `repo`:
        the repository's name, both of which only a prompt with further files shows. `limit`: most tokens of the result. Where they do
        not fit, further files are left out, the first first; then the beginning of the prefix and the end of the suffix are cut off,
        so that prefix and suffix keep 3:1. `is_healed`: the output's first tokens will spell what `find_unfinished` returns, so that it
        is left out, and the middle may begin before the cursor. Raises ValueError where not even the control tokens fit.
        """
        if self._is_window(prefix):
            prefix = "\n".join(_begin_window(prefix.split("\n")))
        if is_healed:
            prefix = prefix.removesuffix(self.find_unfinished(prefix))
        begun = _begin_middle(prefix, self.options.middle_lines) if is_healed and not self._is_suffix_first else len(prefix)
        return self._write(prefix[:begun], suffix, extra, prefix[begun:], limit=limit, path=path, repo=repo)

    def find_unfinished(self, prefix: str) -> str:
        """Return the end of a prefix that the output's first tokens are to spell (`SamplingParams.healed`); nothing without `heals`."""
        if self._spelling is None or (found := _UNFINISHED.search(prefix[-MAX_UNFINISHED - 1 :])) is None:
            return ""
        return found[0] if len(found[0]) <= MAX_UNFINISHED and self._spelling.to_letters(found[0]) is not None else ""

    def list_next_prompts(
        self, prefix: str, suffix: str, written: str, extra: Iterable[tuple[str, str]] = (), *, limit: int | None = None
    ) -> Iterator[list[int]]:
        """Yield beginnings of prompts that will probably be asked for after one that was answered with `written`.

        First those of windows that begin elsewhere within `LINES_AHEAD` lines, if there are any, as far as their texts are known today:
        they are long and sure to come. Then what follows if all that was written is accepted; and if the line ends here, with which the
        middle may begin elsewhere. The arguments are those of `make_prompt`. Raises ValueError as it does.
        """
        lines, extra = prefix.split("\n"), list(extra)
        is_window = self._is_window(prefix)
        for later in _begin_later_windows(lines) if is_window else ():
            ids = self._write("\n".join([*later[:-1], ""]), suffix, extra, limit=limit)
            yield ids if self._is_suffix_first else ids[: ids.index(self._added[self.format.suffix])]
        ends_here = ["\n"] if self.options.middle_lines and not self._is_suffix_first else []
        for coming in [written, *ends_here] if written else ends_here:
            accepted = (prefix + coming).split("\n")
            yield self.make_prompt("\n".join(accepted[-len(lines) :] if is_window else accepted), suffix, extra, limit=limit)

    @property
    def _is_suffix_first(self) -> bool:
        order = self.options.order
        return self.format.middle is None or order == "suffix-first" or (order == "auto" and self.format.takes_both)

    def _is_window(self, prefix: str) -> bool:
        """Return whether a prefix is taken for a window that moves with the cursor."""
        n_lines = prefix.count("\n")
        return n_lines >= FEWEST_LINES if self.options.window == "any" else 0 < n_lines == self.options.window

    def _write(
        self,
        prefix: str,
        suffix: str,
        extra: Iterable[tuple[str, str]],
        begun: str = "",
        *,
        limit: int | None,
        path: str = "filename",
        repo: str = "repository",
    ) -> list[int]:
        """Return the prompt with this prefix, wherever it begins. `begun`: the beginning of the middle."""
        form = self.format
        files = [(name, text if text.endswith("\n") else text + "\n") for name, text in extra]
        files = _begin_files(files) if self.options.window else files
        fixed = len(self._bos) + sum(token is not None for token in (form.prefix, form.suffix, form.middle))
        if limit is not None and limit < fixed:
            raise ValueError(f"a prompt to fill in the middle has {fixed} control tokens; {limit} are not enough")
        room = None if limit is None else limit - fixed
        middle = self._encode(begun, inner=True)
        tail = self._encode(suffix, inner=True)
        if self.options.suffix_tokens:
            tail = tail[: self.options.suffix_tokens]
        head = self._encode(prefix, inner=bool(files) and form.file is None)
        if room is not None:
            if 2 * len(middle) > room < sum(map(len, (head, tail, middle))):  # the middle leaves too little for what is around it
                return self._write(prefix + begun, suffix, extra, limit=limit, path=path, repo=repo)
            room -= len(middle)
        lead, current = self._encode_names(path, repo)
        left = None if room is None else room - sum(map(len, (head, tail, lead, current)))
        chunks = self._last_files(files, left)
        if not chunks:
            head, lead, current = self._encode(prefix), [], []
        if room is not None and len(head) + len(tail) > room:
            head, tail = _cut_to_room(head, tail, room)
        return self._assemble(head, tail, [*lead, *chain.from_iterable(chunks)], current) + middle

    def _encode_names(self, path: str, repo: str) -> tuple[list[int], list[int]]:
        """Return ids of what stands before all further files, and of what names the file being edited."""
        form = self.format
        if form.file is None:
            return [], self._encode(form.heading.format(path=path), inner=True)
        lead = [self._added[form.repo], *self._encode(repo + form.after_repo)] if form.repo is not None else []
        return lead, [self._added[form.file], *self._encode(f"{path}\n")]

    def _last_files(self, files: Sequence[tuple[str, str]], left: int | None) -> list[list[int]]:
        """Return ids of the last files, as many as have room in `left` tokens."""
        form = self.format
        chunks: list[list[int]] = []
        total = -1 if form.between_files else 0
        for name, text in reversed(files):
            if form.file is None:
                chunk = self._encode(form.heading.format(path=name) + text, inner=True)
            else:
                chunk = [self._added[form.file], *self._encode(f"{name}\n{text}")]
            total += len(chunk)
            if left is not None and total > left:
                break
            chunks.append(chunk)
        if form.between_files and chunks:
            chunks[-1] = chunks[-1][1:]
        return chunks[::-1]

    def _assemble(self, head: list[int], tail: list[int], context: list[int], current: list[int]) -> list[int]:
        """Return the prompt. `context`: further files; `current`: what names the file being edited, where there are any."""
        form = self.format
        pre, suf = [self._added[form.prefix]], [self._added[form.suffix], *tail]
        mid = [self._added[form.middle]] if form.middle is not None else []
        if form.file is None:
            before, context = [*context, *current, *head], []
        elif form.path_behind_prefix:
            before, context = [*current[1:], *head], [*context, *current[:1]]
        else:
            before, context = head, [*context, *current]
        if not self._is_suffix_first:
            parts = [*pre, *before, *suf, *mid]
        elif mid:
            parts = [*pre, *suf, *mid, *before]
        else:
            parts = [*suf, *pre, *before]
        return [*self._bos, *context, *parts]

    def _encode(self, text: str, *, inner: bool = False) -> list[int]:
        """Return ids of a text in which no control token is known. `inner`: without a blank that the tokenizer puts before any text."""
        marked = inner and self._has_implicit_blank
        encoding = self._plain.encode(_MARK + text if marked else text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        if marked:
            ids = [number for number, (_, end) in zip(ids, encoding.offsets, strict=True) if end > len(_MARK)]
        return [number for number in ids if not self._control[number]]


def _begin_window(lines: list[str]) -> list[str]:
    """Leave out the first lines of a window, so that it begins with the same line when the window has moved by a few.

    That line depends on the text alone: of the first quarter the one whose hash, with the next line's, is least, among those that begin a
    definition if there are any; never the very first, which may begin in its middle. Otherwise nothing of the prompt would come from the
    prefix cache after each new line.
    """
    return lines[min(range(1, _end_quarter(lines)), key=lambda i: _rank_line(lines, i)) :]


def _begin_middle(prefix: str, n_lines: int) -> int:
    """Return where in a prefix the middle begins: at one of its last `n_lines` lines, at its end if that is 0.

    Which line that is depends on the text before it alone: the one before which the hash of two lines is least.
    """
    if n_lines == 0:
        return len(prefix)
    lines = prefix.split("\n")
    last = len(lines) - 1
    first = min(range(max(last - n_lines + 1, min(last, 1)), last + 1), key=lambda i: _hash_lines(lines[max(i - 2, 0) : i]))
    return len(prefix) - len("\n".join(lines[first:]))


def _begin_later_windows(lines: list[str]) -> list[list[str]]:
    """Return the known lines of each window that begins elsewhere than the one before it, while it moves by up to LINES_AHEAD lines."""
    n = _end_quarter(lines)
    ranks = [_rank_line(lines, i) for i in range(min(n + LINES_AHEAD, len(lines)))]
    begins = [min(range(moved + 1, moved + n), key=ranks.__getitem__) for moved in range(len(ranks) - n + 1)]
    return [lines[i:] for i in dict.fromkeys(begins) if i != begins[0]]


def _end_quarter(lines: list[str]) -> int:
    """Return the index behind the last line with which a window may begin."""
    return max(len(lines) // WINDOW_SHARE, 2)


def _rank_line(lines: list[str], i: int) -> tuple[bool, bytes]:
    """Return by what lines are compared: a window begins with the least."""
    return lines[i][:1] in {"", " ", "\t", ")", "]", "}"}, _hash_lines(lines[i : i + 2])


def _hash_lines(lines: list[str]) -> bytes:
    return hashlib.sha256("\n".join(lines).encode()).digest()


def _begin_files(files: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Leave out the first ones of many further files, so that they begin with the same one when the first have been replaced by new ones
    at the end, as editors do that send what was looked at last: of all but the last few the one whose hash is least.
    """
    if len(files) <= MANY_FILES:
        return files
    return files[min(range(len(files) - FEWEST_FILES + 1), key=lambda i: hashlib.sha256(files[i][1].encode()).digest()) :]


def _cut_to_room(head: list[int], tail: list[int], room: int) -> tuple[list[int], list[int]]:
    """Return the end of the one and the beginning of the other, together at most `room`, in multiples of a stride; see `STRIDES`."""
    stride = max(room // STRIDES, 1)
    for_tail = min(len(tail), max(room - int(room * PREFIX_SHARE), room - len(head)))
    for_head = room - for_tail
    cut = len(head) - for_head
    if cut > 0:
        head = head[min(-(-cut // stride) * stride, len(head)) :]
    if for_tail < len(tail):
        tail = tail[: for_tail // stride * stride if for_tail >= stride else for_tail]
    return head, tail


def _read_added_tokens(tokenizer: Any) -> dict[str, int]:
    return {token.content: number for number, token in tokenizer.backend_tokenizer.get_added_tokens_decoder().items()}


def _find_bos_ids(tokenizer: Any, needed: bool) -> list[int]:
    """Return what the tokenizer puts before every text, or the beginning-of-sequence token where one is needed and it puts nothing."""
    return before_text(tokenizer) or ([tokenizer.bos_token_id] if needed and tokenizer.bos_token_id is not None else [])
