"""Line ends: a store's text has LF; requests with CRLF draft from it, too, and their drafts have CRLF."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from ngramspec.datastore import Datastore
from ngramspec.datastore.build import build
from ngramspec.datastore.line_ends import BEGUN, CRLF, LF, LineEnds
from ngramspec.datastore.tokens import Encoder
from ngramspec.speculative.datastore_drafter import DatastoreDrafter

SOURCES = sorted((Path(__file__).parents[2] / "datastore").glob("*.py"))[:12]
TEXTS = [path.read_text() for path in SOURCES]
LIKE_QWEN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def trained(split: str) -> Tokenizer:
    """A tokenizer that has learned pieces of code with LF and with CRLF, cut as GPT-2 or as Qwen cuts text."""
    tokenizer = Tokenizer(models.BPE())
    first = [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([*TEXTS, *(crlf(text) for text in TEXTS)], trainer)
    return tokenizer


def crlf(text: str) -> str:
    return text.replace("\n", "\r\n")


@pytest.fixture(scope="module", params=["bytes", "GPT-2", "Qwen"])
def encoder(request: pytest.FixtureRequest) -> Encoder:
    backend = tiny.byte_tokenizer().backend_tokenizer if request.param == "bytes" else trained(LIKE_QWEN * (request.param == "Qwen"))
    return Encoder(backend, request.param)


def ids_of(encoder: Encoder, text: str) -> np.ndarray:
    return encoder.encode([text])[0][:-1].astype(np.int32)


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from("ab):;\n\n\n  \t'é"), max_size=60))
def test_translating_keeps_the_text_and_changes_its_line_ends(encoder: Encoder, line_ends: LineEnds, text: str) -> None:
    lf, with_crlf = ids_of(encoder, text), ids_of(encoder, crlf(text))
    assert encoder.decode(line_ends.to_crlf(lf).tolist()) == crlf(text)
    back, begun = line_ends.to_lf(with_crlf)
    assert encoder.decode(back.tolist()) == text
    assert not begun
    assert line_ends.is_crlf(with_crlf) == ("\n" in text)
    assert not line_ends.is_crlf(lf)


@pytest.fixture(scope="module")
def line_ends(encoder: Encoder) -> LineEnds:
    return LineEnds(encoder)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_translated_tree_has_the_same_texts(encoder: Encoder, line_ends: LineEnds, data: st.DataObject) -> None:
    """Each node's text from the root on is that of the node it comes from, up to the line end that it is in the middle of."""
    vocabulary = ids_of(encoder, "a\n\n    b):\n\n\n        return c\n\tx\n")
    n = data.draw(st.integers(1, 12))
    parents = np.array([data.draw(st.integers(-1, i - 1)) for i in range(n)], np.int32)
    tokens = np.array([data.draw(st.sampled_from(vocabulary.tolist())) for _ in range(n)], np.int32)
    begun = data.draw(st.booleans())
    left = "\r" if begun else ""
    start = np.array([0, n, 2 * n], np.int64)
    made = line_ends.translate_trees(start, np.tile(tokens, 2), np.tile(parents, 2), np.array([BEGUN if begun else CRLF, LF], np.int8))
    assert made.tokens[made.start[1] :].tolist() == tokens.tolist()
    assert made.parents[made.start[1] :].tolist() == parents.tolist()

    def path(tokens: np.ndarray, parents: np.ndarray, node: int) -> list[int]:
        return [] if node < 0 else [*path(tokens, parents, int(parents[node])), int(tokens[node])]

    end = int(made.start[1])
    seen = set()
    for node in range(end):
        assert made.parents[node] < node
        key = int(made.parents[node]), int(made.tokens[node])
        assert key not in seen, "siblings differ"
        seen.add(key)
        text = left + encoder.decode(path(made.tokens[:end], made.parents[:end], node))
        origin = encoder.decode(path(tokens, parents, int(made.origins[node])))
        assert crlf(origin).startswith(text)


def test_tokens_that_the_tokenizer_does_not_have_are_dropped(encoder: Encoder, line_ends: LineEnds) -> None:
    letter, beyond = int(ids_of(encoder, "a")[0]), encoder.vocab_size
    tokens, parents = np.array([beyond, letter, letter, beyond + 7] * 2, np.int32), np.array([-1, 0, -1, 2] * 2, np.int32)
    made = line_ends.translate_trees(np.array([0, 4, 8], np.int64), tokens, parents, np.array([CRLF, LF], np.int8))
    assert made.start.tolist() == [0, 1, 2]
    assert made.tokens.tolist() == [letter, letter]
    assert made.parents.tolist() == [-1, -1]


def accepted(drafter: DatastoreDrafter, ids: np.ndarray) -> float:
    """Tokens that a draft has right, on average over a text that is written from its middle on."""
    at, slot, lengths = len(ids) // 2, np.zeros(1, np.int32), []
    drafter.begin(0, ids[:at])
    while at < len(ids) - 64:
        drafts, node, n = drafter.propose(slot), -1, 0
        while (below := np.flatnonzero((drafts.parents == node) & (drafts.tokens == ids[at + n]))).size:
            node, n = int(below[0]), n + 1
        lengths.append(n)
        drafter.observe(slot, np.array([0, n + 1], np.int64), ids[at : at + n + 1])
        at += n + 1
    drafter.end(0)
    return float(np.mean(lengths))


@pytest.mark.parametrize("tree", ["LF", "CRLF"])
def test_drafts_come_whatever_line_ends_tree_and_request_have(encoder: Encoder, tree: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for path, text in zip(SOURCES, TEXTS, strict=True):
        (tmp_path / "in" / path.name).write_bytes((text if tree == "LF" else crlf(text)).encode())
    build([tmp_path / "in"], tmp_path / "store", Tokenizer.from_str(encoder.json.decode()), encoder.name)
    with Datastore.open(tmp_path / "store") as store:
        drafter = DatastoreDrafter({"store": store}, 1, similar=False)
        assert drafter.line_ends is not None
        assert drafter.line_ends.result(60) is not None
        same = np.mean([accepted(drafter, ids_of(encoder, text)) for text in TEXTS[:3]])
        other = np.mean([accepted(drafter, ids_of(encoder, crlf(text))) for text in TEXTS[:3]])
    assert same > 12
    assert other > 0.5 * same


def test_similar_files_have_the_requests_line_ends(tmp_path: Path) -> None:
    backend = trained(LIKE_QWEN)
    encoder = Encoder(backend, "Qwen")
    (tmp_path / "in").mkdir()
    for path, text in zip(SOURCES, TEXTS, strict=True):
        (tmp_path / "in" / path.name).write_text(text)
    build([tmp_path / "in"], tmp_path / "store", backend, "Qwen", router=True)
    with Datastore.open(tmp_path / "store") as store:
        drafter = DatastoreDrafter({"store": store}, 1)
        assert drafter.line_ends is not None
        drafter.line_ends.result(60)
        plain = drafter.find_similar(ids_of(encoder, TEXTS[0][:3000]))
        with_crlf = drafter.find_similar(ids_of(encoder, crlf(TEXTS[0][:3000])))
        of_less = DatastoreDrafter({"store": store}, 1, vocab_size=200).find_similar(ids_of(encoder, TEXTS[0][:3000]))
    assert plain is not None
    assert with_crlf is not None
    text = encoder.decode(plain[plain >= 0].tolist())
    assert len(text) > 1000
    assert encoder.decode(with_crlf[with_crlf >= 0].tolist()) == crlf(text)
    assert of_less is not None
    assert of_less.tolist() == plain[plain < 200].tolist()  # a store may have more tokens than the model
